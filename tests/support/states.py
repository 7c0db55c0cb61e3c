"""States of every kind of leaf, and the ways to store them."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.sharded_arrays import rows
from xckpt.core.dtypes import numpy_dtype
from xckpt.options import SaveOptions

LAYOUTS = {
    "plain": SaveOptions(chunk_bytes=150),
    "crc32c": SaveOptions(chunk_bytes=150, crc32c=True),
    "sharded": SaveOptions(chunk_bytes=150, shard_bytes=600),
    "sharded crc32c": SaveOptions(chunk_bytes=150, shard_bytes=600, crc32c=True),
}
"""Chunks small enough that a small state has many."""


def arrays() -> dict[str, NDArray[np.generic]]:
    """Arrays of several chunks, uneven ones, and the smallest there are."""
    return {
        "even": np.arange(256, dtype=np.float32).reshape(16, 16),
        "prime": np.arange(13 * 7, dtype=np.int16).reshape(13, 7),
        "deep": np.linspace(-1, 1, 60).reshape(3, 1, 4, 5),
        "half": np.arange(40).astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5),
        "none": np.zeros((0, 3), np.int8),
    }


def everything() -> dict[str, object]:
    """`arrays`, a leaf in pieces, and values: short, long, and None."""
    return {
        **arrays(),
        "pieces": rows(np.arange(101 * 3, dtype=np.int32).reshape(101, 3), 7, 20, 51),
        "step": 3,
        "note": "ü" * 2100,
        "nothing": None,
        "nested": {"list": [1.5, {"x": np.arange(3)}, ()], "0": b"\0\xff"},
    }


def random_array(
    shape: tuple[int, ...], dtype: np.dtype[np.generic], seed: int = 0
) -> NDArray[np.generic]:
    """Every bit pattern that the type has; for bool 0 and 1."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


SIGNALLING = {"float16": 0x7C01, "bfloat16": 0x7F81, "float32": 0x7F800001}
"""A signalling NaN of each type that the processor widens."""


def signalling_nans(dtype: str) -> NDArray[np.generic]:
    """Eight of them: `inf` and one bit more, which arithmetic reports."""
    number = numpy_dtype(dtype)
    return np.full(8, SIGNALLING[dtype], f"u{number.itemsize}").view(number)


def expected(state: Mapping[str, object]) -> dict[str, object]:
    """What loading gives for `everything`: plain arrays."""
    return {name: getattr(leaf, "array", leaf) for name, leaf in state.items()}


def same(a: object, b: object) -> bool:
    """Whether two trees are the same to the bit, containers and types included."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)
