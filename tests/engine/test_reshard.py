"""Saving on some ranks and loading on others, whatever the shardings; failures reach every rank.

Ranks are threads (`conformance.implementations.threads`), sharded arrays NumPy's
(`tests.support.sharded_arrays`), the storage is real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
import xckpt.zarr_dtypes
from conformance.implementations.threads import Outcome, ThreadGroup, results, run_ranks
from tests.core.test_names import NASTY
from tests.support.examples import examples
from tests.support.jobs import Job, fresh_path, jobs
from tests.support.sharded_arrays import cut, holds, same_bits, wish
from xckpt.core.names import join_keys, zarr_path
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.ranks.group import Group
from xckpt.errors import (
    CheckpointExistsError,
    NotACheckpointError,
    PlanError,
    TreeMismatchError,
    XckptError,
)

FEW = 15

ROWS = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
COLUMNS = [((0, 0), (6, 2)), ((0, 2), (6, 2))]
ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)


def save_job(job: Job, path: str | Path) -> list[xckpt.Metadata]:
    def run(group: ThreadGroup) -> xckpt.Metadata:
        return xckpt.save(
            path,
            job.state(group.rank),
            group=group,
            options=job.save_options,
            metadata={"by": group.rank},
        )

    return results(job.savers, run, coordinator=job.save_coordinator)


def load_job(job: Job, path: str | Path) -> list[Any]:
    def run(group: ThreadGroup) -> object:
        return xckpt.load(path, job.like(group.rank), group=group, options=job.loading(group.rank))

    return results(job.loaders, run, coordinator=job.load_coordinator)


@given(jobs())
@examples(12, 250)
def test_every_rank_gets_every_element_that_it_wants(job):
    """The property that the project is about: save by N ranks, load by M, NumPy slices agree."""
    path = fresh_path()
    saved = save_job(job, path)
    assert all(metadata == saved[0] for metadata in saved)
    loaded = load_job(job, path)
    for rank, tree in enumerate(loaded):
        assert tree.keys() == job.like(rank).keys()
        assert tree["model"].keys() == job.like(rank)["model"].keys()
        for name, part in tree["model"].items():
            assert holds(part, job.leaves[name].array), name
        assert same_bits(tree["plain"], job.plain)
    assert loaded[0]["step"] == 7
    for rank in range(job.savers):
        assert loaded[0][f"rank{rank}"] == {"own": [rank, (f"rank {rank}", None)]}


@given(jobs())
@examples(12, 250)
def test_one_process_reads_what_many_ranks_saved(job):
    """The whole tree as NumPy arrays, slices of the open checkpoint, and every digest."""
    path = fresh_path()
    save_job(job, path)
    checkpoint = xckpt.open(path)
    assert checkpoint.verify() == []
    assert checkpoint.user_metadata == {"by": job.save_coordinator}
    whole: Any = xckpt.load(path)
    assert set(whole) == {"model", "plain", "step", *(f"rank{r}" for r in range(job.savers))}
    for name, leaf in job.leaves.items():
        assert same_bits(whole["model"][name], leaf.array)
        stored = checkpoint[f"model/{name}"]
        assert isinstance(stored, xckpt.StoredArray)
        middle = tuple(slice(size // 3, size) for size in leaf.array.shape)
        assert same_bits(stored[middle], np.asarray(leaf.array[middle]))


@given(jobs())
@examples(FEW)
def test_zarr_python_reads_what_many_ranks_saved(tmp_path_factory, job):
    folder = tmp_path_factory.mktemp("job") / "ckpt"
    # What lies in packs is not an array to zarr, and many small chunks lie in packs by default.
    save_job(replace(job, save_options=replace(job.save_options, pack_bytes=0)), folder)
    root = zarr.open_group(folder, mode="r", zarr_format=3)
    for name, leaf in job.leaves.items():
        node = root[f"model/{name}"]
        if isinstance(node, zarr.Array):
            assert same_bits(np.asarray(node[...]), leaf.array)
            continue
        whole = np.zeros(leaf.array.shape, leaf.array.dtype)
        for _, piece in node.arrays():
            offset: Any = piece.attrs["offset"]
            where = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
            whole[where] = piece[...]
        assert same_bits(whole, leaf.array)


@given(jobs())
@examples(FEW)
def test_what_was_loaded_can_be_filled_in_place(job):
    """`load_into` fills strided views of memory that the ranks own, and nothing else of it."""
    path = fresh_path()
    save_job(job, path)

    def run(group: ThreadGroup) -> bool:
        like = job.like(group.rank)
        own: dict[str, np.ndarray] = {}
        for name in like["model"]:
            leaf = job.leaves[name]
            own[name] = np.zeros(leaf.array.shape, leaf.array.dtype)
            boxes = leaf.want[group.rank][:1]
            like["model"][name] = cut(own[name], boxes)
        plain = like["plain"]
        xckpt.load_into(path, like, group=group, options=job.loading(group.rank))
        assert like["plain"] is plain and same_bits(plain, job.plain)
        for name, filled in own.items():
            assert holds(like["model"][name], job.leaves[name].array)
            # Outside the box that was wanted nothing was touched.
            box = like["model"][name].boxes[0]
            outside = np.ones(filled.shape, bool)
            where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            outside[where] = False
            assert not np.ascontiguousarray(filled[outside]).view(np.uint8).any()
        return True

    assert all(results(job.loaders, run, coordinator=job.load_coordinator))


@pytest.mark.parametrize("local", [True, False])
def test_any_key_is_stored_and_comes_back(tmp_path, local):
    """Dots, slashes, reserved names, long ones, other scripts, lookalikes."""
    path = tmp_path / "ckpt" if local else fresh_path()
    state: dict[Any, Any] = {key: np.full(2, n) for n, key in enumerate([*NASTY, 0, -1])}
    state["deeper"] = {key: {key: np.full((), n)} for n, key in enumerate(NASTY)}
    state["value"] = "\ud800 \\ \x00"
    xckpt.save(path, state)
    assert xckpt.open(path)["value"] == state["value"]
    # Again, so that the second one stands beside what the first one has written.
    state["value"] = "\udfff"
    xckpt.save(path, state, overwrite=True)
    loaded: Any = xckpt.load(path)
    assert list(loaded) == list(state) and loaded["value"] == "\udfff"
    assert xckpt.open(path).verify() == []
    for n, key in enumerate([*NASTY, 0, -1]):
        assert loaded[key].tolist() == [n, n]
    assert all(loaded["deeper"][key][key] == n for n, key in enumerate(NASTY))
    if local:
        root = zarr.open_group(path, mode="r", zarr_format=3)
        for n, key in enumerate(NASTY):
            node = root[zarr_path(join_keys((key,)))]
            assert isinstance(node, zarr.Array) and np.asarray(node[...]).tolist() == [n, n]


def rows(rank: int, array: np.ndarray = ARRAY) -> dict[str, Any]:
    return {"w": cut(array, [ROWS[rank]]), "plain": array, "step": 5}


def columns(rank: int) -> dict[str, Any]:
    return {"w": wish(ARRAY, [COLUMNS[rank]]), "plain": np.zeros_like(ARRAY), "step": 0}


def save_rows(path: str | Path, **options: Any) -> None:
    results(2, lambda group: xckpt.save(path, rows(group.rank), group=group, **options))


class UnwellError(Exception):
    """What a hook raises here."""


SAVE_HOOKS = (
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data",
)  # fmt: skip
LOAD_HOOKS = (
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes",
    "resolve_tensor", "commit_tensor",
)  # fmt: skip


def failing(planner: Any, hook: str) -> Any:
    """The planner, one hook of which raises."""

    def fail(*args: object, **kwargs: object) -> None:
        raise UnwellError(f"{hook} failed")

    setattr(planner, hook, fail)
    return planner


def expect_failures(outcomes: list[Outcome[Any]], ranks: set[int], text: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, XckptError), outcome.error
        assert {failure.rank for failure in outcome.error.failures} == ranks
        assert all(text in failure.message for failure in outcome.error.failures)
        cause = outcome.error.__cause__
        assert (cause is not None) == (rank in ranks)


@given(st.sampled_from(SAVE_HOOKS), st.sets(st.integers(0, 1), min_size=1), st.integers(0, 1))
@examples(10, 200)
def test_a_rank_that_fails_to_save_fails_all_and_commits_nothing(hook, unwell, coordinator):
    path = fresh_path()
    if hook == "create_global_plan":
        unwell = {coordinator}

    def run(group: ThreadGroup, *, wrong: bool, overwrite: bool = False) -> None:
        planner = DefaultSavePlanner()
        if wrong and group.rank in unwell:
            planner = failing(planner, hook)
        state = {**rows(group.rank), f"own{group.rank}": np.full((3,), group.rank)}
        if overwrite:
            state["step"] = 6
        xckpt.save(path, state, group=group, planner=planner, overwrite=overwrite)

    outcomes = run_ranks(2, lambda group: run(group, wrong=True), coordinator=coordinator)
    expect_failures(outcomes, set(unwell), f"{hook} failed")
    assert isinstance(outcomes[min(unwell)].error.__cause__, UnwellError)  # type: ignore[union-attr]
    with pytest.raises(NotACheckpointError):
        xckpt.open(path)
    # The path is free, and the ranks can go on.
    results(2, lambda group: run(group, wrong=False), coordinator=coordinator)
    assert xckpt.open(path)["step"] == 5
    # A save that was to replace it fails likewise, and it stays.
    outcomes = run_ranks(2, lambda g: run(g, wrong=True, overwrite=True), coordinator=coordinator)
    expect_failures(outcomes, set(unwell), f"{hook} failed")
    assert xckpt.open(path)["step"] == 5 and xckpt.open(path).verify() == []


@given(st.sampled_from(LOAD_HOOKS), st.sets(st.integers(0, 1), min_size=1), st.booleans())
@examples(10, 200)
def test_a_rank_that_fails_to_load_fails_all(hook, unwell, share_reads):
    path = fresh_path()
    save_rows(path)
    if hook == "create_global_plan":
        unwell = {0}
    options = xckpt.LoadOptions(share_reads=share_reads)

    def run(group: ThreadGroup, *, wrong: bool) -> object:
        planner = DefaultLoadPlanner()
        if wrong and group.rank in unwell:
            planner = failing(planner, hook)
        return xckpt.load(path, columns(group.rank), group=group, planner=planner, options=options)

    outcomes = run_ranks(2, lambda group: run(group, wrong=True))
    for outcome in outcomes:
        assert isinstance(outcome.error, XckptError)
        messages = {failure.rank: failure.message for failure in outcome.error.failures}
        # Who waits for a chunk from a rank that failed fails too, perhaps before it can by itself.
        own = {rank for rank in messages if f"{hook} failed" in messages[rank]}
        assert set(messages) >= unwell >= own and own
        assert own == unwell or (share_reads and len(unwell) == 2)
    for rank, loaded in enumerate(results(2, lambda group: run(group, wrong=False))):
        assert isinstance(loaded, dict) and holds(loaded["w"], ARRAY), rank


def test_a_group_of_one_raises_the_error_itself():
    path = fresh_path()
    with pytest.raises(UnwellError, match="resolve_data failed"):
        xckpt.save(path, {"w": ARRAY}, planner=failing(DefaultSavePlanner(), "resolve_data"))
    with pytest.raises(NotACheckpointError):
        xckpt.load(path)
    xckpt.save(path, {"w": ARRAY})
    with pytest.raises(UnwellError, match="commit_tensor failed"):
        xckpt.load(path, {"w": ARRAY}, planner=failing(DefaultLoadPlanner(), "commit_tensor"))
    with pytest.raises(CheckpointExistsError):
        xckpt.save(path, {"w": ARRAY})


def refused(states: list[dict[str, Any]]) -> XckptError:
    """The error with which all ranks refuse to save these states."""
    path = fresh_path()
    outcomes = run_ranks(
        len(states), lambda group: xckpt.save(path, states[group.rank], group=group)
    )
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, XckptError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(NotACheckpointError):
        xckpt.open(path)
    error = errors[0]
    assert isinstance(error, XckptError)
    return error


def test_ranks_that_disagree_are_refused_by_name():
    error = refused([{"w": ARRAY, "s": 1}, {"w": ARRAY[:3], "s": "1"}])
    (failure,) = error.failures
    assert (failure.rank, failure.kind) == (0, "PlanError")
    assert "w: shape (6, 4) on rank 0 but (3, 4) on rank 1" in failure.message
    assert "s: type int on rank 0 but str on rank 1" in failure.message


def test_shards_that_leave_a_gap_are_refused_by_name():
    error = refused([{"w": cut(ARRAY, [ROWS[0]])}, {"w": cut(ARRAY, [((4, 0), (2, 4))])}])
    assert "w: [3, 4) x [0, 4) is held by no rank" in str(error)


def test_leaves_that_cannot_be_saved_are_listed_for_every_rank():
    error = refused([{"a": object()}, {"b": {1}, "c": {2}}])
    assert [failure.rank for failure in error.failures] == [0, 1]
    text = str(error)
    assert all(part in text for part in ("rank 0", "a: a builtins.object", "b: a", "c: a"))


def test_a_leaf_that_no_rank_wants_is_an_error_by_default():
    path = fresh_path()
    save_rows(path)

    def run(group: ThreadGroup, strict: bool) -> object:
        like = columns(group.rank)
        del like["plain"]
        if group.rank == 1:
            like["more"] = 1
        return xckpt.load(path, like, group=group, strict=strict)

    for outcome in run_ranks(2, lambda group: run(group, True)):
        assert isinstance(outcome.error, XckptError)
        (failure,) = outcome.error.failures
        assert failure.kind == "TreeMismatchError"
        assert "plain: in the checkpoint, but not wanted" in failure.message
        assert "more: wanted, but not in the checkpoint" in failure.message
    loaded: Any = results(2, lambda group: run(group, False))
    assert loaded[1]["more"] == 1 and holds(loaded[1]["w"], ARRAY)


def save_with(make: Callable[[Group], DefaultSavePlanner]) -> list[Outcome[xckpt.Metadata]]:
    path = fresh_path()
    outcomes = run_ranks(
        2,
        lambda group: xckpt.save(path, rows(group.rank), group=group, planner=make(group)),
    )
    with pytest.raises(NotACheckpointError):
        xckpt.open(path)
    return outcomes


def test_a_planner_that_forgets_chunks_is_found_out():
    class Forgetful(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            kept = [item for item in new_plan.items if item.index.fqn != "w"]
            return replace(new_plan, items=kept)

    expect_failures(
        save_with(lambda group: Forgetful()), {0}, "w: [0, 6) x [0, 4) was written by no rank"
    )


def test_a_planner_that_writes_twice_is_found_out():
    class Twice(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            everything = [item for plan in plans for item in plan.items]
            plain = [item for item in everything if item.index.fqn == "plain"]
            others = [[i for i in plan.items if i.index.fqn != "plain"] for plan in plans]
            return [
                replace(plan, items=other + plain)
                for plan, other in zip(plans, others, strict=True)
            ], metadata

    expect_failures(
        save_with(lambda group: Twice()), {0}, "plain: [0, 6) x [0, 4) was written by ranks 0 and 1"
    )


def test_a_planner_that_plans_for_too_few_ranks_fails_on_every_rank():
    class Short(DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            plans, metadata = super().create_global_plan(all_plans)
            return plans[:1], metadata

    expect_failures(save_with(lambda group: Short()), {0}, "returned 1 plan(s): it must return 2")


def test_a_planner_that_resolves_to_something_else_is_found_out():
    class Other(DefaultSavePlanner):
        def resolve_data(self, write_item):
            data = super().resolve_data(write_item)
            return data.T if isinstance(data, np.ndarray) else data

    expect_failures(save_with(lambda group: Other()), {0, 1}, "was planned, but resolve_data")


def test_errors_of_a_group_of_one_are_of_their_own_kind():
    with pytest.raises(PlanError, match="held by no rank"):
        xckpt.save(fresh_path(), {"w": cut(ARRAY, [ROWS[0]])})
    path = fresh_path()
    xckpt.save(path, {"w": ARRAY})
    with pytest.raises(TreeMismatchError, match="w: shape"):
        xckpt.load(path, {"w": ARRAY.T})
