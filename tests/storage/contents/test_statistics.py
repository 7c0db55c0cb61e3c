"""Statistics of stored tensors: as NumPy has them, whatever dtype, chunks and budget are."""

from __future__ import annotations

from itertools import count

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import xckpt
from tests.support.examples import examples
from tests.support.states import SIGNALLING, signalling_nans
from xckpt.core.dtypes import DTYPES
from xckpt.storage.contents.statistics import Statistics, merged, of_block, statistics
from xckpt.storage.stored_array import StoredArray

PLACES = count()


def stored(array: np.ndarray, chunk_bytes: int = 64) -> StoredArray:
    path = f"memory://counted/{next(PLACES)}"
    xckpt.save(path, {"w": array}, options=xckpt.SaveOptions(chunk_bytes=chunk_bytes))
    leaf = xckpt.open(path)["w"]
    assert isinstance(leaf, StoredArray)
    return leaf


@examples(25)
@given(
    array=arrays(np.float64, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)),
    memory=st.sampled_from([1, 200, 1 << 20]),
)
def test_floats_are_as_numpy_has_them(array: np.ndarray, memory: int) -> None:
    found = statistics(stored(array), memory)
    finite = array[np.isfinite(array)]
    assert found.count == array.size
    assert (found.nans, found.infinities) == (np.isnan(array).sum(), np.isinf(array).sum())
    if finite.size:
        assert (found.least, found.largest) == (finite.min(), finite.max())
        scale = max(1.0, float(np.abs(finite).max()))
        assert found.mean is not None
        assert abs(found.mean / scale - (finite / scale).mean()) < 1e-9
    else:
        assert (found.least, found.largest, found.mean) == (None, None, None)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(dtype: str) -> None:
    array = np.array([1, 0, 1, 1]).astype(DTYPES[dtype])
    found = statistics(stored(array), 1 << 20)
    if dtype.startswith("complex"):
        assert found == Statistics(4, 0, 0, None, None, 0.75)
    else:
        zeros = dtype != "float8_e8m0fnu"  # it has none: NaN is in its place
        assert (found.count, found.nans, found.largest) == (4, not zeros, 1)
        assert (found.least, found.mean) == ((0, 0.75) if zeros else (1, 1))
    assert isinstance(found.mean, float | complex)


def test_small_floats_have_nans_too() -> None:
    array = np.array([np.nan, np.inf, 2.0, -np.inf], ml_dtypes.bfloat16)
    assert of_block(array) == Statistics(4, 1, 2, 2.0, 2.0, 2.0)
    assert of_block(np.array([complex(np.nan, np.inf), 1j])) == Statistics(2, 1, 0, mean=1j)


@pytest.mark.parametrize("dtype", SIGNALLING)
def test_signalling_nans_are_counted_without_a_warning(dtype: str) -> None:
    nans = signalling_nans(dtype)
    assert of_block(np.append(nans, np.array([2], nans.dtype))) == Statistics(9, 8, 0, 2, 2, 2)


def test_integers_are_exact_and_large_floats_do_not_overflow() -> None:
    big = (1 << 64) - 1
    found = of_block(np.array([big, big - 1], np.uint64))
    assert (found.least, found.largest) == (big - 1, big)
    largest = np.finfo(np.float64).max
    found = merged(of_block(np.full(4, largest)), of_block(np.full(12, largest)))
    assert found.mean == pytest.approx(largest)
