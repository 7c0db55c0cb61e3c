"""Steps over connections between the coordinator and each other rank; no rank is left waiting.

1. Every message carries the numbers of its save or load and of its step, as the sender counts them.
   A message of an earlier save or load is dropped. A rank that is in a later one has left this one.
2. A rank from which nothing is received for the timeout (seconds) is given up. A rank whose
   connection ends, or that announces that it leaves (it was interrupted), is given up at once.
3. The coordinator tells all others which ranks are given up, and why: all raise the same error. A
   coordinator that waits says so to the ranks that have done their part, which wait on. So does a
   rank that works (`say_alive`), and it hears the others meanwhile (`heed`).
4. A rank that has timed out on others elsewhere names them (`suspect`): those that do not answer at
   once are given up.
5. A group that has lost a rank is closed for good. A rank that has merely left can come again: the
   next save or load is another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import msgspec

from xckpt.engine.limits import naming_limit
from xckpt.engine.ranks.connection import AGO, Frame, Kind
from xckpt.engine.ranks.group import KeptPlans, other_call, out_of_order
from xckpt.engine.ranks.links import Links
from xckpt.engine.ranks.patience import GRACE_SECONDS, Patience, ended
from xckpt.engine.ranks.waiting import CLOSED, NO_MESSAGE, SILENT, Board, given_up
from xckpt.errors import RankFailure

FAREWELL_SECONDS: Final = 0.25
"""How long a rank that gives up tries to tell the others."""
Take = Callable[[int], bool]
GiveUp = Callable[[Sequence[RankFailure]], object]

_encode = msgspec.msgpack.Encoder().encode
_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode
_ranks = msgspec.msgpack.Decoder(list[int]).decode


@dataclass(slots=True)
class _Course:
    """How far a rank is, and why it cannot go on: failures, since an error keeps its frames."""

    before: Sequence[RankFailure]
    """Why the last save or load failed, for a rank that joins it late."""
    operation: int = 0
    """The save or load, as this rank counts them."""
    step: int = 0
    failed: Sequence[RankFailure] = ()
    """Why the current save or load has failed."""
    over: Sequence[RankFailure] = ()
    """Why no further step is possible."""

    @property
    def goes_on(self) -> bool:
        return not self.over and not self.failed

    def begin(self) -> None:
        self.operation += 1
        self.step, self.failed = 0, ()

    def next_step(self) -> None:
        if not self.goes_on:
            # The others have raised and are gone: a step would time out on them.
            raise given_up(self.over or self.failed)
        self.step += 1

    def fail(self, failures: Sequence[RankFailure]) -> Sequence[RankFailure]:
        self.failed = self.before = failures
        return failures


class _Frames:
    """What a rank sends the others in a save or load, and takes from them; see `Star`."""

    def __init__(
        self,
        rank: int,
        size: int,
        coordinator: int,
        links: Links,
        on_loss: Callable[[Sequence[RankFailure]], object] = lambda failures: None,
        death: Callable[[int], str] = lambda rank: "",
        noted: Callable[[], Sequence[RankFailure]] = lambda: (),
        board: Board | None = None,
    ) -> None:
        self._rank = rank
        self._size = size
        self._others = [other for other in range(size) if other != rank]
        self._coordinator = coordinator
        self._links = links
        self._on_loss = on_loss
        self._noted = noted
        self._course = _Course([RankFailure(rank, "RuntimeError", "it went on")])
        self._lost: list[RankFailure] = []
        """Ranks that this coordinator has lost and has not announced."""
        self.patience = Patience(rank, coordinator, links, death, board)
        self.board = self.patience.board
        """Its ``call`` is what this rank calls."""
        self.kept_plans = KeptPlans()
        """See `PlanCachingGroup`."""

    def say_alive(self, seconds_ago: float, but: Container[int] = ()) -> None:
        """See `HeartbeatGroup`; ranks that are waited for are left out."""
        for rank, link in list(self._links.to.items()):
            if rank not in but and not link.is_sending:
                self._send(rank, Kind.ALIVE, AGO.pack(seconds_ago))

    def _say_waiting(self) -> Callable[[object], object]:
        """Tells the coordinator that this rank waits for it, from the second beat on."""
        beats = itertools.count()

        def say(missing: object) -> None:
            if next(beats):
                self._send(self._coordinator, Kind.WAITS, b"")

        return say

    def _send(self, rank: int, kind: Kind, data: bytes, operation: int | None = None) -> None:
        number = self._course.operation if operation is None else operation
        if rank in self._links.to and not self._links.to[rank].end:
            self._links.send(rank, Frame(kind, number, self._course.step, data, self.board.call))

    def _receive(
        self, ranks: Sequence[int], timeout: float, say: Callable[[Any], object] | None = None
    ) -> dict[int, bytes]:
        """The message of each rank in this step; ``say`` is for `_wait`."""
        received: dict[int, bytes] = {}

        def take(rank: int) -> bool:
            if (found := self._look(rank)) is not None:
                received[rank] = found
            return rank in received

        self._wait(ranks, take, timeout, say=say)
        if self._rank == self._coordinator:
            self._links.turn(0)  # have others given up, while this process was stopped?
            for rank in ranks:
                self._look(rank)
        return received

    def _look(self, rank: int, *, keep: bool = False) -> bytes | None:
        """A rank's message of this step, if it has come; ``keep`` it for later.

        Raises:
            RanksFailedError: it is lost, has left, or knows of ranks that are lost.
        """
        link = self._links.to.get(rank)
        while link is not None and link.frames:
            kind, operation, step, data, call = link.frames[0]
            if operation > self._course.operation:
                self._fail([RankFailure(rank, "RuntimeError", "it began another save or load")])
            if kind == Kind.MESSAGE and operation == self._course.operation and keep:
                return None
            link.frames.popleft()
            if operation < self._course.operation:
                if kind == Kind.MESSAGE and self._rank == self._coordinator:
                    self._send(rank, Kind.LOST, _encode(list(self._course.before)), operation)
                continue
            try:
                if kind in (Kind.LOST, Kind.LEFT) and (said := _failures(data)):
                    self._fail(said, said_by=rank)
                if kind == Kind.SUSPECTS:
                    self.patience.suspect(_ranks(data))
            except msgspec.DecodeError:
                link.finish(NO_MESSAGE)
            if kind == Kind.MESSAGE and step == self._course.step:
                return data
            met = kind == Kind.WAITS and step == self._course.step and not keep
            if kind == Kind.MESSAGE or (met and self._rank == self._coordinator):
                own = self._rank, self._course.step, self.board.call
                self._fail([_out_of_step((rank, step, call), own)])
        if link is not None and link.end:
            if not link.is_known and (failures := self._noted()):
                self._fail(failures, said_by=rank)
            self._fail([RankFailure(rank, CLOSED, ended(link.end))])
        return None

    def _wait(
        self,
        ranks: Sequence[int],
        take: Take,
        timeout: float,
        give_up: GiveUp | None = None,
        say: Callable[[Any], object] | None = None,
    ) -> None:
        """See `Patience.wait`; raises for lost ranks unless ``give_up`` says otherwise."""
        say = say or partial(self.say_alive, 0.0)
        self.patience.wait(ranks, take, timeout, give_up or self._fail, say)
        if len(self._links.to) == self._size - 1:
            self._links.stop_listening()

    def _fail(self, failures: Sequence[RankFailure], said_by: int | None = None) -> NoReturn:
        """Tell the others, and raise `RanksFailedError`."""
        self._course.fail(failures)
        if self._rank == self._coordinator or said_by is None:
            self._farewell(Kind.LOST, _encode(list(failures)))
        if any(failure.kind in (SILENT, CLOSED) for failure in failures):
            self._course.over = failures
            if said_by is None:
                self._on_loss(failures)  # before a rank that waits to be greeted finds the end
            self._links.close()
        raise given_up(failures)

    def _farewell(self, kind: Kind, data: bytes) -> None:
        """Send all others a last message, if that takes only a moment."""
        self._links.greet_callers(len(self._others), FAREWELL_SECONDS)
        for rank in self._others:
            self._send(rank, kind, data)
        self._links.flush(FAREWELL_SECONDS)


class Star(_Frames):
    """The ranks of a group, each connected to the coordinator.

    Args:
        rank: this process's number.
        size: how many there are.
        coordinator: the rank that all others talk to.
        links: its connections.
        on_loss: called with the failures once ranks are lost for good.
        death: says how a rank died that has not connected; empty unless it is known to be dead.
        noted: what the coordinator has given up, if it did so before it greeted this rank.
        board: where ranks that wait long say what they call, if there is such a place.
    """

    def begin(self) -> None:
        """The next save or load begins."""
        self._course.begin()
        self.patience.suspects.clear()
        self.board.forget()

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank leaves the save or load that goes on."""
        if self._course.goes_on:
            failures = self._course.fail([RankFailure.of(self._rank, naming_limit(error))])
            self._farewell(Kind.LEFT, _encode(failures))

    def suspect(self, ranks: Sequence[int]) -> None:
        """Wait only a moment longer for ranks that another wait has timed out on."""
        if self._course.goes_on:
            self.patience.suspect(ranks)
            if self._rank != self._coordinator:
                self._send(self._coordinator, Kind.SUSPECTS, _encode(list(ranks)))

    def heed(self, began: float, away: float, timeout: float) -> None:
        """See `HeartbeatGroup`; raises as `gather`, in which this rank takes part next."""
        if not self._course.goes_on:
            return
        ranks = self._others if self._rank == self._coordinator else [self._coordinator]
        look = partial(self._look, keep=True)
        if lost := self.patience.hear(ranks, look, began, away, timeout):
            self._fail(lost)

    def gather(self, data: bytes, timeout: float) -> list[bytes] | None:
        """Every rank's bytes on the coordinator; None elsewhere.

        Raises:
            RanksFailedError: ranks are lost, or have left.
        """
        self._course.next_step()
        if self._lost:
            self._fail(self._lost)
        if self._rank != self._coordinator:
            self._send(self._coordinator, Kind.MESSAGE, data)
            link = self._links.to[self._coordinator]
            self._wait(
                [self._coordinator],
                lambda rank: self._look(rank, keep=True) is None and not link.is_sending,
                timeout + GRACE_SECONDS,
            )
            return None
        received = self._receive(self._others, timeout)
        received[self._rank] = data
        return [received[rank] for rank in range(self._size)]

    def scatter(self, parts: Sequence[bytes] | None, timeout: float) -> bytes:
        """The coordinator's entry for this rank.

        Raises:
            RanksFailedError: ranks are lost, or have left.
        """
        own = self._hand_out(parts, timeout)
        return self._fail(self._lost) if self._lost else own

    def broadcast(self, data: bytes | None, timeout: float) -> bytes:
        """The coordinator's bytes.

        Raises:
            RanksFailedError: the coordinator is lost, or has lost others. If the coordinator itself
                loses ranks here, it raises in the next step: its message may be final.
        """
        return self._hand_out(None if data is None else [data] * self._size, timeout)

    def _hand_out(self, parts: Sequence[bytes] | None, timeout: float) -> bytes:
        self._course.next_step()
        if self._rank != self._coordinator:
            found = self._receive([self._coordinator], timeout + GRACE_SECONDS, self._say_waiting())
            return found[self._coordinator]
        assert parts is not None
        unsent = {rank: parts[rank] for rank in self._others}

        def take(rank: int) -> bool:
            link = self._links.to.get(rank)
            if link is None:
                return False
            if rank in unsent:
                self._send(rank, Kind.MESSAGE, unsent.pop(rank))
            if link.end:
                self._lost.append(RankFailure(rank, CLOSED, ended(link.end)))
            return not link.is_sending

        self._wait(self._others, take, timeout, self._lost.extend)
        return parts[self._rank]


def _out_of_step(other: tuple[int, int, int], own: tuple[int, int, int]) -> RankFailure:
    """Why another rank's frame does not fit: of both the rank, its step and its call."""
    (rank, step, call), (own_rank, own_step, own_call) = other, own
    if call != own_call:
        return other_call((rank, call), (own_rank, own_call))
    return out_of_order(rank, f"it is in step {step}, and rank {own_rank} in step {own_step}")
