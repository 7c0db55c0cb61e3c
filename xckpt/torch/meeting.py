"""How the processes of a torch process group connect: through its store, in bounded time.

A call to a store can hang for minutes (its server may be a rank that is stopped), so each is made
in a thread and given up in time.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

import msgspec
import torch
import torch.distributed as dist

from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.links import Links
from xckpt.engine.ranks.patience import GRACE_SECONDS, KILLED
from xckpt.engine.ranks.rendezvous import Invitation, invite, reach
from xckpt.engine.ranks.star import Star
from xckpt.engine.ranks.waiting import CLOSED, SILENT, Waiting, given_up, silence, wait_in_thread
from xckpt.errors import RankFailure, RanksFailedError, StorageError
from xckpt.torch.board import StoreBoard

TAG: Final = 0x78636B70
"""The tag of a byte that is never sent; users have other tags."""
INVITATION: Final = "invitation"
NOTE: Final = "given up"
"""The keys of the coordinator's invitation, and of the note of a rank that gives others up."""
NOTE_SECONDS: Final = 0.25
"""How long a rank that gives up tries to leave the note."""
LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks at the store, at most."""

_encode = msgspec.msgpack.Encoder().encode
_invitation = msgspec.msgpack.Decoder(Invitation).decode
_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode


def join(
    group: dist.ProcessGroup,
    purpose: str,
    rank: int,
    coordinator: int,
    timeout: float,
    *,
    has_gloo: bool,
    call: int,
) -> tuple[Star, Links]:
    """Connect a rank to the others.

    Args:
        group: the processes.
        purpose: what for; there is one star for each.
        rank: this process's.
        coordinator: the rank that invites.
        timeout: seconds to wait for the coordinator, or the store.
        has_gloo: whether the group has a gloo backend for the CPU.
        call: what this rank calls, by its place in `CALLS`.

    Returns:
        The star, and its connections, which the caller closes at the end of the group.

    Raises:
        RanksFailedError: the coordinator did not come, or others have given up.
    """
    store = dist.PrefixStore(f"{purpose}/{coordinator}", group.get_group_store())
    is_coordinator = rank == coordinator
    deaths = _Deaths(group if has_gloo else None)
    meet: Callable[[_Meeting], None] = _Meeting.invite if is_coordinator else _Meeting.accept
    board = StoreBoard(group.get_group_store(), purpose, rank, coordinator, call)
    meeting = _Meeting(store, rank, coordinator, group.size(), timeout, board)
    waiting = Waiting(rank, coordinator, lambda: [coordinator])
    seconds = timeout if is_coordinator else timeout + GRACE_SECONDS
    note, noted = partial(_leave_note, store, waiting), partial(_find_note, store, waiting)
    is_dead = partial(deaths.of, coordinator)
    try:
        has_met = wait_in_thread(partial(meet, meeting), waiting, seconds, lambda: bool(is_dead()))
    except RanksFailedError:
        raise
    except (OSError, RuntimeError) as error:
        failures = [_unmet(error, rank, coordinator)]
        note(failures)
        raise given_up(failures) from error
    if not has_met:
        meeting.is_over = True
        failures = [_absent(coordinator, is_dead(), timeout, board)]
        note(failures)
        raise given_up(failures)
    links = meeting.links
    assert links is not None
    return Star(rank, group.size(), coordinator, links, note, deaths.of, noted, board), links


def _absent(coordinator: int, death: str, timeout: float, board: StoreBoard) -> RankFailure:
    """Why the ranks did not meet in time: the coordinator has died, or is silent."""
    if death:
        return RankFailure(coordinator, CLOSED, KILLED.format(death))
    return RankFailure(coordinator, SILENT, silence(timeout, board.elsewhere(coordinator)))


def _unmet(error: Exception, rank: int, coordinator: int) -> RankFailure:
    """Why the ranks did not meet: the store, or this process, which may open no file, failed."""
    if isinstance(error, dist.DistError):
        return RankFailure(coordinator, CLOSED, f"the store of the process group: {error}")
    return RankFailure.of(rank, naming_limit(error))


class _Meeting:
    """One rank's part, which runs in a thread."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        coordinator: int,
        size: int,
        seconds: float,
        board: StoreBoard,
    ) -> None:
        self.links: Links | None = None
        self.is_over = False
        """Whether the meeting was given up."""
        self._store = store
        self._rank = rank
        self._coordinator = coordinator
        self._size = size
        self._seconds = seconds
        self._board = board

    def invite(self) -> None:
        """The coordinator: listen, and say where."""
        self._raise_noted()
        try:
            links, invitation = invite(self._size, _server_of(self._store))
        except OSError as error:
            failures = [RankFailure.of(self._rank, naming_limit(error))]
            self._store.set(NOTE, cast(str, _encode(failures)))
            raise given_up(failures) from error
        self._store.set(INVITATION, cast(str, _encode(invitation)))
        self._take(links)

    def accept(self) -> None:
        """Another rank: wait for the invitation, and connect."""
        pause, long = 0.001, time.monotonic() + self._seconds / 2
        while not self.is_over:
            self._raise_noted()
            if self._store.check([INVITATION]):
                self._board.forget()
                self._connect()
                return
            if time.monotonic() > long:
                self._board.tell()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connect(self) -> None:
        invitation = _invitation(self._store.get(INVITATION))
        try:
            links = reach(invitation, self._rank, self._coordinator, self._seconds)
        except ConnectionError as error:
            lost = [RankFailure(self._coordinator, CLOSED, str(error))]
            raise given_up(_await_note(self._store) or lost) from error
        self._take(links)

    def _take(self, links: Links) -> None:
        self.links = links
        if self.is_over:
            links.close()

    def _raise_noted(self) -> None:
        if self._store.check([NOTE]):
            raise given_up(_failures(self._store.get(NOTE)))


class _Deaths:
    """What the gloo backend of a process group knows of dead processes, where it has one.

    gloo notices at once that a process has died, and refuses to receive from it. So a byte is asked
    for that no process ever sends; the request is dropped. This keeps no group alive: its stars,
    which ask here, go with it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self._next: dict[int, tuple[float, float]] = {}
        """Rank -> when it is asked next, and the pause after that."""

    def of(self, rank: int) -> str:
        """Why a rank is known to be dead; empty if it is not."""
        now = time.monotonic()
        due, pause = self._next.get(rank, (now, 0.2))
        group = None if self._group is None else self._group()
        if group is None or now < due or rank == group.rank():
            return ""
        self._next[rank] = now + pause, min(2 * pause, 30.0)
        try:
            group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], rank, TAG)
        except RuntimeError as error:
            self._next[rank] = now, 0.0
            return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". This is typically")[0]
        return ""


def _leave_note(store: dist.Store, waiting: Waiting, failures: Sequence[RankFailure]) -> None:
    def leave() -> None:
        # torch stores bytes as they are, though its types say otherwise.
        store.set(NOTE, cast(str, _encode(list(failures))))

    # Where the store has died with a rank, no late one can ask it.
    with contextlib.suppress(RuntimeError, StorageError):
        wait_in_thread(leave, waiting, NOTE_SECONDS)


def _find_note(store: dist.Store, waiting: Waiting) -> Sequence[RankFailure]:
    """What a rank says in the store that gave others up; nothing if the store does not answer."""
    found: list[RankFailure] = []
    with contextlib.suppress(RuntimeError, StorageError):
        wait_in_thread(lambda: found.extend(_await_note(store)), waiting, 3 * NOTE_SECONDS)
    return found


def _await_note(store: dist.Store) -> Sequence[RankFailure]:
    """What a rank says that gave others up, perhaps just now; nothing if none did."""
    until = time.monotonic() + 2 * NOTE_SECONDS
    while not store.check([NOTE]):
        if time.monotonic() > until:
            return ()
        time.sleep(LONGEST_PAUSE)
    return _failures(store.get(NOTE))


def _server_of(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of the server behind a store, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None
