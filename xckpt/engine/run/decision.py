"""One decision for all ranks, at each step of a training loop.

1. The coordinator decides, by its clock and its view of the save in the background.
2. A decision not to save goes to all ranks: a few bytes, and the coordinator waits for none. In a
   group of one nothing is sent.
3. Before a save, and `ASK_SECONDS` after it asked last, it asks all ranks instead: each reports its
   step, and whether it was asked to end. Then it decides, and sends the decision to all ranks.
4. An invalid step of a rank is reported then, too, and every rank raises the error. The same holds
   for what each rank prepares once a save is due, such as the numbers of its metrics
   (`Rounds.prepare`).
5. Any other call of a run begins with a broadcast too (`xckpt.engine.run.agreement`). So a rank
   that makes another call than the coordinator notices at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn, TypeAlias, TypeVar

import msgspec

from xckpt.core.run.numbers import checked_step
from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import PlanError

ASK_SECONDS = 0.2
"""How long a signal to a rank other than the coordinator may go unnoticed. Quicker steps cost one
small broadcast, and slower ones a thousandth of their time."""

DECIDE: Final = "decide whether to save; nothing was saved"
OF_SAVE: Final = "save a step, if one is due"
LIST: Final = "list the steps"
CALL_OF_SAVE: Final = "save or should_save of its CheckpointManager"
"""See `xckpt.engine.ranks.group.CALLS`."""
PREPARE: Final = "say what is saved with the step; nothing was saved"
AT_DIFFERENT_STEPS: Final = (
    "the ranks ask for a save at different steps ({}); each rank has to call save and should_save "
    "at the same steps"
)

T = TypeVar("T")


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks do at a step."""

    due: bool
    """Whether to save."""
    time: float
    """The coordinator's clock, seconds since the epoch."""
    ended: bool
    """Whether the save in the background has ended, so that no rank waits long for its outcome."""
    preempted: bool
    """Whether some rank was asked to end."""
    replaced: str | None = None
    """Folder name of the step that is saved, if it is there already."""
    temporary: bool = False
    """Whether the step is saved to the temporary root."""
    asks: bool = False
    """Whether nothing is decided before all ranks were asked."""


_ASK: Final = Decision(False, 0.0, False, False, asks=True)


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says."""

    step: int
    preempted: bool


_report = msgspec.msgpack.Decoder(_Report).decode
_decision = msgspec.msgpack.Decoder(Decision).decode
Listing: TypeAlias = dict[str, bytes]
"""`LIST` -> the steps: what the coordinator begins with to list them."""

said_first = msgspec.msgpack.Decoder(Decision | Listing | str).decode
"""What a coordinator begins a call with: its decision in `save`, its listing, or the purpose of any
other call."""


class KeptError:
    """An exception that one rank keeps until all ranks raise it.

    Example:
        >>> fault = KeptError()
        >>> fault.note(ValueError("the first counts"))
        >>> fault.note(ValueError("a later one"))
        >>> fault.raise_once()
        Traceback (most recent call last):
        ValueError: the first counts
        >>> fault.raise_once()
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep it, unless another is kept."""
        self._error = self._error or error

    def raise_once(self) -> None:
        """Raise what is kept, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error


class Rounds:
    """The decisions of one run, as one rank takes part in them.

    Args:
        group: the ranks of the run.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> rounds = Rounds(LocalGroup())
        >>> step = rounds.checked(3)
        >>> rounds.agree(step, True, lambda asked: Decision(asked, 60.0, False, asked)).due
        True
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = -math.inf
        """When the coordinator asked all ranks, by its clock."""
        self._fault: Final = KeptError()
        """What is wrong with a step that this rank was given, until all ranks have heard it."""

    def checked(self, step: object, others: Callable[[], object] = lambda: None) -> int | None:
        """The number of a step; None if it is invalid: all ranks raise that when asked next.

        Args:
            step: what this rank was given.
            others: checks what else it was given, which is likewise raised.

        Raises:
            TypeError, ValueError: it is invalid, in a group of one.
        """
        try:
            others()
            return checked_step(step)
        except Exception as error:
            if self._group.size == 1:
                raise
            self._fault.note(error)
            return None

    def agree(
        self, step: int | None, preempted: bool, decide: Callable[[bool], Decision]
    ) -> Decision:
        """The coordinator's decision, on every rank; collective.

        Args:
            step: the step that this rank has done, as `checked` has it.
            preempted: whether this rank was asked to end.
            decide: called on the coordinator with whether any rank was, as far as it knows; and
                again if it learns of one.

        Raises:
            PlanError: the ranks are at different steps, or make different calls.
            TypeError, ValueError: some rank was given an invalid step.
            Exception: what ``decide`` raised, on every rank.
        """
        if self._group.size == 1:
            return decide(preempted)
        with operation(self._group, CALL_OF_SAVE):
            said = broadcast(self._group, DECIDE, lambda: self._proposal(preempted, decide))
            proposed = said_first(said)
            if not isinstance(proposed, Decision):
                refuse_call(self._group, proposed, OF_SAVE)
            if not (proposed.due or proposed.asks):
                return proposed
            answer = partial(_answer, proposed, decide)
            report = partial(self._report, step, preempted)
            return _decision(all_reduce(self._group, DECIDE, report, answer))

    def leave(self, step: int | None) -> None:
        """This rank leaves a save that was foreseen at another step; collective with `prepare`.

        Raises:
            PlanError: other ranks begin that save.
        """
        if self._group.size > 1:
            self._meet(lambda: step)

    def prepare(self, step: int | None, make: Callable[[], T]) -> T:
        """What this rank prepares before a save begins, if no rank fails in that; collective.

        Args:
            step: the step that is saved.
            make: makes it; may raise.

        Raises:
            PlanError: the ranks are at different steps.
            Exception: what ``make`` raised on some rank, on every rank.
        """
        made: list[T] = []

        def local() -> int | None:
            made.append(make())
            return step

        self._meet(local)
        return made[0]

    def _meet(self, local: Callable[[], int | None]) -> None:
        def said() -> bytes:
            self._fault.raise_once()
            return msgspec.msgpack.encode(local())

        with operation(self._group, CALL_OF_SAVE):
            all_reduce(self._group, PREPARE, said, _at_one_step)

    def _report(self, step: int | None, preempted: bool) -> bytes:
        self._fault.raise_once()
        assert step is not None
        return msgspec.msgpack.encode(_Report(step, preempted))

    def _proposal(self, preempted: bool, decide: Callable[[bool], Decision]) -> bytes:
        """What the coordinator decides, if no rank has to be asked first."""
        self._fault.raise_once()
        now = time.monotonic()
        proposed = _ASK if now - self._asked >= ASK_SECONDS else decide(preempted)
        if proposed.due or proposed.asks:
            self._asked = now
        return msgspec.msgpack.encode(proposed)


def _answer(proposed: Decision, decide: Callable[[bool], Decision], said: list[bytes]) -> bytes:
    """The coordinator's decision, once it has heard all ranks."""
    reports = [_report(each) for each in said]
    refuse_different([report.step for report in reports], AT_DIFFERENT_STEPS)
    preempted = any(report.preempted for report in reports)
    if proposed.asks or (preempted and not proposed.preempted):
        proposed = decide(preempted)
    return msgspec.msgpack.encode(proposed)


def _at_one_step(said: list[bytes]) -> bytes:
    steps = [msgspec.msgpack.decode(each, type=int | None) for each in said]
    refuse_different(steps, AT_DIFFERENT_STEPS)
    return b""


def refuse_call(group: Group, coordinators: Decision | Listing | str, own: str) -> NoReturn:
    """Raise on all ranks that this one makes another call than the coordinator.

    Args:
        group: the ranks of the run.
        coordinators: what the coordinator began its call with.
        own: the purpose of this rank's call.

    Raises:
        PlanError: always; on all ranks if the coordinator waits for them. A coordinator that
            decided not to save, or has listed the steps, has gone on.
    """
    match coordinators:
        case Decision():
            what, step, waits = OF_SAVE, DECIDE, coordinators.due or coordinators.asks
        case dict():
            what, step, waits = LIST, LIST, False
        case _:
            what, step, waits = coordinators, coordinators, True
    error = PlanError(
        f"this rank is to {_in_short(own)}, and rank {group.coordinator} to {_in_short(what)}; "
        f"every rank has to make the same calls of its CheckpointManager in the same order"
    )

    def fail() -> bytes:
        raise error

    if waits:
        all_reduce(group, step, fail, lambda _: b"")
    raise error


def _in_short(what: str) -> str:
    return what.partition(";")[0]


def refuse_different(said: Sequence[object], text: str) -> None:
    """Refuse what differs by rank; ``text`` has a place where it is listed.

    Raises:
        PlanError: they do.
    """
    if len(set(said)) > 1:
        raise PlanError(text.format(", ".join(f"rank {r}: {each}" for r, each in enumerate(said))))
