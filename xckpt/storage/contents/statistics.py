"""Statistics of a tensor: least, largest, mean, and how many elements are NaN or infinite.

1. `of_block` looks at a block of elements that fits a processor's cache, as float64, complex128 or
   integers: small floats are exact in float64.
2. `merged` joins two blocks; means are weighed, so that no sum grows with the tensor.
3. `statistics` goes through a stored tensor slab by slab, in a budget of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.storage.contents.slabs import any_order
from xckpt.storage.stored_array import StoredArray

BLOCK: Final = 1 << 17
"""Elements of a block: a MiB of float64."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Least, largest and mean are of the finite elements; None where there are none."""

    count: int = 0
    """Elements."""
    nans: int = 0
    """How many are NaN; a complex number is where one of its parts is."""
    infinities: int = 0
    """How many are infinite, of either sign, and not NaN."""
    least: int | float | None = None
    """The least; None of complex numbers, which have no order."""
    largest: int | float | None = None
    mean: float | complex | None = None

    @property
    def finite(self) -> int:
        """How many elements are numbers."""
        return self.count - self.nans - self.infinities


def statistics(
    stored: StoredArray, memory_bytes: int, on_read: Callable[[int], object] = lambda _: None
) -> Statistics:
    """The statistics of a stored tensor; every element is read, verified, once.

    Args:
        stored: the tensor.
        memory_bytes: what a slab and the chunks in flight may take.
        on_read: called with the bytes of each slab.

    Raises:
        CorruptCheckpointError: a chunk is not what was saved.
        StorageError: the storage refused.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://statistics", {"w": np.array([1.0, np.nan, 3.0, -np.inf])})
        >>> stored = xckpt.open("memory://statistics")["w"]
        >>> statistics(stored, 1 << 20)
        Statistics(count=4, nans=1, infinities=1, least=1.0, largest=3.0, mean=2.0)
    """
    total = Statistics()
    for _, slab in any_order(stored, memory_bytes):
        flat = slab.reshape(-1)
        blocks = (of_block(flat[low : low + BLOCK]) for low in range(0, flat.size, BLOCK))
        total = reduce(merged, blocks, total)
        on_read(slab.nbytes)
    return total


def of_block(block: NDArray[np.generic]) -> Statistics:
    """The statistics of some elements, one dimension of them.

    Example:
        >>> of_block(np.array([True, False]))
        Statistics(count=2, nans=0, infinities=0, least=0, largest=1, mean=0.5)
    """
    numbers: NDArray[Any] = _computed(block)
    if numbers.dtype.kind in "iu":
        return _summed(numbers, numbers.size, 0, 0)
    nans = int(np.isnan(numbers).sum())
    finite = np.isfinite(numbers)
    count = int(finite.sum())
    kept = numbers if count == numbers.size else numbers[finite]
    return _summed(kept, numbers.size, nans, numbers.size - count - nans)


def _computed(block: NDArray[np.generic]) -> NDArray[Any]:
    """Elements in a type that NumPy computes with, exactly."""
    if block.dtype.kind in "iuc":
        return block
    if block.dtype.kind == "b":
        return block.view(np.uint8)
    if block.dtype.name.startswith(("int", "uint")):  # ml_dtypes' types of few bits
        return block.astype(np.int64)
    with np.errstate(invalid="ignore"):  # the processor reports each signalling NaN
        return block.astype(np.float64)


def _summed(kept: NDArray[Any], count: int, nans: int, infinities: int) -> Statistics:
    """The statistics of finite elements, and of others that were counted."""
    if not kept.size:
        return Statistics(count, nans, infinities)
    is_complex = kept.dtype.kind == "c"
    with np.errstate(over="ignore", invalid="ignore"):
        mean = kept.mean(dtype=np.complex128 if is_complex else np.float64)
    if not np.isfinite(mean):
        mean = (kept * (1.0 / kept.size)).sum()  # The sum is larger than any float.
    if is_complex:
        return Statistics(count, nans, infinities, mean=complex(mean))
    return Statistics(count, nans, infinities, kept.min().item(), kept.max().item(), float(mean))


def merged(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two sets of elements together."""
    if not other.finite or not one.finite:
        numbers = one if one.finite else other
        least, largest, mean = numbers.least, numbers.largest, numbers.mean
    else:
        assert one.mean is not None and other.mean is not None
        share = other.finite / (one.finite + other.finite)
        mean = one.mean * (1 - share) + other.mean * share
        least = _of_both(min, one.least, other.least)
        largest = _of_both(max, one.largest, other.largest)
    return Statistics(
        one.count + other.count,
        one.nans + other.nans,
        one.infinities + other.infinities,
        least,
        largest,
        mean,
    )


def _of_both(
    which: Callable[[Any, Any], Any], one: int | float | None, other: int | float | None
) -> int | float | None:
    return None if one is None or other is None else which(one, other)
