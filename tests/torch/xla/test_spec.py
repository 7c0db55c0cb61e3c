"""A partition spec over a mesh in the manifest's words; only numbers and names, no XLA."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from xckpt.torch.xla.spec import Spec, named_sharding, tiled_sharding

NAMES = ("data", "fsdp", "tensor")


@st.composite
def specs(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """A mesh, and for each dimension the numbers of the axes that cut it."""
    mesh = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3)))
    dims: list[list[int]] = [[] for _ in range(draw(st.integers(0, 3)))]
    for axis in draw(st.permutations(range(len(mesh)))):
        dim = draw(st.integers(-1, len(dims) - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return mesh, [tuple(axes) for axes in dims]


def as_given(
    axes: tuple[int, ...] | tuple[str, ...],
) -> int | str | tuple[int, ...] | tuple[str, ...] | None:
    """As `mark_sharding` takes it."""
    return axes if len(axes) > 1 else (axes[0] if axes else None)


@given(specs())
def test_numbers_and_names_say_the_same(
    case: tuple[tuple[int, ...], list[tuple[int, ...]]],
) -> None:
    mesh, dims = case
    tiles = [prod(mesh[axis] for axis in axes) for axes in dims]
    names = NAMES[: len(mesh)]
    by_number: Spec = [as_given(axes) for axes in dims]
    by_name: Spec = [as_given(tuple(names[axis] for axis in axes)) for axes in dims]
    found = named_sharding(mesh, by_number, tiles, names)
    assert found is not None and found.spec is not None
    assert found.axes == tuple(zip(names, mesh, strict=True))
    assert found.spec == tuple(tuple(names[axis] for axis in axes) for axes in dims)
    assert named_sharding(mesh, by_name, tiles, names) == found

    guessed = named_sharding(mesh, by_name, tiles)
    if guessed is not None:
        assert guessed.spec == found.spec
        used = {name for axes in found.spec for name in axes}
        assert {axis for axis in guessed.axes if axis[0] in used} == {
            axis for axis in found.axes if axis[0] in used
        }


def test_names_whose_sizes_are_unknown_are_not_guessed() -> None:
    assert named_sharding((2, 4), (("a", "b"), None), (8, 1)) is None
    assert named_sharding((2, 4), ("a", None), (3, 1)) is None
    square = named_sharding((2, 2), (("a", "b"), None), (4, 1))
    assert str(square) == "PartitionSpec(a+b, -) on a=2 x b=2"


def test_tiles_without_replicas() -> None:
    assert str(tiled_sharding((1, 8), 1)) == "PartitionSpec(-, dim0) on dim0=8"
