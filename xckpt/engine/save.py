"""The steps of a save, over a `Group`, a planner and a storage.

1. Every rank: describe the state and make a local plan. Gather.
2. The coordinator: make the global plan and check it against its metadata
   (`xckpt.core.plan.save_checks`); the storage says where each rank writes. Scatter.
3. Every rank: finish the plan and write. Gather.
4. The coordinator: check what was written and commit. Broadcast the metadata.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`), and nothing is
committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.items import SavePlan
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner
from xckpt.core.plan.save_checks import check_finished, check_shares
from xckpt.core.storage import StorageWriter
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.group import Group
from xckpt.engine.steps import all_reduce, reduce_scatter
from xckpt.engine.wire import REPORTS, SavePlanCodec
from xckpt.options import SaveOptions

PLAN = "plan the save; nothing was committed"
WRITE = "write or commit; nothing was committed"


def save_state(
    state: object,
    writer: StorageWriter,
    *,
    group: Group,
    planner: SavePlanner,
    metadata: JSONValue = None,
    failure: BaseException | None = None,
) -> Metadata:
    """Save a state on all ranks of a group; collective.

    Args:
        state: the tree to save, as this rank sees it.
        writer: where to.
        group: the ranks that save together.
        planner: how to divide the work.
        metadata: the caller's own, JSON values; the coordinator's is stored.
        failure: why this rank cannot save, if it cannot: it fails the first step, so that every
            rank raises.

    Returns:
        The metadata of the committed checkpoint, the same on every rank.

    Raises:
        RanksFailedError: some rank failed (groups of several); nothing is committed.
        XckptError: the failure itself, in a group of one.
    """
    is_coordinator = group.rank == group.coordinator
    save = _Save(state, writer, planner, metadata, is_coordinator, failure)
    try:
        share = reduce_scatter(group, PLAN, save.plan_locally, save.plan_globally, SavePlanCodec())
        commit = partial(writer.finish, save.metadata)
        manifest = all_reduce(group, WRITE, partial(save.write, share), commit, REPORTS)
        return writer.committed_metadata(manifest)
    except BaseException:
        writer.abort()
        raise


class _Save:
    """What a rank does in the steps of one save."""

    def __init__(
        self,
        state: object,
        writer: StorageWriter,
        planner: SavePlanner,
        user: JSONValue,
        is_coordinator: bool,
        failure: BaseException | None,
    ) -> None:
        self.state = cast(Mapping[str, object], state)  # our planners take any tree
        self.writer = writer
        self.planner = planner
        self.user = user
        self.is_coordinator = is_coordinator
        self.failure = failure
        self.metadata = Metadata({})
        """What will be committed; only the coordinator learns it."""

    def plan_locally(self) -> SavePlan:
        """What this rank can write."""
        if self.failure is not None:
            raise self.failure
        self.planner.use_adapters(loaded_adapters())
        storage_meta = self.writer.storage_meta()
        self.planner.set_up_planner(self.state, storage_meta, self.is_coordinator)
        self.writer.set_up_storage_writer(self.is_coordinator)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def plan_globally(self, plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
        """What each rank has to write, and where."""
        shares, metadata = self.planner.create_global_plan(list(plans))
        check_shares(shares, metadata)
        metadata = replace(metadata, user=self.user)
        shares, self.metadata = self.writer.prepare_global_plan(shares, metadata)
        return shares

    def write(self, share: SavePlan) -> object:
        """Write this rank's share; the report."""
        plan = self.planner.finish_plan(share)
        check_finished(share, plan)
        return self.writer.write_data(plan, self.planner)


def default_planner(options: SaveOptions) -> SavePlanner:
    """The planner of a save that was given none.

    Example:
        >>> type(default_planner(SaveOptions())).__name__
        'DefaultSavePlanner'
    """
    return DefaultSavePlanner(
        compare_replicas=options.compare_replicas, serialise=options.serialise
    )
