"""What each rank plans alone is what the coordinator would give it, had it gathered all plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.spreads import on_meshes
from tests.support.tilings import holders, tiled_shapes
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions
from xckpt.core.geometry.spread import Listed, MeshProcesses, OnMesh, Processes, Spread
from xckpt.core.leaf import HostSource
from xckpt.core.plan import layout
from xckpt.core.plan.alone import known as module
from xckpt.core.plan.alone.known import KnownPlans
from xckpt.core.plan.items import SavePlan
from xckpt.core.plan.merge import global_plan
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine.adapters import loaded_adapters


def source(
    shape: tuple[int, ...],
    boxes: Boxes,
    spread: Callable[[], Spread | None] | None,
    dtype: str = "int32",
    sharded: bool = True,
) -> HostSource:
    """A tensor without elements: planning reads none."""
    return HostSource(shape, dtype, boxes, (), sharded, spread=spread)


Everywhere = tuple[tuple[int, ...], str, Spread | None]
"""The shape, dtype and spread of a tensor; no spread: whole on every rank."""


@st.composite
def listed(draw: st.DrawFn, ranks: int) -> Everywhere:
    """A tensor in any boxes, each on some ranks."""
    shape, boxes = draw(tiled_shapes())
    held = draw(holders(len(boxes), ranks))
    pairs = [(rank, box) for box, on in zip(boxes, held, strict=True) for rank in on]
    spread = Listed.of(
        "torch",
        [rank + FIRST for rank, _ in pairs],
        Boxes.of([box for _, box in pairs], rank=len(shape)),
    )
    return shape, "int8", spread


FIRST = 3
"""The framework's number of rank 0."""


@st.composite
def states(draw: st.DrawFn) -> tuple[int, dict[str, Everywhere]]:
    """Some tensors on some ranks; several of each kind."""
    ranks = draw(st.integers(1, 6))
    mesh = on_meshes(range(FIRST, FIRST + ranks)).map(
        lambda spread: (spread.shape, "int32", spread)
    )
    whole = st.lists(st.integers(0, 9), max_size=2).map(lambda shape: (tuple(shape), "int32", None))
    kinds = draw(st.lists(mesh | listed(ranks) | whole, min_size=1, max_size=4))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))
    return ranks, {f"w{number}": each for number, each in enumerate(chosen)}


def processes(ranks: int) -> Processes:
    return Processes("torch", np.arange(ranks) + FIRST)


def planner_of(rank: int, ranks: int, state: dict[str, Everywhere], **more: Any) -> Any:
    """A planner that has taken what a rank has of a state."""
    leaves: dict[str, Any] = {"step": 7, **more}
    for name, (shape, dtype, spread) in state.items():
        held = Boxes.whole(shape) if spread is None else spread.held_by(rank, processes(ranks))
        assert held is not None
        # As adapters have it: each box once.
        distinct = [(box.offsets, box.sizes) for box in dict.fromkeys(held)]
        boxes = Boxes.of(distinct, rank=len(shape))
        ask = None if spread is None else (lambda spread=spread: spread)
        leaves[name] = source(shape, boxes, ask, dtype, sharded=spread is not None)
    planner = DefaultSavePlanner(grid=GridOptions(64, 0))
    planner.use_adapters(loaded_adapters())
    planner.set_up_planner(leaves)
    return planner


def known_by(
    rank: int, ranks: int, state: dict[str, Everywhere], **more: Any
) -> tuple[SavePlan, KnownPlans | None]:
    """A rank's plan, and what it knows of all."""
    planner = planner_of(rank, ranks, state, **more)
    plan = planner.create_local_plan()
    return plan, planner.known_plans(plan, rank, processes(ranks))


@pytest.fixture(autouse=True)
def _share_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SMALLEST_SHARE", 16)


@examples(60, 2000)
@given(states())
def test_a_rank_alone_plans_what_the_coordinator_would(case):
    ranks, state = case
    made = [known_by(rank, ranks, state) for rank in range(ranks)]
    shares, metadata = global_plan([plan for plan, _ in made], GridOptions(64, 0))
    said: set[bytes] = set()
    for (_, known), share in zip(made, shares, strict=True):
        assert known is not None
        own = known.share()
        assert own is not None
        assert list(own[0].items) == list(share.items)
        assert own[1] == metadata
        said.add(b"".join(known.facts()))
    assert len(said) == 1


def rows(ranks: int = 4, size: int = 8, axis: int = 0) -> Everywhere:
    mesh = MeshProcesses("torch", np.arange(ranks) + FIRST)
    cuts = ((0,), ()) if axis == 0 else ((), (0,))
    return (size, 8), "int32", OnMesh((size, 8), mesh, cuts)


def said(rank: int, state: dict[str, Everywhere], **more: Any) -> bytes:
    plan, known = known_by(rank, 4, state, **more)
    assert known is not None
    return b"".join([*known.facts(), repr(list(plan.items)[:0]).encode()])


@pytest.mark.parametrize(
    "other",
    [
        {"w": rows(axis=1)},
        {"w": rows(), "v": rows()},
        {"w": ((8, 8), "int32", None)},
    ],
)
def test_ranks_that_differ_say_other_facts(other):
    assert said(0, {"w": rows()}) == said(1, {"w": rows()}) != said(1, other)
    assert said(0, {"w": rows()}) != said(1, {"w": rows()}, more={})


def test_a_rank_that_holds_something_else_knows_nothing():
    """It says of itself what is not so; then it may be wrong about others, too."""
    plan, known = known_by(0, 4, {"w": rows()})
    assert known is not None
    spread = rows()[2]
    assert spread is not None
    moved = source((8, 8), Boxes.of([((2, 0), (2, 8))]), lambda: spread)
    planner = DefaultSavePlanner()
    planner.use_adapters(loaded_adapters())
    planner.set_up_planner({"w": moved})
    plan = planner.create_local_plan()
    assert planner.known_plans(plan, 0, processes(4)) is None
    assert planner.known_plans(plan, 1, processes(4)) is not None


def test_what_is_not_known_of_all_is_not_known():
    whole = {"w": rows()}
    for unknown in (
        source((8, 8), Boxes.of([((0, 0), (2, 8))]), None),
        source((8, 8), Boxes.of([((0, 0), (2, 8))]), lambda: None),
        source((8, 8), Boxes.of([((0, 0), (2, 8))]), lambda: whole["w"][2], dtype=""),
    ):
        assert known_by(0, 4, whole, unknown=unknown)[1] is None
    # Some of its processes are in no group, or it is of another framework.
    _, known = known_by(0, 2, whole)
    assert known is not None and known.share() is None
    planner = planner_of(0, 4, whole)
    plan = planner.create_local_plan()
    assert planner.known_plans(plan, 0, Processes("jax", np.arange(4) + FIRST)) is None


def test_shards_that_make_up_no_tensor_are_for_the_coordinator_to_name():
    gap = Listed.of("torch", [FIRST], Boxes.of([((0, 0), (7, 8))]))
    _, known = known_by(0, 1, {"w": ((8, 8), "int32", gap)})
    assert known is not None and known.share() is None


def test_many_boxes_are_not_planned_by_each_rank(monkeypatch: pytest.MonkeyPatch):
    state = {f"w{size}": rows(size=size) for size in (4, 8, 12)}
    monkeypatch.setattr(module, "MOST_BOXES", 16)
    assert known_by(0, 4, state)[1] is not None  # values and three kinds, of four ranks
    monkeypatch.setattr(module, "MOST_BOXES", 15)
    assert known_by(0, 4, state)[1] is None


class Chosen(DefaultSavePlanner):
    """Makes plans of its own."""

    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()


class Shared(DefaultSavePlanner):
    """Shares them out by itself."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return super().create_global_plan(all_plans)


@pytest.mark.parametrize("planner", [Chosen(), Shared()])
def test_plans_of_other_planners_are_gathered(planner):
    planner.set_up_planner({"step": 7})
    assert planner.known_plans(planner.create_local_plan(), 0, processes(4)) is None
