"""Shared memory in slots of one size, each with a count of the users that still need its content.
There are two kinds of slots, for chunks that a rank reads and for chunks from other hosts, so that
a rank whose memory is full of chunks to be sent still receives.
"""

from __future__ import annotations

import os
import tempfile
from queue import LifoQueue
from typing import IO, Final

import numpy as np

from xckpt.core.plan.host_reads import SharedReads
from xckpt.core.plan.wanted import Countdown
from xckpt.storage.host.peer import Bytes, mapped

_ALIGNMENT: Final = 64
"""Bytes; enough for every dtype and every vector instruction."""


class Slots:
    """The shared memory of one rank; it has none before `make`."""

    def __init__(self) -> None:
        self.memory: Bytes = np.empty((0, 0), np.uint8)
        """A slot a row."""
        self._own = 0
        """How many are for chunks that this rank reads; they come first."""
        self._free: tuple[LifoQueue[int], LifoQueue[int]] = LifoQueue(), LifoQueue()
        """Numbers of the slots that hold nothing, of either kind; after a failure any number. The
        slot that became free last is used first: its pages are there, in all processes, and perhaps
        in a cache."""
        self._users: dict[int, Countdown] = {}
        """Number of a slot -> how many users still need its content."""
        self._failure: BaseException | None = None

    def make(self, share: SharedReads, slot_bytes: int, budget: int) -> IO[bytes]:
        """Get the memory for a rank's share; its file, for the caller to close.

        Args:
            share: what the rank publishes, sends and receives.
            slot_bytes: its largest chunk, bytes.
            budget: bytes that all slots may take; each kind that is needed has at least one.
        """
        slot_bytes = max(1, -(-slot_bytes // _ALIGNMENT)) * _ALIGNMENT
        own, received = len(share.own), len(share.received)
        most = max(1, budget // slot_bytes // (2 if own and received else 1))
        self._own, received = min(own, most), min(received, most)
        file = _anonymous_file()
        file.truncate((self._own + received) * slot_bytes)
        self.memory = mapped(file.fileno(), self._own + received, slot_bytes)
        for number in range(len(self.memory)):
            self._free[number >= self._own].put(number)
        return file

    def take(self, size: int, *, received: bool = False) -> tuple[int, Bytes]:
        """A free slot's number and its first ``size`` bytes; waits until there is one.

        Args:
            size: bytes.
            received: whether it is for a chunk from another host.

        Raises:
            BaseException: what `fail` was given.
        """
        free = self._free[received]
        number = free.get()
        if self._failure is not None:
            free.put(number)  # for the next waiting thread
            raise self._failure
        return number, self.memory[number, :size]

    def use(self, slot: int, users: int) -> None:
        """Keep a slot until ``users`` callers have called `release`."""
        self._users[slot] = Countdown(users)

    def is_used(self, slot: int) -> bool:
        """Whether there is such a slot, and it has held something."""
        return slot in self._users

    def release(self, slot: int) -> None:
        """Count one user of a slot as done; with the last one the slot is free."""
        if self._users[slot].land(1) == 0:
            self._free[slot >= self._own].put(slot)

    def fail(self, error: BaseException) -> None:
        """Make all waits for a slot fail: some slots will not be free again."""
        self._failure = self._failure or error
        for free in self._free:
            free.put(0)

    def let_go(self) -> None:
        """Drop the memory."""
        self.memory = np.empty((0, 0), np.uint8)


def _anonymous_file() -> IO[bytes]:
    """Memory without a name; the kernel frees it with its last user."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("xckpt"), "r+b")
    return tempfile.TemporaryFile()
