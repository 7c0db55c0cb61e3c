"""`save_state_dict` and `load_state_dict`: storages, planners and groups of the caller's own.

Ranks are threads here; `tests/torch/test_state_dict.py` has real process groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut, holds
from xckpt.engine.ranks.group import LocalGroup
from xckpt.planner import DefaultLoadPlanner, DefaultSavePlanner, GridOptions
from xckpt.storage import StorageReader, StorageWriter, ZarrStorageReader, ZarrStorageWriter

ARRAY = np.arange(24, dtype=np.float32).reshape(6, 4)
ROWS = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
COLUMNS = [((0, 0), (6, 2)), ((0, 2), (6, 2))]


def test_the_storages_keep_to_the_protocols():
    assert isinstance(ZarrStorageWriter(fresh_path()), StorageWriter)
    assert isinstance(ZarrStorageReader(fresh_path()), StorageReader)
    assert not isinstance(ZarrStorageReader(fresh_path()), StorageWriter)


def test_one_process_fills_its_own_tensors_and_containers():
    path = fresh_path()
    state = {"w": torch.arange(6.0).reshape(2, 3), "opt": [{"mu": ARRAY, "step": 3}, (0.9, "adam")]}
    saved = xckpt.save_state_dict(state, ZarrStorageWriter(path))
    weight, mu = torch.zeros(2, 3), np.zeros_like(ARRAY)
    inner: dict[str, Any] = {"mu": mu, "step": 0}
    wanted: dict[str, Any] = {"w": weight, "opt": [inner, (0.0, "")]}
    version = weight._version
    loaded = xckpt.load_state_dict(wanted, ZarrStorageReader(path))
    assert loaded == saved
    assert wanted["w"] is weight and torch.equal(weight, state["w"])
    assert weight._version > version, "autograd must learn of it"
    assert wanted["opt"][0] is inner and inner["mu"] is mu and np.array_equal(mu, ARRAY)
    assert inner["step"] == 3 and wanted["opt"][1] == (0.9, "adam")


@pytest.mark.parametrize("coordinator", [0, 2])
def test_every_rank_gets_the_metadata(coordinator):
    path = fresh_path()
    rows = [*ROWS, ((0, 0), (0, 4))]

    def save(group: ThreadGroup) -> xckpt.Metadata:
        state = {"w": cut(ARRAY, [rows[group.rank]]), "step": 5}
        return xckpt.save_state_dict(
            state, ZarrStorageWriter(path), process_group=group, coordinator_rank=coordinator
        )

    def load(group: ThreadGroup) -> xckpt.Metadata:
        part = np.zeros_like(ARRAY)
        state: dict[str, Any] = {"w": cut(part, [COLUMNS[group.rank % 2]]), "step": 0}
        metadata = xckpt.load_state_dict(state, ZarrStorageReader(path), process_group=group)
        assert holds(state["w"], ARRAY) and state["step"] == 5
        return metadata

    saved = results(3, save, coordinator=coordinator)
    assert all(metadata == saved[0] for metadata in saved)
    assert list(saved[0].state_dict_metadata) == ["w", "step"]
    assert results(3, load, coordinator=coordinator) == saved


def test_without_other_ranks_each_saves_its_own():
    paths = [fresh_path(), fresh_path()]

    def run(group: ThreadGroup) -> Any:
        path = paths[group.rank]
        xckpt.save_state_dict(
            {"rank": group.rank}, ZarrStorageWriter(path), process_group=group, no_dist=True
        )
        state = {"rank": -1}
        xckpt.load_state_dict(state, ZarrStorageReader(path), process_group=group, no_dist=True)
        return state["rank"]

    assert results(2, run) == [0, 1]


def test_writer_reader_and_planners_serve_one_save_after_another(tmp_path):
    """The same leaves, others, one that fails between them, long values; on all ranks."""
    path = tmp_path / "ckpt"
    states: list[Any] = [
        {"w": ARRAY, "long": "x" * 9000, "step": 0},
        {"w": ARRAY + 1, "long": "x" * 9000, "step": 1},
        {"w": object()},
        {"w": ARRAY[:2], "other": ARRAY, "long": "y" * 5000},
        {"w": ARRAY + 1, "long": "x" * 9000, "step": 1},
    ]

    def run(group: ThreadGroup) -> list[Any]:
        writer, reader = ZarrStorageWriter(path, overwrite=True), ZarrStorageReader(path)
        save_planner, load_planner = DefaultSavePlanner(), DefaultLoadPlanner()
        found: list[Any] = []
        for state in states:
            try:
                saved = xckpt.save_state_dict(
                    state, writer, process_group=group, planner=save_planner
                )
            except xckpt.XckptError:
                found.append(None)
                continue
            like = {n: "" if isinstance(x, str) else np.zeros_like(x) for n, x in state.items()}
            like |= {"step": 0} if "step" in state else {}
            loaded = xckpt.load_state_dict(like, reader, process_group=group, planner=load_planner)
            assert loaded == saved and list(saved.state_dict_metadata) == list(state)
            found.append(like)
            group.barrier()
            assert xckpt.open(path).verify() == []
            group.barrier()
        return found

    for found in results(2, run):
        assert found[2] is None
        for state, like in zip(states, found, strict=True):
            for name in like or ():
                assert np.array_equal(like[name], state[name]), name


class EmptyList:
    """What `bool` takes for false."""

    def __len__(self) -> int:
        return 0


class FalsyGroup(EmptyList, LocalGroup):
    pass


class FalsyWriter(EmptyList, ZarrStorageWriter):
    pass


class FalsyReader(EmptyList, ZarrStorageReader):
    pass


class FalsySavePlanner(EmptyList, DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data="was asked")


class FalsyLoadPlanner(EmptyList, DefaultLoadPlanner):
    asked = 0

    def finish_plan(self, central_plan):
        self.asked += 1
        return super().finish_plan(central_plan)


SAVES: dict[str, Callable[[str, Any], xckpt.Metadata]] = {
    "save": lambda path, state: xckpt.save(
        path, state, planner=FalsySavePlanner(), group=FalsyGroup()
    ),
    "save_state_dict": lambda path, state: xckpt.save_state_dict(
        state, FalsyWriter(path), planner=FalsySavePlanner(), process_group=FalsyGroup()
    ),
}
LOADS: dict[str, Callable[[str, Any, FalsyLoadPlanner], object]] = {
    "load": lambda path, state, planner: state.update(
        xckpt.load(path, state, planner=planner, group=FalsyGroup())
    ),
    "load_into": lambda path, state, planner: xckpt.load_into(
        path, state, planner=planner, group=FalsyGroup()
    ),
    "load_state_dict": lambda path, state, planner: xckpt.load_state_dict(
        state, FalsyReader(path), planner=planner, process_group=FalsyGroup()
    ),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_nothing_that_was_passed_is_taken_for_nothing(save, load):
    path, planner = fresh_path(), FalsyLoadPlanner()
    assert not planner and not FalsyGroup() and not FalsyWriter(path)
    assert save(path, {"w": ARRAY}).planner_data == "was asked"
    state = {"w": np.zeros_like(ARRAY)}
    load(path, state, planner)
    assert planner.asked == 1 and np.array_equal(state["w"], ARRAY)


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner()], ids=["none", "own"])
def test_the_options_of_the_writer_count(planner):
    path = fresh_path()
    options = xckpt.SaveOptions(chunk_bytes=32)
    xckpt.save_state_dict({"w": ARRAY}, ZarrStorageWriter(path, options=options), planner=planner)
    stored = xckpt.open(path)["w"]
    assert isinstance(stored, xckpt.StoredArray) and stored.chunks == (2, 4)


def test_the_serialiser_of_the_options_counts():
    path = fresh_path()
    options = xckpt.SaveOptions(serialise=lambda leaf: repr(leaf).encode())
    xckpt.save_state_dict({"set": {1}}, ZarrStorageWriter(path, options=options))
    assert xckpt.open(path)["set"] == b"{1}"


def test_the_log_and_the_metrics_tell_of_both_calls(tmp_path, caplog):
    seen: list[xckpt.Metrics] = []
    path = tmp_path / "ckpt"
    with caplog.at_level(logging.INFO, "xckpt"):
        writer = ZarrStorageWriter(path, options=xckpt.SaveOptions(metrics=seen.append))
        xckpt.save_state_dict({"w": np.ones(4)}, writer)
        reader = ZarrStorageReader(path, options=xckpt.LoadOptions(progress=True))
        xckpt.load_state_dict({"w": np.zeros(4)}, reader)
    assert reader.options.progress is True  # The bar was there for the call alone.
    assert [(took.operation, took.bytes) for took in seen] == [("save_state_dict", 32)]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith(f"save_state_dict {path}: rank 0 of 1 wrote")
    assert lines[1].startswith(f"load_state_dict {path}: rank 0 of 1 read")


def test_a_planner_with_a_grid_of_its_own_keeps_it():
    path = fresh_path()
    planner = DefaultSavePlanner(grid=GridOptions(chunk_bytes=16))
    options = xckpt.SaveOptions(chunk_bytes=32)
    xckpt.save(path, {"w": ARRAY}, planner=planner, options=options)
    stored = xckpt.open(path)["w"]
    assert isinstance(stored, xckpt.StoredArray) and stored.chunks == (1, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_a_planner_is_in_place_for_as_long_as_that_is_wanted(fails):
    path, planner = fresh_path(), DefaultLoadPlanner()
    xckpt.save(path, {"w": ARRAY})
    state = {"w": np.zeros(3) if fails else np.zeros_like(ARRAY)}
    if fails:
        with pytest.raises(xckpt.TreeMismatchError, match="w: shape"):
            xckpt.load_state_dict(state, ZarrStorageReader(path), planner=planner)
    else:
        xckpt.load_state_dict(state, ZarrStorageReader(path), planner=planner)
        assert np.array_equal(state["w"], ARRAY)
    zeros = {"w": np.zeros_like(ARRAY)}
    assert np.array_equal(xckpt.load(path, zeros, planner=planner)["w"], ARRAY)
    assert not zeros["w"].any()


def test_there_must_be_something_to_fill():
    path = fresh_path()
    xckpt.save(path, {"w": ARRAY})
    nothing: Any = None
    with pytest.raises(TypeError, match="nothing to load into"):
        xckpt.load_state_dict(nothing, ZarrStorageReader(path))
    with pytest.raises(TypeError, match="nothing to load into"):
        xckpt.load_into(path, nothing)


def test_what_is_no_group_is_refused():
    path = fresh_path()
    with pytest.raises(TypeError, match=r"a DeviceMesh, not a str"):
        xckpt.save_state_dict({}, ZarrStorageWriter(path), process_group="world")
    with pytest.raises(ValueError, match="coordinator_rank is 1, but there is only rank 0"):
        xckpt.save_state_dict({}, ZarrStorageWriter(path), coordinator_rank=1)
    with pytest.raises(ValueError, match="coordinator_rank is 3, but there is only rank 0"):
        xckpt.load_state_dict({}, ZarrStorageReader(path), no_dist=True, coordinator_rank=3)
    with pytest.raises(ValueError, match="coordinator_rank is 1, but the group's coordinator is 0"):
        xckpt.load_state_dict(
            {}, ZarrStorageReader(path), process_group=LocalGroup(), coordinator_rank=1
        )
