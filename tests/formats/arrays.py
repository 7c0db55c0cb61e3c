"""Arrays of every element type, boxes of them, and what a source says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.tilings import Box, region, shapes
from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.formats.source import TensorSource


def filled(dtype: str, shape: Sequence[int], seed: int = 0) -> NDArray:
    """Any bits of the type, but bools of 0 and 1."""
    count = int(np.prod(shape)) * item_size(dtype)
    raw = np.random.default_rng([seed, count]).integers(0, 256, count, np.uint8)
    raw = raw % 2 if dtype == "bool" else raw
    return raw.view(numpy_dtype(dtype)).reshape(shape)


def same_bits(a: NDArray, b: NDArray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def read(source: TensorSource, name: str, box: Box | None = None) -> NDArray:
    """A box of a tensor, read into memory that is full of other bits."""
    spec = source.specs[name]
    offsets, sizes = box or ((0,) * len(spec.shape), spec.shape)
    into = np.empty(sizes, numpy_dtype(spec.dtype))
    into.reshape(-1).view(np.uint8)[...] = 0xA5
    source.read(name, ChunkStorageMetadata(tuple(offsets), tuple(sizes)), into)
    return into


def check_source(source: TensorSource, expected: Mapping[str, NDArray]) -> None:
    """A source has these tensors, and reads the whole and a part of each."""
    assert set(source.specs) == set(expected)
    for name, array in expected.items():
        assert same_bits(read(source, name), array), name
        box = (tuple(n // 3 for n in array.shape), tuple(n - n // 3 for n in array.shape))
        assert same_bits(read(source, name, box), np.asarray(array[region(box)])), name


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape and a box of it, perhaps empty."""
    shape = draw(shapes())
    low = tuple(draw(st.integers(0, n)) for n in shape)
    return shape, (low, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)))
