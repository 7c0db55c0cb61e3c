"""How a save finds its planner, and waits its turn."""

from __future__ import annotations

from typing import Any

from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.core.storage import StorageWriter
from xckpt.engine.background import settle
from xckpt.engine.group import Group
from xckpt.engine.save import save_when_ready
from xckpt.options import SaveOptions

__all__ = ["planner_for", "save_in_turn"]


def planner_for(options: SaveOptions) -> SavePlanner:
    """The planner of a save that was given none.

    Example:
        >>> type(planner_for(SaveOptions())).__name__
        'DefaultSavePlanner'
    """
    return DefaultSavePlanner(
        compare_replicas=options.compare_replicas, serialise=options.serialise
    )


def save_in_turn(
    state: object,
    writer: StorageWriter,
    *,
    group: Group,
    planner: SavePlanner,
    metadata: JSONValue = None,
) -> Metadata:
    """Save after the asynchronous save in flight; if that fails unseen, then so does this one."""
    failure = settle(group)

    def ready() -> Any:  # noqa: ANN401  # our planners take any tree
        if failure is not None:
            raise failure
        return state

    return save_when_ready(ready, writer, group=group, planner=planner, metadata=metadata)
