"""What ranks call that wait long, in the store of their process group.

1. A rank that has waited for half of the timeout writes what it calls, and over which connections.
2. A rank that gives another up looks there: the other may wait for it in another call.
3. A rank that goes on wipes out what it wrote.

A store may not answer (its server may be a rank that is stopped): then nothing more is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from xckpt.engine.ranks.group import other_call
from xckpt.engine.ranks.waiting import Board, Waiting, wait_in_thread
from xckpt.errors import StorageError

PURPOSES: Final = "xckpt", "xckpt/background"
"""The connections of a process group: see `xckpt.torch.group`."""
STORE_SECONDS: Final = 0.25
"""How long the store has to answer."""
NOTHING: Final = "-"


class StoreBoard(Board):
    """What the ranks of a process group call, for one of them and one of its `PURPOSES`.

    Args:
        store: of the process group.
        purpose: what the connections are for on which this rank waits.
        rank: this process's.
        coordinator: the rank that it is connected to.
        call: see `Board.call`.

    Example:
        >>> store = dist.HashStore()
        >>> one, other = (StoreBoard(store, PURPOSES[n], n, 0, 1 + n) for n in range(2))
        >>> one.elsewhere(1)
        ''
        >>> other.tell()
        >>> one.elsewhere(1).split(";")[0]
        'it calls save_async, and rank 0 save'
        >>> other.forget()
        >>> one.elsewhere(1)
        ''
    """

    def __init__(
        self, store: dist.Store, purpose: str, rank: int, coordinator: int, call: int
    ) -> None:
        self.call = call
        self._store = dist.PrefixStore("xckpt/calls", store)
        self._purpose, self._rank, self._coordinator = purpose, rank, coordinator
        self._has_told = False
        self._is_deaf = False
        """Whether the store has not answered."""

    def tell(self) -> None:
        """See `Board`."""
        if not self._has_told:
            self._has_told = True
            self._write(f"{self._coordinator} {self.call}")

    def forget(self) -> None:
        """See `Board`."""
        if self._has_told:
            self._has_told = False
            self._write(NOTHING)

    def elsewhere(self, rank: int) -> str:
        """See `Board`."""
        found: list[str] = []
        self._ask(lambda: found.extend(self._read(rank, purpose) for purpose in PURPOSES))
        for purpose, said in zip(PURPOSES, found, strict=False):
            coordinator, _, call = said.partition(" ")
            if call and (purpose, coordinator) != (self._purpose, str(self._coordinator)):
                why = other_call((rank, int(call)), (self._rank, self.call)).message
                if coordinator == str(self._coordinator):
                    return why
                return (
                    f"its coordinator is rank {coordinator}, and that of rank {self._rank} is "
                    f"{self._coordinator}; {why}"
                )
        return ""

    def _read(self, rank: int, purpose: str) -> str:
        key = f"{purpose}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else NOTHING

    def _write(self, said: str) -> None:
        self._ask(lambda: self._store.set(f"{self._purpose}/{self._rank}", said))

    def _ask(self, call: Callable[[], None]) -> None:
        if self._is_deaf:
            return
        waiting = Waiting(self._rank, self._coordinator, list)
        try:
            self._is_deaf = not wait_in_thread(call, waiting, STORE_SECONDS)
        except (RuntimeError, StorageError):  # the store's, or there is no thread to wait in
            self._is_deaf = True
