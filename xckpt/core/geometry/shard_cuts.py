"""The shards that a stored sharding stands for: which device of the mesh holds which elements.

A sharding cuts each dimension of a tensor on its own, so the shards are products of intervals:

1. `dimension_cuts` takes the mesh axes that cut a dimension (`xckpt.core.geometry.cut_axes`) and
   gives an interval list for each combination of their coordinates. A mesh of thousands of devices
   needs as many intervals as one dimension has parts, not as it has devices.
2. `device_boxes` combines the dimensions for each device.

Devices are numbered along the mesh, the last axis fastest; most programs number their ranks so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.placements import Cut, Interval, combined, nested, readings
from xckpt.core.metadata import Sharding

MOST_DEVICES: Final = 1 << 17
"""Larger meshes are not examined: a manifest may claim any size."""

MOST_WORK: Final = 1 << 20
"""Most intervals that are computed for one dimension."""

_PLACEMENT = re.compile(
    r"(?:Replicate\(\)"
    r"|(?:Shard|ChunkShardingSpec)\((?:dim=)?(?P<dim>\d{1,3})\)"
    r"|_StridedShard\((?:dim=)?(?P<strided>\d{1,3}), (?:sf|split_factor)=(?P<factor>\d{1,6})\))"
)


@dataclass(frozen=True, slots=True)
class DimensionCuts:
    """How one dimension of a tensor is cut."""

    axes: tuple[int, ...]
    """Numbers of the mesh axes that cut it, ascending; none if it is whole everywhere."""
    intervals: tuple[tuple[Interval, ...], ...]
    """The rows ``[lo, hi)`` at each combination of coordinates on these axes, the last fastest."""


def dimension_cuts(
    sharding: Sharding | None, shape: Sequence[int]
) -> tuple[DimensionCuts, ...] | None:
    """The cuts of each dimension; None where the sharding does not tell.

    It does not where it is unknown, names no shards (as torch's EnumerableShardingSpec does), or
    is of a mesh of more than `MOST_DEVICES`. Sizes that do not divide are cut as `torch.chunk`
    cuts.

    Example:
        >>> sharding = Sharding(axes=(("dp", 2), ("tp", 2)), spec=((), ("tp",)))
        >>> for cuts in dimension_cuts(sharding, (3, 5)):
        ...     print(cuts)
        DimensionCuts(axes=(), intervals=(((0, 3),),))
        DimensionCuts(axes=(1,), intervals=(((0, 3),), ((3, 5),)))
    """
    if sharding is None:
        return None
    sizes = [size for _, size in sharding.axes]
    if min(sizes, default=1) < 1 or prod(sizes) > MOST_DEVICES:
        return None
    factors = _factors(sharding, len(shape))
    if factors is None or _work(factors, sizes) > MOST_WORK:
        return None
    return tuple(
        _cuts(size, axes, [sizes[axis] for axis in axes])
        for size, axes in zip(shape, factors, strict=True)
    )


def device_boxes(cuts: Sequence[DimensionCuts], mesh: Sequence[int]) -> list[Boxes]:
    """The boxes that each device of a mesh holds, by its number; none where it holds no element.

    Args:
        cuts: of each dimension of a tensor.
        mesh: the size of each mesh axis.

    Example:
        >>> sharding = Sharding(axes=(("dp", 2), ("tp", 2)), spec=((), ("tp",)))
        >>> device_boxes(dimension_cuts(sharding, (3, 5)), (2, 2))[3]
        Boxes([0, 3) x [3, 5))
    """
    return [
        combined([_held(each, mesh, coordinate) for each in cuts])[0]
        for coordinate in product(*map(range, mesh))
    ]


def _held(
    cuts: DimensionCuts, mesh: Sequence[int], coordinate: Sequence[int]
) -> tuple[Interval, ...]:
    """The rows of a dimension that the device at a coordinate holds."""
    number = 0
    for axis in cuts.axes:
        number = number * mesh[axis] + coordinate[axis]
    return cuts.intervals[number]


def _factors(sharding: Sharding, rank: int) -> list[dict[int, int]] | None:
    """For each dimension the mesh axes that cut it, in the order of the cuts, and their factors."""
    factors: list[dict[int, int]] = [{} for _ in range(rank)]
    if sharding.spec is not None:
        numbers = {name: number for number, (name, _) in enumerate(sharding.axes)}
        for dimension, names in enumerate(sharding.spec):
            if dimension >= rank or not numbers.keys() >= set(names):
                return None if names else factors
            factors[dimension] = {numbers[name]: 1 for name in names}
        return factors
    for axis, text in enumerate(sharding.placements or ()):
        found = _PLACEMENT.fullmatch(text)
        if found is None or axis >= len(sharding.axes):
            return None
        dimension = found["dim"] or found["strided"]
        if dimension is not None:
            if int(dimension) >= rank:
                return None
            factors[int(dimension)][axis] = max(1, int(found["factor"] or 1))
    return factors


def _work(factors: Sequence[dict[int, int]], sizes: Sequence[int]) -> int:
    """The most intervals that any dimension has while it is cut."""
    return max(
        (prod(sizes[a] * factor for a, factor in each.items()) for each in factors), default=0
    )


def _cuts(size: int, factors: dict[int, int], parts: Sequence[int]) -> DimensionCuts:
    """The cuts of a dimension of ``size`` by the axes given, each of ``parts`` parts."""
    order = sorted(factors)
    in_parts = dict(zip(factors, parts, strict=True))
    intervals: list[tuple[Interval, ...]] = []
    for coordinates in product(*(range(in_parts[axis]) for axis in order)):
        at = dict(zip(order, coordinates, strict=True))
        cuts = [Cut(in_parts[axis], at[axis], factor) for axis, factor in factors.items()]
        strided = any(cut.factor > 1 for cut in cuts)
        intervals.append(readings(size, cuts)[0] if strided else nested(size, cuts))
    return DimensionCuts(tuple(order), tuple(intervals))


def held_by(boxes: Sequence[Boxes], rank: int) -> tuple[Boxes, NDArray[np.int64]]:
    """All devices' boxes in one column, and the device of each, (n,).

    Args:
        boxes: of each device.
        rank: dimensions of the tensor.
    """
    devices = np.repeat(np.arange(len(boxes), dtype=np.int64), [len(each) for each in boxes])
    if not len(devices):
        return Boxes.of([], rank=rank), devices
    return Boxes.concatenated([each for each in boxes if len(each)]), devices
