"""Renamed keys: in the metadata, in the storage, and back where they came from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zarr

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from examples.planners.rename import RenamingLoadPlanner, RenamingSavePlanner
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut, holds, wish
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)
ROWS = [((0, 0), (3, 4)), ((3, 0), (3, 4))]
COLUMNS = [((0, 0), (6, 3)), ((0, 3), (6, 1))]
NAMES = ["foo_w", "foo_opt/0/mu", "foo_opt/0/step", "foo_betas/0", "foo_betas/1"]


def state(weight: object) -> dict[str, Any]:
    return {"w": weight, "opt": [{"mu": torch.ones(3), "step": 7}], "betas": (0.9, "adam")}


def zeros(weight: object) -> dict[str, Any]:
    return {"w": weight, "opt": [{"mu": torch.zeros(3), "step": 0}], "betas": (0.0, "")}


def test_the_names_are_new_in_metadata_and_storage(tmp_path):
    writer = ZarrStorageWriter(tmp_path / "ckpt")
    saved = xckpt.save_state_dict(state(WEIGHT), writer, planner=RenamingSavePlanner("foo_"))
    assert list(saved.state_dict_metadata) == list(xckpt.open(tmp_path / "ckpt")) == NAMES
    group: Any = zarr.open_group(tmp_path / "ckpt", mode="r")
    assert np.array_equal(group["foo_w"][:], WEIGHT) and "w" not in group


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_ranks_load_in_place_what_any_ranks_saved(size):
    path = fresh_path()

    def save(group: ThreadGroup) -> None:
        mine = state(cut(WEIGHT, ROWS[group.rank : group.rank + 1] if size > 1 else ROWS))
        xckpt.save(path, mine, group=group, planner=RenamingSavePlanner("foo_"))

    def load(group: ThreadGroup) -> Any:
        part = cut(np.zeros_like(WEIGHT), COLUMNS[group.rank % 2 : group.rank % 2 + 1])
        mine = zeros(part)
        mu = mine["opt"][0]["mu"]
        xckpt.load_state_dict(
            mine,
            ZarrStorageReader(path),
            process_group=group,
            planner=RenamingLoadPlanner("foo_"),
        )
        assert mine["w"] is part and mine["opt"][0]["mu"] is mu
        return mine

    results(size, save)
    for loaded in results(size, load):
        assert list(loaded) == ["w", "opt", "betas"] and holds(loaded["w"], WEIGHT)
        assert torch.equal(loaded["opt"][0]["mu"], torch.ones(3))
        assert loaded["opt"][0]["step"] == 7 and loaded["betas"] == (0.9, "adam")


def test_new_arrays_have_the_old_names_too():
    path = fresh_path()
    xckpt.save(path, state(WEIGHT), planner=RenamingSavePlanner("foo_"))
    like = zeros(wish(WEIGHT, COLUMNS))
    loaded: Any = xckpt.load(path, like, planner=RenamingLoadPlanner("foo_"))
    assert list(loaded) == ["w", "opt", "betas"] and holds(loaded["w"], WEIGHT)
    assert like["opt"][0]["step"] == 0, "the targets stay as they are"
    everything: Any = xckpt.load(path, planner=RenamingLoadPlanner("foo_"))
    assert np.array_equal(everything["w"], WEIGHT) and everything["betas"] == (0.9, "adam")


def test_a_key_that_is_not_there_is_missed_under_its_new_name():
    path = fresh_path()
    xckpt.save(path, {"w": WEIGHT}, planner=RenamingSavePlanner("foo_"))
    with pytest.raises(xckpt.TreeMismatchError) as caught:
        xckpt.load(path, {"v": WEIGHT}, planner=RenamingLoadPlanner("foo_"))
    assert set(caught.value.problems) == {
        "foo_v: wanted, but not in the checkpoint",
        "foo_w: in the checkpoint, but not wanted",
    }
