"""The steps of a load, over a `Group`, a planner and a storage.

1. The coordinator reads the manifest. Broadcast: all ranks see the same checkpoint.
2. Every rank makes a local plan. Gather.
3. The coordinator looks for leaves that are missing or that no rank asks for. Scatter.
4. Every rank checks that its plan fills every target (`xckpt.core.plan.load_checks`), reads and
   verifies. Gather, so that all succeed or all fail.

A failure in any step reaches every rank as one error (`xckpt.engine.steps`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xckpt.core.metadata import Metadata
from xckpt.core.plan.items import LoadPlan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.load_checks import source_problems
from xckpt.core.storage import StorageReader
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.group import Group
from xckpt.engine.steps import all_reduce, broadcast, reduce_scatter
from xckpt.engine.wire import decode_load_plan, encode_load_plan
from xckpt.errors import PlanError

__all__ = ["load_state"]

FIND = "read the manifest; nothing was loaded"
PLAN = "plan the load; nothing was loaded"
READ = "read; targets may be partly filled"


def load_state(
    state_dict: Mapping[str, object] | None,
    storage_reader: StorageReader,
    *,
    group: Group,
    planner: LoadPlanner,
) -> Metadata:
    """Load a checkpoint on all ranks of a group through the planner; collective.

    Args:
        state_dict: the target tree, as this rank sees it; None for everything, as NumPy arrays.
        storage_reader: where from.
        group: the ranks that load together.
        planner: what goes where; it holds the result.

    Returns:
        The checkpoint's metadata.

    Raises:
        RanksFailedError: some rank failed (groups of several); targets may be partly filled.
        XckptError: the failure itself, in a group of one.
    """
    is_coordinator = group.rank == group.coordinator
    manifest = broadcast(group, FIND, storage_reader.read_metadata)
    found: list[Metadata] = []

    def plan_locally() -> bytes:
        metadata = storage_reader.set_up_storage_reader(manifest, group.size)
        found.append(metadata)
        planner.use_adapters(loaded_adapters())
        planner.set_up_planner(state_dict, metadata, is_coordinator)
        plan = planner.create_local_plan()
        _check_sources(plan, metadata)
        return encode_load_plan(storage_reader.prepare_local_plan(plan))

    def plan_globally(plans: list[bytes]) -> Sequence[bytes]:
        local_plans: list[LoadPlan] = [decode_load_plan(plan) for plan in plans]
        global_plans = storage_reader.prepare_global_plan(planner.create_global_plan(local_plans))
        return [encode_load_plan(plan) for plan in global_plans]

    try:
        share = decode_load_plan(reduce_scatter(group, PLAN, plan_locally, plan_globally))
    except BaseException:
        storage_reader.close()
        raise

    def read() -> bytes:
        try:
            plan = planner.finish_plan(share)
            _check_sources(plan, found[0])
            planner.check_plan(plan)
            storage_reader.read_data(plan, planner)
        finally:
            # Before the gather: a peer on this host may be waiting for a chunk from this rank.
            storage_reader.close()
        return b""

    all_reduce(group, READ, read, lambda _: b"")
    return found[0]


def _check_sources(plan: LoadPlan, metadata: Metadata) -> None:
    problems = source_problems(plan.items, metadata)
    if problems:
        raise PlanError.listing("the plan reads what the checkpoint does not have", problems)
