"""Something from every rank, kept with the checkpoint in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from examples.planners.extra_data import ExtraDataPlanner
from tests.support.jobs import fresh_path
from tests.support.sharded_arrays import cut
from xckpt.planner import DefaultLoadPlanner
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

WEIGHT = np.arange(24, dtype=np.float32).reshape(6, 4)
ROWS = [((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (2, 4))]


def extra(rank: int) -> dict[str, Any]:
    return {"rank": rank, "seeds": [rank, 2**40, -1.5], "note": None, "deep": {"a": [True, "ü"]}}


@pytest.mark.parametrize("size, coordinator", [(1, 0), (2, 1), (3, 0), (3, 2)])
def test_all_parts_are_there_in_rank_order(size, coordinator):
    path = fresh_path()
    expected = [extra(rank) for rank in range(size)]

    def save(group: ThreadGroup) -> xckpt.Metadata:
        boxes = ROWS if size == 1 else ROWS[group.rank :: size]
        state = {"w": cut(WEIGHT, boxes), "opt": [{"step": 3}]}
        planner = ExtraDataPlanner(extra(group.rank))
        return xckpt.save_state_dict(
            state, ZarrStorageWriter(path), process_group=group, planner=planner
        )

    def load(group: ThreadGroup) -> xckpt.Metadata:
        state: dict[str, Any] = {"w": np.zeros_like(WEIGHT), "opt": [{"step": 0}]}
        planner = DefaultLoadPlanner()
        metadata = xckpt.load_state_dict(
            state, ZarrStorageReader(path), process_group=group, planner=planner
        )
        assert np.array_equal(state["w"], WEIGHT) and state["opt"] == [{"step": 3}]
        assert planner.metadata.planner_data == expected
        return metadata

    saved = results(size, save, coordinator=coordinator)
    assert all(metadata.planner_data == expected for metadata in saved)
    assert xckpt.open(path).metadata.planner_data == expected
    assert all(metadata.planner_data == expected for metadata in results(size, load))


def test_it_is_apart_from_the_users_metadata_and_the_tree():
    path = fresh_path()
    planner = ExtraDataPlanner("mine")
    xckpt.save(path, {"a": [1, (2, [])]}, planner=planner, metadata={"run": 7})
    stored = xckpt.open(path)
    assert stored.metadata.planner_data == ["mine"]
    assert stored.user_metadata == stored.metadata.user_metadata == {"run": 7}
    assert xckpt.load(path) == {"a": [1, (2, [])]}


def test_every_rank_sees_the_same_whatever_json_makes_of_it():
    path = fresh_path()

    def save(group: ThreadGroup) -> object:
        planner = ExtraDataPlanner((group.rank, {"pair": (1, 2)}))
        return xckpt.save(path, {"step": 1}, group=group, planner=planner).planner_data

    expected = [[rank, {"pair": [1, 2]}] for rank in range(2)]
    assert results(2, save) == [expected] * 2
    assert xckpt.open(path).metadata.planner_data == expected


@pytest.mark.parametrize(
    "part, text",
    [
        ({"when": float("nan")}, "planner_data/1/when: nan is not a JSON number"),
        ({3: 4}, "planner_data/1: the key 3 is an int; JSON keys are strings"),
        (b"bytes", "planner_data/1: a builtins.bytes is not a JSON value"),
    ],
)
def test_what_json_cannot_carry_is_refused_and_nothing_is_saved(tmp_path, part, text):
    def save(group: ThreadGroup) -> None:
        planner = ExtraDataPlanner(part if group.rank == 1 else None)
        xckpt.save(tmp_path / "ckpt", {"step": 1}, group=group, planner=planner)

    for outcome in run_ranks(2, save):
        assert isinstance(outcome.error, xckpt.XckptError) and text in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


def test_what_no_message_carries_is_refused_by_the_rank_that_has_it(tmp_path):
    def save(group: ThreadGroup) -> None:
        planner = ExtraDataPlanner(object() if group.rank == 1 else None)
        xckpt.save(tmp_path / "ckpt", {"step": 1}, group=group, planner=planner)

    for outcome in run_ranks(2, save):
        assert isinstance(outcome.error, TypeError)
        assert isinstance(outcome.error.__cause__, xckpt.RanksFailedError)
        [failure] = outcome.error.__cause__.failures
        assert failure.rank == 1 and "planner_data" in failure.message
    assert list(tmp_path.iterdir()) == []
