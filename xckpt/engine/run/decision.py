"""One decision for all ranks, at each step of a training loop.

1. Every rank says at which step it is, and whether it was asked to end: a few bytes to the
   coordinator.
2. The coordinator decides, by its clock and its view of the save in the background.
3. The decision goes to all ranks: a few bytes back. In a group of one nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.steps import all_reduce
from xckpt.errors import PlanError

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


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says."""

    step: int
    preempted: bool


_report = msgspec.msgpack.Decoder(_Report).decode
_decision = msgspec.msgpack.Decoder(Decision).decode


def agree(group: Group, step: int, preempted: bool, decide: Callable[[bool], Decision]) -> Decision:
    """The coordinator's decision, on every rank; collective.

    Args:
        group: the ranks of the run.
        step: the step that this rank has done.
        preempted: whether this rank was asked to end.
        decide: called on the coordinator with whether any rank was.

    Raises:
        PlanError: the ranks are at different steps.
        Exception: what ``decide`` raised, on every rank.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> agree(LocalGroup(), 3, True, lambda any: Decision(any, 60.0, False, any)).due
        True
    """
    if group.size == 1:
        return decide(preempted)

    def answer(said: list[bytes]) -> bytes:
        reports = [_report(each) for each in said]
        steps = {report.step for report in reports}
        if len(steps) > 1:
            listed = ", ".join(f"rank {rank}: {each.step}" for rank, each in enumerate(reports))
            raise PlanError(
                f"the ranks ask for a save at different steps ({listed}); each rank has to call "
                f"save and should_save at the same steps"
            )
        return msgspec.msgpack.encode(decide(any(report.preempted for report in reports)))

    with operation(group):
        mine = msgspec.msgpack.encode(_Report(step, preempted))
        return _decision(all_reduce(group, DECIDE, lambda: mine, answer))
