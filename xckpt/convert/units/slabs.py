"""Cutting a target into slabs, so that each is small and reads little that it does not want.

1. A tensor above the capacity is cut into slabs along one axis, and slabs that are still too large
   along another.
2. The axis with the least read amplification is cut: a transposed matrix is cut into columns,
   because its source's chunks are rows.
3. Slabs begin where chunks of the source begin, as far as the size allows, and at multiples of what
   the sink asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd, lcm

from xckpt.convert.units.unit import Costs, TargetPart
from xckpt.core.geometry.box import Box, Shape

SAMPLES = 3
"""Slabs that are looked at to judge an axis."""

LEAST_BYTES = 1 << 20
"""Slabs begin where chunks of the source begin, unless chunks of the target would be smaller."""


@dataclass(frozen=True, slots=True)
class SlabCut:
    """Slabs along an axis: borders at ``phase`` and every ``step`` from there."""

    axis: int
    step: int
    phase: int


def cut_tensor(costs: Costs, name: str, capacity: int) -> list[TargetPart]:
    """A target as parts of at most ``capacity`` bytes, as far as it can be cut."""
    done: list[TargetPart] = []
    left = [costs.whole(name)]
    cuts: dict[Shape, SlabCut | None] = {}
    while left:
        part = left.pop()
        if costs.nbytes(part) <= capacity:
            done.append(part)
            continue
        if part.box.sizes not in cuts:
            cuts[part.box.sizes] = best_cut(costs, part, capacity)
        best = cuts[part.box.sizes]
        if best is None:
            done.append(part)
        else:
            left += slabs(part, best)
    return sorted(done, key=lambda part: part.box.offsets)


def best_cut(costs: Costs, part: TargetPart, capacity: int) -> SlabCut | None:
    """The cut with the least read amplification; None if nothing can be cut.

    Of equals the slowest axis is taken, whose slabs are contiguous.
    """
    best: SlabCut | None = None
    least = 0.0
    for axis, size in enumerate(part.box.sizes):
        cut = _cut_along(costs, part, axis, capacity)
        if cut.step < size:
            cost = _amplification(costs, slabs(part, cut))
            if best is None or cost < least:
                best, least = cut, cost
    return best


def _amplification(costs: Costs, parts: list[TargetPart]) -> float:
    """Bytes fetched for each byte made, of some of the parts.

    What a slab fetches beyond its own the next one fetches again.
    """
    samples = dict.fromkeys(parts[i * (len(parts) - 1) // (SAMPLES - 1)] for i in range(SAMPLES))
    fetched = sum(costs.fetched([part]) for part in samples)
    return round(fetched / max(1, sum(map(costs.nbytes, samples))), 2)


def _cut_along(costs: Costs, part: TargetPart, axis: int, capacity: int) -> SlabCut:
    """Slabs along an axis, of whole chunks of source and sink if they fit the capacity."""
    layer_bytes = max(1, costs.nbytes(part) // part.box.sizes[axis])
    most = max(1, capacity // layer_bytes)
    sink = costs.target_chunk(part.name, axis)
    span, phase = _source_span(costs, part, axis)
    granule = lcm(sink, span)
    if granule > most:
        return SlabCut(axis, max(sink, most // sink * sink), 0)
    step = most // granule * granule
    phase %= granule
    if phase % sink or gcd(phase, step) * layer_bytes < LEAST_BYTES:
        phase = 0
    return SlabCut(axis, step, phase)


def _source_span(costs: Costs, part: TargetPart, axis: int) -> tuple[int, int]:
    """How far apart, along a target's axis, chunks of the source begin, and where one does.

    Of the largest copy that makes up the part.
    """
    copy = max(costs.copies(part), key=lambda copy: copy.elements, default=None)
    if copy is None or not copy.source:
        return 1, 0
    # Of the loop axes that move along the target's axis, the one that moves furthest.
    moving = [loop for loop, steps in enumerate(copy.target_strides) if steps[axis]]
    if not moving:
        return 1, 0
    loop = max(moving, key=lambda loop: abs(copy.target_strides[loop][axis]))
    step = abs(copy.target_strides[loop][axis])
    shape, chunk = costs.resolved.sources[copy.source].shape, costs.source_chunks(copy.source)
    widest = (step, 0)
    for dimension, along in enumerate(map(abs, copy.source_strides[loop])):
        size = chunk[dimension]
        if along and size < shape[dimension] and size % along == 0:
            span = size // along * step
            start = copy.source_offsets[dimension] // along * step
            if span > widest[0]:
                widest = span, (copy.target_offsets[axis] - start) % span
    return widest


def slabs(part: TargetPart, cut: SlabCut) -> list[TargetPart]:
    """A part cut along an axis, at the same places wherever the part begins."""
    axis, offsets, sizes = cut.axis, part.box.offsets, part.box.sizes
    low, end = offsets[axis], part.box.ends[axis]
    first = low + (cut.phase - low) % cut.step
    edges = sorted({low, end, *range(first, end, cut.step)})
    return [
        TargetPart(
            part.name,
            Box(
                (*offsets[:axis], a, *offsets[axis + 1 :]),
                (*sizes[:axis], b - a, *sizes[axis + 1 :]),
            ),
        )
        for a, b in pairwise(edges)
    ]
