"""The steps of a save and of a load, over a `Group`, a planner and a storage.

A save (`save_state_dict`):

1. Every rank: set up planner and storage, make a local plan. Gather.
2. The coordinator: make the global plan and check it against its metadata
   (`xckpt.core.plan.save_checks`); the storage says where each rank writes. Scatter.
3. Every rank: finish the plan and write. Gather.
4. The coordinator: check what was written and commit. Broadcast the metadata.

A load (`load_state_dict`):

1. The coordinator reads the manifest. Broadcast: all ranks see the same checkpoint.
2. Every rank makes a local plan. Gather.
3. The coordinator looks for leaves that are missing or that nobody wants. Scatter.
4. Every rank checks that its plan fills every target (`xckpt.core.plan.load_checks`), reads and
   verifies. Gather, so that all succeed or all fail.

A failure in any step reaches every rank as one error (`xckpt.engine.group`), and nothing is
committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from xckpt.core.json_values import check_json
from xckpt.core.metadata import JSONValue, Metadata
from xckpt.core.plan.items import LoadPlan, PlanCodec, decode_load_plan, encode_load_plan
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.load_checks import source_problems
from xckpt.core.plan.save import SavePlanner
from xckpt.core.plan.save_checks import check_finished, check_shares
from xckpt.core.storage import StorageReader, StorageWriter
from xckpt.engine.adapters import loaded_adapters
from xckpt.engine.group import Group, all_reduce, broadcast, reduce_scatter
from xckpt.errors import PlanError

__all__ = ["load_state_dict", "save_state_dict", "save_when_ready"]

PLAN_SAVE = "plan the save; nothing was committed"
WRITE = "write or commit; nothing was committed"
FIND = "read the manifest; nothing was loaded"
PLAN_LOAD = "plan the load; nothing was loaded"
READ = "read; targets may be partly filled"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def save_state_dict(
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
    """Save a state that this rank may still have to wait for; see `save_state_dict`.

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
    codec = PlanCodec()
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

    share = codec.decode(reduce_scatter(group, PLAN_SAVE, plan_locally, plan_globally))

    def write() -> bytes:
        plan = planner.finish_plan(share)
        check_finished(share, plan)
        return _encode(writer.write_data(plan, planner))

    def commit(results: list[bytes]) -> bytes:
        return writer.finish(decided[0], [_decode(result) for result in results])

    return writer.committed_metadata(all_reduce(group, WRITE, write, commit))


def load_state_dict(
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
        share = decode_load_plan(reduce_scatter(group, PLAN_LOAD, plan_locally, plan_globally))
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
