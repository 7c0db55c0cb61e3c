"""One decision for all ranks, at each step of a training loop.

1. The coordinator decides, by its clock and its view of the save in the background.
2. A decision not to save goes to all ranks: a few bytes, and the coordinator waits for none. In a
   group of one nothing is sent.
3. Before a save, and `ASK_SECONDS` after it asked last, it asks all ranks instead: each says at
   which step it is, and whether it was asked to end. Then it decides, and that goes to all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.steps import all_reduce, broadcast
from xckpt.errors import PlanError

ASK_SECONDS = 0.2
"""How long a signal to another rank than the coordinator may go unheard. So steps that are quicker
cost one small broadcast, and slower ones a thousandth of their time."""

DECIDE: Final = "decide whether to save; nothing was saved"


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


class Rounds:
    """The decisions of one run, as one rank takes part in them.

    Args:
        group: the ranks of the run.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> rounds = Rounds(LocalGroup())
        >>> rounds.agree(3, True, lambda asked: Decision(asked, 60.0, False, asked)).due
        True
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._asked = -math.inf
        """When the coordinator asked all ranks, by its clock."""

    def agree(self, step: int, preempted: bool, decide: Callable[[bool], Decision]) -> Decision:
        """The coordinator's decision, on every rank; collective.

        Args:
            step: the step that this rank has done.
            preempted: whether this rank was asked to end.
            decide: called on the coordinator with whether any rank was, as far as it knows; and
                again, should it learn of one.

        Raises:
            PlanError: the ranks are at different steps.
            Exception: what ``decide`` raised, on every rank.
        """
        if self._group.size == 1:
            return decide(preempted)
        with operation(self._group):
            said = broadcast(self._group, DECIDE, lambda: self._proposal(preempted, decide))
            proposed = _decision(said)
            if not (proposed.due or proposed.asks):
                return proposed
            mine = msgspec.msgpack.encode(_Report(step, preempted))
            answer = partial(_answer, proposed, decide)
            return _decision(all_reduce(self._group, DECIDE, lambda: mine, answer))

    def _proposal(self, preempted: bool, decide: Callable[[bool], Decision]) -> bytes:
        """What the coordinator decides, if no rank has to be asked first."""
        now = time.monotonic()
        proposed = _ASK if now - self._asked >= ASK_SECONDS else decide(preempted)
        if proposed.due or proposed.asks:
            self._asked = now
        return msgspec.msgpack.encode(proposed)


def _answer(proposed: Decision, decide: Callable[[bool], Decision], said: list[bytes]) -> bytes:
    """The coordinator's decision, once it has heard all ranks."""
    reports = [_report(each) for each in said]
    if len({report.step for report in reports}) > 1:
        listed = ", ".join(f"rank {rank}: {each.step}" for rank, each in enumerate(reports))
        raise PlanError(
            f"the ranks ask for a save at different steps ({listed}); each rank has to call save "
            f"and should_save at the same steps"
        )
    preempted = any(report.preempted for report in reports)
    if proposed.asks or (preempted and not proposed.preempted):
        proposed = decide(preempted)
    return msgspec.msgpack.encode(proposed)
