"""W ranks in one process: the real engine, one rank after the other, without waiting.

1. The coordinator runs as it is. When it gathers, each other rank is run up to its own gather of
   the same number; a scatter or broadcast that has no answer yet stops it (`_NoAnswer`).
2. A rank is run from its beginning each time, with the answers that it has: its engine is the real
   one, and nothing of it has to be kept between two of its steps.
3. Where all ranks are to say the same (`Coordinator.alike`), the others are run once, when they
   have to say something else; what they said before is compared with what the coordinator did.
4. Seconds of the coordinator are those outside the others' runs. A rank's are those of its last
   run, which is whole.
5. What the others hold lies in a file (`Aside`): the memory of this process is the coordinator's,
   with the messages that it has received and not yet let go.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from xckpt.core.geometry.spread import Processes
from xckpt.engine.ranks.group import KeptPlans

LONG = 16
"""Elements of a tuple that many share."""


class _NoAnswer(BaseException):
    """The rank would wait for the coordinator here."""


class Aside:
    """Values in a file, so that they take no memory; long tuples, which many share, stay."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._long: dict[int, object] = {}
        self._end = 0
        self._last: tuple[object, tuple[int, int]] = None, (0, 0)

    def put(self, value: object) -> tuple[int, int]:
        """Where the value is now."""
        if self._last[0] is not value:
            buffer = io.BytesIO()
            pickler = pickle.Pickler(buffer)
            pickler.persistent_id = self._long_one
            pickler.dump(value)
            data = buffer.getvalue()
            os.pwrite(self._descriptor, data, self._end)
            self._last = value, (self._end, len(data))
            self._end += len(data)
        return self._last[1]

    def get(self, where: tuple[int, int]) -> Any:
        """The value that is there."""
        start, size = where
        unpickler = pickle.Unpickler(io.BytesIO(os.pread(self._descriptor, size, start)))
        unpickler.persistent_load = self._long.__getitem__
        return unpickler.load()

    def _long_one(self, value: object) -> int | None:
        if not isinstance(value, tuple) or len(value) < LONG:
            return None
        self._long[id(value)] = value
        return id(value)


@dataclass(slots=True)
class Traffic:
    """Bytes between the coordinator and the others, of each collective in turn."""

    up: list[int] = field(default_factory=list[int])
    down: list[int] = field(default_factory=list[int])


class Rank:
    """A rank that is not the coordinator, as a `Group`: it stops where it would wait."""

    coordinator: int = 0

    def __init__(self, rank: int, size: int, aside: Aside) -> None:
        self.rank, self.size, self.kept_plans = rank, size, KeptPlans()
        self.processes: Processes | None = None
        self._aside = aside
        self._answers: list[tuple[int, int]] = []
        self.sent: list[bytes] = []
        self._taken = 0

    def again(self) -> None:
        """From the beginning, with the answers so far."""
        self.sent, self._taken = [], 0

    def hear(self, answer: bytes) -> None:
        """Take an answer of the coordinator."""
        self._answers.append(self._aside.put(answer))

    def gather(self, data: bytes) -> list[bytes] | None:
        """What is sent; the coordinator takes the last of it."""
        self.sent.append(data)
        return None

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """The next answer."""
        if self._taken == len(self._answers):
            raise _NoAnswer
        self._taken += 1
        return self._aside.get(self._answers[self._taken - 1])

    def broadcast(self, data: bytes | None) -> bytes:
        """The next answer."""
        return self.scatter(None)


class Coordinator:
    """Rank 0, as a `Group` in which the others are run when they are waited for."""

    rank: int = 0
    coordinator: int = 0

    def __init__(
        self, others: Sequence[Rank], run: Callable[[Rank], object], kept_plans: KeptPlans
    ) -> None:
        self._others, self._run, self.kept_plans = others, run, kept_plans
        self.processes: Processes | None = None
        self.size = 1 + len(others)
        """May be set to more: those that are not there say what the last one says."""
        self.traffic = Traffic()
        self.alike = 0
        """In how many gathers, from the first on, all ranks say the same."""
        self._said: list[bytes] = []
        self.elsewhere = 0.0
        """Processor seconds of the other ranks."""
        self.planned = self.gathered = 0.0
        """Processor seconds of this rank after its last scatter, and after its last gather."""

    def seconds(self) -> float:
        """Processor seconds of this rank until now."""
        return time.process_time() - self.elsewhere

    def gather(self, data: bytes) -> list[bytes] | None:
        """Everyone's bytes: the others are run until they have sent theirs."""
        began = time.process_time()
        if len(self._said) < self.alike:
            self._said.append(data)
            gathered = [data] * self.size
        else:
            gathered = [data, *map(self._message, self._others)]
            gathered += gathered[-1:] * (self.size - len(gathered))
        self.elsewhere += time.process_time() - began
        self.gathered = self.seconds()
        self.traffic.up.append(sum(map(len, gathered[1:])))
        return gathered

    def _message(self, other: Rank) -> bytes:
        other.again()
        try:
            self._run(other)
        except _NoAnswer:
            assert other.sent[: self.alike] == self._said, f"rank {other.rank} says something else"
            message, other.sent = other.sent[-1], []
            return message
        raise AssertionError(f"rank {other.rank} ended before the coordinator")

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """An answer for each."""
        assert data is not None
        self.planned = self.seconds()
        return self._answer(data)

    def _answer(self, data: Sequence[bytes]) -> bytes:
        began = time.process_time()
        for other in self._others:
            other.hear(data[other.rank])
        self.elsewhere += time.process_time() - began
        self.traffic.down.append(sum(map(len, data[1:])))
        return data[0]

    def broadcast(self, data: bytes | None) -> bytes:
        """One answer for all."""
        assert data is not None
        return self._answer([data] * self.size)
