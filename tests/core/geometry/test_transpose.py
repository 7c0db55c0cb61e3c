"""Bits are copied between any two orders as NumPy copies them, whatever they mean."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from tests.support.examples import examples
from xckpt.core.geometry import transpose
from xckpt.core.geometry.transpose import copy_bits

DTYPES = ["bool", "int8", "float16", "float32", "float64", "complex64", "complex128"]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def noise(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:
    """Any bits: signalling NaNs too."""
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(0).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


@st.composite
def orders(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A target and a source: views of other memory, with other orders of axes and other steps."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    views: list[np.ndarray] = []
    for _ in range(2):
        axes = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 1, 1, 2, 3, -1])) for _ in shape]
        memory = noise(tuple(shape[axis] * abs(steps[axis]) + 1 for axis in axes), dtype)
        region = tuple(
            slice(None, shape[axis] * steps[axis], steps[axis])
            if steps[axis] > 0
            else slice(None, -shape[axis] - 1, -1)
            for axis in axes
        )
        views.append(memory[(*region, ...)].transpose(np.argsort(axes)))
    return views[0], views[1]


@given(
    orders=orders(),
    tile=st.integers(1, 64),
    across=st.integers(1, 8),
    short=st.integers(0, 4),
    long=st.integers(1, 32),
)
@examples(120, 3000)
def test_the_bits_are_those_that_numpy_copies(
    orders: tuple[np.ndarray, np.ndarray], tile: int, across: int, short: int, long: int
) -> None:
    target, source = orders
    around = target if target.base is None else target.base
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transpose, "SMALL_BYTES", 0)
        patch.setattr(transpose, "LINE_BYTES", 4)
        patch.setattr(transpose, "LONG_BYTES", long)
        patch.setattr(transpose, "TILE_BYTES", tile)
        patch.setattr(transpose, "TILE_ACROSS", across)
        patch.setattr(transpose, "SHORT", short)
        outside = around.tobytes()
        before = target.tobytes()
        copy_bits(target, source)
    assert target.tobytes() == source.tobytes()
    # What lies around the target's elements has not changed.
    target[...] = np.frombuffer(before, target.dtype).reshape(target.shape)
    assert around.tobytes() == outside


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, axes",
    [
        ((1000, 700), (1, 0)),
        ((90, 70, 3, 3), (2, 3, 1, 0)),
        ((3, 3, 70, 90), (3, 2, 0, 1)),
        ((4, 150_000), (1, 0)),
        ((150_000, 4), (1, 0)),
        ((300, 400, 5), (1, 0, 2)),
    ],
)
def test_large_arrays_are_copied_whole(
    dtype: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    source = noise(shape, np.dtype(dtype)).transpose(axes)
    target = np.empty(source.shape, source.dtype)
    copy_bits(target, source)
    assert target.tobytes() == source.tobytes()


def test_rows_that_numpy_has_no_element_for_are_copied_otherwise() -> None:
    def row(size: int) -> np.ndarray:  # of which nothing is read
        return as_strided(np.zeros(1, np.uint8), (1, size), (0, 1))

    for size in (transpose.LONG_BYTES, transpose.LONGEST_BYTES, 1 << 31, 1 << 33):
        if transpose._has_long_rows(row(size), row(size)):
            np.dtype((np.void, size))
    assert not transpose._has_long_rows(row(1 << 31), row(1 << 31))


def test_other_shapes_or_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 of shape \(3,\) does not match"):
        copy_bits(np.zeros(3, np.float64), np.zeros(3, np.float32))
