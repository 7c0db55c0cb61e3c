"""An object store that answers a request that changes something only when no other one comes.

So whatever a client sends without waiting is under way together, and what it waits for is not: the
recording shows all the freedom that a store has.

1. A server calls `Holding.began` when a request to write or delete an object has come. The call
   returns when it is this request's turn.
2. It does what is asked, calls `Holding.ended`, and answers.
3. `Holding.record` gives the turns while an action runs, one at a time, to any of those that wait.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from conformance.crash.bucket import Change, Event, Objects, Recording, apply

QUIET = 0.015
"""Seconds without a new request, after which one is dealt with."""


class Holding:
    """What a holding server of any kind has: the turns, and the recording of them."""

    url: str
    """Of the bucket, as xckpt takes it."""

    def __init__(self, seed: int) -> None:
        self._pick = random.Random(seed)
        self._turn = threading.Condition()
        self._changes: list[Change] = []
        self._waiting: list[int] = []
        self._last = 0.0
        self._events: list[Event] | None = None
        self.lost: dict[str, list[int]] = {}
        """The last part of a key -> what its next changes are answered, though they happened."""
        self.late: dict[str, bytes] = {}
        """The last part of a key -> what is to be written there after its writer has given up; it
        is answered 400 instead. Empty until a writer comes."""

    def environment(self) -> dict[str, str]:
        """What leads TensorStore to this server."""
        raise NotImplementedError

    def everything(self) -> Objects:
        """What the bucket holds."""
        raise NotImplementedError

    def record(self, prefix: str, action: Callable[[], None]) -> Recording:
        """What an action does to the objects below a prefix; their keys are relative to it.

        Raises:
            AssertionError: what is recorded would leave other objects than there are.
        """
        before = self.objects(prefix)
        self._events = []
        stop = threading.Event()
        thread = threading.Thread(target=self._deal, args=(stop,))
        thread.start()
        try:
            action()
        finally:
            events, self._events = self._events, None
            stop.set()
            thread.join()
        done = [event.change for event in events if event.ended]
        assert apply(before, done) == self.objects(prefix), "the store did something else"
        return Recording(before, tuple(events))

    def objects(self, prefix: str) -> Objects:
        """What is below a prefix."""
        return {
            name.removeprefix(prefix): each
            for name, each in self.everything().items()
            if name.startswith(prefix)
        }

    def refused(self, name: str, content: bytes | None) -> int | None:
        """A status to answer instead of doing what is asked, if it is not to be done."""
        key = name.rpartition("/")[2]
        if content is None or self.late.get(key) != b"":
            return None
        self.late[key] = content
        return 400

    def began(
        self, name: str, content: bytes | None, only_if: int | None, version: int | None = None
    ) -> int:
        """Wait for the turn of a request; its number.

        Args:
            name: the object's; the recording is of a folder, whose name comes first.
            content: None to delete it.
            only_if: the condition of the request (see `Change`).
            version: what the object's is to be, where that is known before.
        """
        if self._events is None:
            return -1
        with self._turn:
            number = len(self._changes)
            key = name.partition("/")[2]
            self._changes.append(
                Change(key, content, only_if, -1 - number if version is None else version)
            )
            self._events.append(Event(number, self._changes[number], ended=False))
            self._waiting.append(number)
            self._last = time.monotonic()
            self._turn.wait_for(lambda: number not in self._waiting)
        return number

    def ended(self, number: int, name: str, version: int) -> int | None:
        """A request was dealt with.

        Args:
            number: what `began` said.
            name: the object's.
            version: what the object has now, if it was written.

        Returns:
            The status to answer instead of the true one.
        """
        if number >= 0 and self._events is not None:
            with self._turn:
                change = self._changes[number]
                if change.content is not None and version > 0:
                    change = replace(change, version=version)
                self._events.append(Event(number, change, ended=True))
                self._last = time.monotonic()
        answers = self.lost.get(name.rpartition("/")[2])
        return answers.pop(0) if answers else None

    def _deal(self, stop: threading.Event) -> None:
        """Let one request through at a time, any of those that wait."""
        while not stop.wait(QUIET / 4):
            with self._turn:
                if self._waiting and time.monotonic() - self._last > QUIET:
                    self._waiting.remove(self._pick.choice(self._waiting))
                    self._last = time.monotonic()
                    self._turn.notify_all()
