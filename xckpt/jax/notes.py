"""Notes in JAX's key-value store, by ranks that suspect others, give up, leave or are alive.

1. A note lies under the number of the save or load and the rank that wrote it.
2. A rank that waits looks now and then at the notes. It raises the error of a rank that has given
   up or left, and learns of the ranks on which others have timed out.
3. Each rank notes what it calls now. A rank that waits gives up if the coordinator is in the same
   save or load with another call; a coordinator that waits, if any rank is.
4. A rank that works, or a coordinator that waits itself, leaves a note that it is alive, in place
   of the last one; it says how long ago it made progress.
5. Only the coordinator waits for all ranks, so only it reads all notes. The other ranks read what
   is below ``all``: if they read the notes of all ranks too, each look would take long.
6. Writing takes only a moment, even if the process that has the service is stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from xckpt.engine.ranks.group import other_call
from xckpt.engine.ranks.patience import GRACE_SECONDS, suspected_until
from xckpt.engine.ranks.waiting import SILENT, given_up
from xckpt.errors import RankFailure, StorageError
from xckpt.jax.service import InTime, silent_ranks

_encode = msgspec.msgpack.Encoder().encode
_ranks = msgspec.msgpack.Decoder(list[int]).decode
_beat = msgspec.msgpack.Decoder(tuple[int, float]).decode
_called = msgspec.msgpack.Decoder(tuple[str, int]).decode
_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode

CALLED: Final = "xckpt/called"
"""Where each rank says what it calls, and in which save or load."""


class Notes:
    """The notes of one group, as one rank leaves and finds them.

    Args:
        client: the coordination service.
        rank: the rank that leaves notes.
        coordinator: the rank whose verdict others wait for.
        timeout: seconds that a silent rank is waited for.
    """

    def __init__(self, client: InTime, rank: int, coordinator: int, timeout: float) -> None:
        self._client = client
        self._rank = rank
        self._coordinator = coordinator
        self._timeout = timeout
        self._beats = itertools.count()
        self._seen: dict[int, tuple[int, float]] = {}
        self._heard: dict[int, float] = {}
        """Rank -> when it last made progress in this save or load, as far as `look` has seen."""
        self._suspects: dict[int, float] = {}
        """Rank -> until when it is waited for, at most."""
        self._call = 0
        """What this rank calls, if that is known; see `CALLS`."""
        self.operation: str = ""
        """The save or load, as this rank counts them; empty before the first."""

    def begin(self, operation: str) -> None:
        """The next save or load begins."""
        self.operation, self._call = operation, 0
        self._suspects.clear()
        self._seen.clear()
        self._heard.clear()

    def renew(self) -> None:
        """The service has answered, or a step begins: its time starts again."""
        until = time.monotonic() + self._timeout + GRACE_SECONDS
        self._client.until = min(until, self._suspects.get(0, until))

    def deadline(self, rank: int, began: float, seconds: float) -> float:
        """Until when to wait for a silent rank, in a wait that ``began`` earlier."""
        deadline = max(began, self._heard.get(rank, began)) + seconds
        return min(deadline, self._suspects.get(rank, deadline))

    def excuse(self, away: float) -> None:
        """Do not count as silence the seconds in which this process did not run."""
        now = time.monotonic()
        self._heard = {rank: min(now, heard + away) for rank, heard in self._heard.items()}

    def say_alive(self, seconds_ago: float) -> None:
        """Say that this rank makes progress."""
        folder = "all/alive" if self._rank == self._coordinator else "alive"
        self._write(f"{folder}/{self._rank}", (next(self._beats), seconds_ago), again=True)

    def leave(self, failures: Sequence[RankFailure]) -> None:
        """Say which ranks are lost or have left, if that takes only a moment."""
        self._write(f"all/end/{self._rank}", list(failures))

    def suspect(self, ranks: Sequence[int]) -> None:
        """Say on which ranks this one has timed out elsewhere, if that takes only a moment."""
        self._hurry(ranks)
        # The coordinator may have timed out on a rank that itself waits for a lost one.
        self._write(f"all/suspects/{self._rank}", list(ranks))

    def _hurry(self, ranks: Sequence[int]) -> None:
        until = suspected_until(is_coordinator=self._rank == self._coordinator)
        for rank in ranks:
            self._suspects.setdefault(rank, until)

    def call(self, call: int) -> None:
        """Say what this rank calls, by its place in `CALLS`."""
        self._call = call
        self._put(f"{CALLED}/{self._rank}", (self.operation, call), again=True)

    def has_ended(self, operation: int) -> bool:
        """Whether some rank has given up a save or load, or left it."""
        with contextlib.suppress(RuntimeError):
            self.renew()
            return bool(self._client.key_value_dir_get_bytes(f"xckpt/{operation}/note/all/end"))
        return False

    def newest_call(self) -> int:
        """The newest save or load in which any rank is; -1 if none is known."""
        with contextlib.suppress(RuntimeError):
            self.renew()
            said = self._client.key_value_dir_get_bytes(CALLED)
            return max((int(_called(note)[0]) for _, note in said), default=-1)
        return -1

    def compare_calls(self) -> None:
        """Leave if another rank makes another call in this save or load.

        Raises:
            RanksFailedError: one does.
        """
        if not self._call:  # a rank that has failed before its call says no more of it
            return
        if self._rank == self._coordinator:
            said = self._client.key_value_dir_get_bytes(CALLED)
        else:
            key = f"{CALLED}/{self._coordinator}"
            said = [(key, note)] if (note := self._client.value_of(key)) else []
        for key, note in said:
            (operation, call), rank = _called(note), int(key.rpartition("/")[2])
            if operation == self.operation and call not in (0, self._call):
                failures = [other_call((rank, call), (self._rank, self._call))]
                self.leave(failures)
                raise given_up(failures)

    @property
    def suspects_some(self) -> bool:
        """Whether some rank is waited for only a moment longer."""
        return bool(self._suspects)

    def look(self) -> None:
        """Read whether the coordinator is alive (or on it: all ranks), and whom others suspect.

        Raises:
            RanksFailedError: a rank has given up or left; the failures are those that it named.
        """
        below = self._place if self._rank == self._coordinator else f"{self._place}/all"
        for key, note in self._client.key_value_dir_get_bytes(below):
            about, _, rank = key.rpartition("/")
            if about.endswith("/suspects"):
                self._hurry(_ranks(note))
                continue
            if about.endswith("/alive"):
                self._hear(int(rank), _beat(note))
                continue
            failures = _failures(note)
            if failures[0].kind == SILENT:
                raise silent_ranks([failure.rank for failure in failures], self._timeout)
            raise given_up(failures)
        self.renew()

    def _hear(self, rank: int, beat: tuple[int, float]) -> None:
        if self._seen.get(rank) != beat:
            self._seen[rank] = beat
            got_on = time.monotonic() - beat[1]
            self._heard[rank] = max(got_on, self._heard.get(rank, got_on))

    def _write(self, key: str, value: object, *, again: bool = False) -> None:
        self._put(f"{self._place}/{key}", value, again=again)

    def _put(self, key: str, value: object, *, again: bool = False) -> None:
        self._client.until = time.monotonic() + GRACE_SECONDS / 2
        with contextlib.suppress(RuntimeError, StorageError):  # no answer, or no thread to wait
            self._client.key_value_set_bytes(key, _encode(value), again)

    @property
    def _place(self) -> str:
        return f"xckpt/{self.operation}/note"
