"""Where a tensor's boxes are on all processes, against NumPy's slices of each dimension."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.spreads import on_meshes
from tests.support.tilings import holders, tiled_shapes
from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.spread import Listed, MeshProcesses, OnMesh, Processes, Spread, Whole

NUMBERS = st.permutations(range(3, 15))
"""The framework's numbers of the ranks; a mesh may have some of them, in any order."""
MESHES = on_meshes(range(3, 15))
NINE = list(range(2, 11))


def cut(spread: OnMesh, coordinate: tuple[int, ...]) -> list[list[int]]:
    """The indices in each dimension that a coordinate of the mesh holds."""
    found: list[list[int]] = []
    for size, axes in zip(spread.shape, spread.cuts, strict=True):
        indices = np.arange(size)
        for axis in axes:
            step = -(-len(indices) // spread.mesh.numbers.shape[axis])
            indices = indices[step * coordinate[axis] :][:step]
        found.append(indices.tolist())
    return found


def indices(box: Box) -> list[list[int]]:
    ranges = zip(box.offsets, box.ends, strict=True)
    return [list(range(low, high)) for low, high in ranges]


@example(OnMesh((13,), MeshProcesses("torch", np.array([[5, 3, 9], [4, 6, 7]])), ((0, 1),)), NINE)
@given(MESHES, NUMBERS)
def test_a_mesh_cuts_each_dimension_by_ceiling_division(spread: OnMesh, numbers: list[int]) -> None:
    processes = Processes("torch", np.array(numbers))
    held = spread.held(processes)
    assert held is not None
    ranks, boxes = held
    places = [*np.ndindex(spread.mesh.numbers.shape)]
    assert [numbers[rank] for rank in ranks] == [spread.mesh.numbers[place] for place in places]
    assert [indices(box) for box in boxes] == [cut(spread, place) for place in places]


@st.composite
def lists(draw: st.DrawFn) -> tuple[list[int], Listed, list[tuple[int, Box]]]:
    """The number of each rank, a spread of boxes, and the pairs of rank and box in it."""
    shape, boxes = draw(tiled_shapes())
    ranks = draw(st.integers(1, 6))
    numbers = draw(NUMBERS)[:ranks]
    held = draw(holders(len(boxes), ranks))
    pairs = [(rank, Box(*box)) for box, on in zip(boxes, held, strict=True) for rank in on]
    listed = Boxes.of([(box.offsets, box.sizes) for _, box in pairs], rank=len(shape))
    return numbers, Listed.of("torch", [numbers[rank] for rank, _ in pairs], listed), pairs


@given(lists())
def test_a_list_is_what_was_listed(
    case: tuple[list[int], Listed, list[tuple[int, Box]]],
) -> None:
    numbers, spread, pairs = case
    held = spread.held(Processes("torch", np.array(numbers)))
    assert held is not None
    assert list(zip(held[0].tolist(), held[1], strict=True)) == pairs


@given(MESHES | lists().map(lambda case: case[1]) | st.just(Whole((3, 0))), NUMBERS)
def test_each_rank_holds_its_part_of_what_all_hold(spread: Spread, numbers: list[int]) -> None:
    processes = Processes("torch", np.array(numbers))
    held = spread.held(processes)
    assert held is not None
    for rank in range(len(numbers)):
        own = spread.held_by(rank, processes)
        assert own is not None
        assert own == held[1].take(held[0] == rank)


@given(MESHES | lists().map(lambda case: case[1]), NUMBERS, st.sampled_from(["jax", "xla", ""]))
def test_other_processes_are_not_known(
    spread: OnMesh | Listed, numbers: list[int], framework: str
) -> None:
    elsewhere = Processes(framework, np.array(numbers))
    assert spread.held(elsewhere) is None and spread.held_by(0, elsewhere) is None
    used = spread.mesh.numbers.ravel() if isinstance(spread, OnMesh) else spread.numbers
    [*_, last] = np.frombuffer(used, np.int64) if isinstance(used, bytes) else used
    others = Processes("torch", np.array([n for n in numbers if n != last]))
    assert spread.held(others) is None


@given(st.lists(st.integers(-5, 40), min_size=1, unique=True), st.lists(st.integers(-5, 40)))
def test_ranks_are_places_among_the_numbers(numbers: list[int], asked: list[int]) -> None:
    found = Processes("", np.array(numbers)).ranks(np.array(asked, np.int64))
    if all(number in numbers for number in asked):
        assert found is not None and found.tolist() == [numbers.index(number) for number in asked]
    else:
        assert found is None


@given(*[MESHES | lists().map(lambda case: case[1]) | st.just(Whole((3, 0)))] * 2)
def test_what_is_said_is_equal_where_all_is(one: Spread, other: Spread) -> None:
    assert (one.says() == other.says()) == (facts(one) == facts(other))


def facts(spread: Spread) -> object:
    if isinstance(spread, OnMesh):
        numbers = spread.mesh.numbers
        return spread.shape, spread.cuts, spread.mesh.framework, numbers.shape, numbers.tolist()
    return spread
