"""The calls of a run besides `save`, in which all ranks take part.

1. A call begins with a broadcast of its purpose, or of the coordinator's listing (`listed`). So a
   rank that makes another call than the coordinator notices at once.
2. Where ranks could say different things, each then says what it has, and the coordinator compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec

from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.run.decision import LIST, Decision, refuse_call, refuse_different, said_first
from xckpt.engine.steps import all_reduce, broadcast

BEST: Final = "find the best step"
AT_DIFFERENT_METRICS: Final = (
    "the ranks ask for the best step by different metrics ({}); give all of them the same"
)

Metric: TypeAlias = tuple[str, Literal["min", "max"]]
"""The name of a metric, and whether the smallest or the largest value is best."""


def agreed_step(group: Group, what: str, step: Callable[[], int | None]) -> int | None:
    """The step that all ranks name, or None if they name none; collective.

    Args:
        group: the ranks of the run.
        what: the purpose, for the message of a failure.
        step: what this rank names; may raise.

    Raises:
        PlanError: the ranks name different ones, or make different calls.
        Exception: what ``step`` raised on some rank, on every rank.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> agreed_step(LocalGroup(), "delete a step", lambda: 3)
        3
    """
    call = f"{what.split()[0]} of its CheckpointManager"
    return msgspec.msgpack.decode(_together(group, call, what, step, _agreed), type=int | None)


def agreed_metric(group: Group, named: Callable[[], Metric | None]) -> Metric:
    """The metric of the coordinator, and which of its values is best; collective.

    Args:
        group: the ranks of the run.
        named: what this rank names; may raise. None: whatever the coordinator names.

    Raises:
        PlanError: the ranks name different ones, or make different calls.
        Exception: what ``named`` raised on some rank, on every rank.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> agreed_metric(LocalGroup(), lambda: ("loss", "min"))
        ('loss', 'min')
    """

    def chosen(said: list[bytes]) -> bytes:
        metrics = [msgspec.msgpack.decode(each, type=Metric | None) for each in said]
        of_all = metrics[group.coordinator]
        refuse_different([each or of_all for each in metrics], AT_DIFFERENT_METRICS)
        return said[group.coordinator]

    call = "best of its CheckpointManager"
    return msgspec.msgpack.decode(_together(group, call, BEST, named, chosen), type=Metric)


def listed(group: Group, listing: Callable[[], bytes]) -> bytes:
    """The coordinator's listing of the steps, on every rank; collective.

    Raises:
        PlanError: the ranks make different calls.
        Exception: what ``listing`` raised on the coordinator.
    """
    with operation(group, "steps of its CheckpointManager"):
        said = said_first(broadcast(group, LIST, lambda: msgspec.msgpack.encode({LIST: listing()})))
        if isinstance(said, Decision | str):
            refuse_call(group, said, LIST)
    return said[LIST]


def _together(
    group: Group,
    call: str,
    what: str,
    local: Callable[[], object],
    answer: Callable[[list[bytes]], bytes],
) -> bytes:
    """The coordinator's answer to what each rank says, in a call that begins with its purpose."""
    with operation(group, call):
        proposed = said_first(broadcast(group, what, lambda: msgspec.msgpack.encode(what)))
        if proposed != what:
            refuse_call(group, proposed, what)
        return all_reduce(group, what, lambda: msgspec.msgpack.encode(local()), answer)


def agreed_flag(group: Group, what: str, flag: bool) -> bool:
    """Whether something is true on all ranks; collective, and ``what`` is its purpose.

    Example:
        >>> from xckpt.engine.ranks.group import LocalGroup
        >>> agreed_flag(LocalGroup(), "restore a step", True)
        True
    """
    with operation(group, f"{what.split()[0]} of its CheckpointManager"):
        all_true = all_reduce(group, what, lambda: b"1" * flag, lambda said: b"1" * all(said))
    return bool(all_true)


def _agreed(said: list[bytes]) -> bytes:
    steps = [msgspec.msgpack.decode(each, type=int | None) for each in said]
    refuse_different(steps, "the ranks name different steps ({}); give all of them the same")
    return said[0]
