"""The steps of a save, over a `Group`, a planner and a storage.

1. Every rank: set up planner and storage, make a local plan. Gather.
2. The coordinator: make the global plan and check it against its metadata
   (`xckpt.core.plan.save_checks`); the storage says where each rank writes. Scatter.
3. Every rank: finish the plan and write. Gather.
4. The coordinator: check what was written and commit. Broadcast the metadata.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`), and nothing is
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from xckpt.core.json_values import check_json
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.save import SavePlanner
from xckpt.core.plan.save_checks import check_finished, check_shares
from xckpt.core.storage import StorageWriter
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.group import Group
from xckpt.engine.steps import all_reduce, reduce_scatter
from xckpt.engine.wire import SavePlanCodec, decode_report, encode_report

__all__ = ["save_state", "save_when_ready"]

PLAN = "plan the save; nothing was committed"
WRITE = "write or commit; nothing was committed"


def save_state(
    state_dict: Mapping[str, object],
    storage_writer: StorageWriter,
    *,
    group: Group,
    planner: SavePlanner,
    metadata: JSONValue = None,
) -> Metadata:
    """Save a state on all ranks of a group; collective.

    Args:
        state_dict: the tree to save, as this rank sees it.
        storage_writer: where to.
        group: the ranks that save together.
        planner: how to divide the work.
        metadata: the caller's own, JSON values; the coordinator's is stored.

    Returns:
        The metadata of the committed checkpoint, the same on every rank.

    Raises:
        RanksFailedError: some rank failed (groups of several); nothing is committed.
        XckptError: the failure itself, in a group of one.
    """
    return save_when_ready(
        lambda: state_dict, storage_writer, group=group, planner=planner, metadata=metadata
    )


def save_when_ready(
    state: Callable[[], Mapping[str, object]],
    storage_writer: StorageWriter,
    *,
    group: Group,
    planner: SavePlanner,
    metadata: JSONValue = None,
) -> Metadata:
    """Save a state that this rank may still have to wait for; see `save_state`.

    What ``state`` raises is this rank's failure to plan, so that it reaches every rank.
    """
    try:
        return _save(state, storage_writer, group, planner, metadata)
    except BaseException:
        storage_writer.abort()
        raise


def _save(
    state: Callable[[], Mapping[str, object]],
    writer: StorageWriter,
    group: Group,
    planner: SavePlanner,
    user: JSONValue,
) -> Metadata:
    is_coordinator = group.rank == group.coordinator
    codec = SavePlanCodec()
    decided: list[Metadata] = []

    def plan_locally() -> bytes:
        if is_coordinator:
            check_json(user, "metadata")
        given = state()
        planner.use_adapters(loaded_adapters())
        planner.set_up_planner(given, writer.storage_meta(), is_coordinator)
        writer.set_up_storage_writer(is_coordinator)
        return codec.encode(writer.prepare_local_plan(planner.create_local_plan()))

    def plan_globally(plans: list[bytes]) -> Sequence[bytes]:
        local_plans = [codec.decode(plan) for plan in plans]
        global_plans, metadata = planner.create_global_plan(local_plans)
        check_shares(global_plans, metadata)
        metadata = replace(metadata, user=user)
        global_plans, metadata = writer.prepare_global_plan(global_plans, metadata)
        decided.append(metadata)
        return [codec.encode(plan) for plan in global_plans]

    share = codec.decode(reduce_scatter(group, PLAN, plan_locally, plan_globally))

    def write() -> bytes:
        plan = planner.finish_plan(share)
        check_finished(share, plan)
        return encode_report(writer.write_data(plan, planner))

    def commit(results: list[bytes]) -> bytes:
        return writer.finish(decided[0], [decode_report(result) for result in results])

    return writer.committed_metadata(all_reduce(group, WRITE, write, commit))
