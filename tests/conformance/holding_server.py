"""An object store that answers a request that changes something only when no other one comes.

So whatever a client sends without waiting is under way together, and what it waits for is not: the
recording shows all the freedom that a store has.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from conformance.bucket import Change, Event, Objects, Recording
from tests.storage.gcs_server import GCSServer

QUIET = 0.03
"""Seconds without a new request, after which one is dealt with."""


class HoldingServer(GCSServer):
    """The server, with one bucket."""

    def __init__(self, bucket: str, seed: int = 0) -> None:
        super().__init__(bucket)
        self.bucket = self.buckets[bucket]
        self._pick = random.Random(seed)
        self._turn = threading.Condition()
        self._changes: list[Change] = []
        self._waiting: list[int] = []
        self._last = 0.0
        self._events: list[Event] | None = None

    def record(self, prefix: str, action: Callable[[], None]) -> Recording:
        """What an action does to the objects below a prefix; their keys are relative to it."""
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
        return Recording(before, tuple(events))

    def objects(self, prefix: str) -> Objects:
        """What is below a prefix."""
        with self.bucket.lock:
            found = dict(self.bucket.objects)
        return {
            name.removeprefix(prefix): each
            for name, each in found.items()
            if name.startswith(prefix)
        }

    def began(self, name: str, content: bytes | None, only_if: int | None) -> int:
        if self._events is None:
            return -1
        with self._turn:
            number = len(self._changes)
            self._changes.append(Change(name.partition("/")[2], content, only_if, -1 - number))
            self._events.append(Event(number, self._changes[number], ended=False))
            self._waiting.append(number)
            self._last = time.monotonic()
            self._turn.wait_for(lambda: number not in self._waiting)
        return number

    def ended(self, number: int, generation: int) -> None:
        if number < 0 or self._events is None:
            return
        with self._turn:
            change = self._changes[number]
            if change.content is not None and generation > 0:
                change = replace(change, generation=generation)
            self._events.append(Event(number, change, ended=True))
            self._last = time.monotonic()

    def _deal(self, stop: threading.Event) -> None:
        """Let one request through at a time, any of those that wait."""
        while not stop.wait(QUIET / 4):
            with self._turn:
                if self._waiting and time.monotonic() - self._last > QUIET:
                    self._waiting.remove(self._pick.choice(self._waiting))
                    self._last = time.monotonic()
                    self._turn.notify_all()
