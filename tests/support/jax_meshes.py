"""Random meshes, partition specs and arrays, for Hypothesis."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Boxes

AXES = ("data", "model", "expert")
DTYPES = ("float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "int4", "uint32")


def mesh(*sizes: int) -> Mesh:
    """A mesh of axes a, b, c over the first devices."""
    devices = np.array(jax.devices()[: math.prod(sizes)])
    return Mesh(devices.reshape(sizes), ("a", "b", "c")[: len(sizes)])


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """A mesh of 1 to 3 axes over some of the devices, in any order."""
    devices = draw(st.permutations(jax.devices()))
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        most = len(devices) // math.prod(sizes)
        sizes.append(draw(st.integers(1, most)))
    grid = np.array(devices[: math.prod(sizes)], dtype=object).reshape(sizes)
    return Mesh(grid, AXES[: len(sizes)])


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, rank: int) -> PartitionSpec:
    """Each mesh axis shards one dimension or none; a dimension may have several axes."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    entries = [tuple(axes) if len(axes) > 1 else (axes[0] if axes else None) for axes in dims]
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()
    return PartitionSpec(*entries)


def ways(sharding: NamedSharding, rank: int) -> list[int]:
    """Into how many parts each dimension is cut."""
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
    return [math.prod(sharding.mesh.shape[a] for a in names if a is not None) for names in axes]


@st.composite
def shardings(draw: st.DrawFn, max_rank: int = 3) -> tuple[NamedSharding, tuple[int, ...]]:
    """A sharding and a shape that it divides; zero-size and 0-d shapes included."""
    mesh = draw(meshes())
    rank = draw(st.integers(0, max_rank))
    sharding = NamedSharding(mesh, draw(specs(mesh, rank)))
    shape = tuple(parts * draw(st.integers(0, 3)) for parts in ways(sharding, rank))
    return sharding, shape


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> NDArray[np.generic]:
    """Reproducible values of any of the format's types."""
    kind = numpy_dtype(dtype)
    numbers = np.random.default_rng(seed).integers(-7, 8, shape)
    if dtype == "bool":
        return numbers > 0
    if dtype.startswith("uint"):
        numbers = abs(numbers)
    if dtype.startswith("complex"):
        return (numbers + 1j * numbers[..., ::-1] if shape else numbers * 1j).astype(kind)
    return numbers.astype(kind)


def slices(boxes: Boxes, index: int) -> tuple[slice, ...]:
    """Box ``index`` as NumPy takes it."""
    low, high = boxes.offsets[index].tolist(), boxes.ends[index].tolist()
    return tuple(slice(a, b) for a, b in zip(low, high, strict=True))


def same(a: object, b: object) -> None:
    """Assert that two arrays have one shape, dtype and content, NaN and -0.0 included."""
    left, right = np.asarray(a), np.asarray(b)
    assert left.shape == right.shape
    assert left.dtype == right.dtype
    assert np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()


def with_64_bits() -> AbstractContextManager[object]:
    """A context with 64-bit types switched on, in this thread."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # type: ignore[attr-defined]  # before jax 0.8

    return enable_x64()
