"""Planning units of work: memory is bounded, and each chunk is read as rarely as possible.

1. Targets that share a source tensor are planned together. If they are small as a whole, they are
   packed with other small ones.
2. A tensor above the size of a unit is cut into slabs along one axis, and slabs that are still too
   large along another. The axis with the least read amplification is cut: a transposed matrix is
   cut into columns, because its source's chunks are rows. Slabs begin where chunks of the source
   begin, as far as the size allows, and at multiples of what the sink asks for.
3. The parts are put in the order in which they lie in the sources, and packed.
4. If that reads much that is not wanted, as with groups of query, key and value in one tensor, all
   tensors that share a source are cut into equally many slabs, and a unit has one slab of each.

All of this depends on shapes, copies and chunks alone: every process finds the same units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, gcd, lcm

from xckpt.convert.units.unit import Chunks, Costs, TargetPart, WorkUnit
from xckpt.core.geometry.box import Box, Shape
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import MappingError
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.strided_copy import CONSTANT

WASTEFUL = 1.2
"""Units that read this many times what they want are planned a second time."""

ALIKE = (2, 1, 0.5, 0.25)
"""Numbers of slabs tried then, in units of the usual size: down to four times as large."""

MANY_UNITS = 1_000_000
"""More are not planned."""

SAMPLES = 3
"""Slabs that are looked at to judge an axis."""

LEAST_BYTES = 1 << 20
"""Slabs begin where chunks of the source begin, unless chunks of the target would be smaller."""


def plan_units(
    resolved: ResolvedMapping,
    source_chunks: Chunks,
    unit_bytes: int,
    target_chunks: Chunks | None = None,
) -> list[WorkUnit]:
    """All units of a conversion, each element of every target in one.

    Args:
        resolved: the mapping, resolved.
        source_chunks: what is read together, by source tensor.
        unit_bytes: bytes of target elements in a unit; more only where it cannot be cut so finely.
        target_chunks: what must be written together, by target tensor; None for any box.

    Raises:
        MappingError: these are more than a million units, as a pad of a wrong size makes them.

    Example:
        >>> from xckpt.convert.conversion import unchanged
        >>> from xckpt.mapping.spec import TensorSpec
        >>> rows = unchanged({"w": TensorSpec((4, 8), "int8")})
        >>> for unit in plan_units(rows, lambda name: (1, 8), unit_bytes=16):
        ...     print(unit.number, *(part.box for part in unit.parts))
        0 [0, 2) x [0, 8)
        1 [2, 4) x [0, 8)
    """
    _check_size(resolved, unit_bytes)
    costs = Costs(resolved, source_chunks, target_chunks)
    units: list[WorkUnit] = []
    small: list[TargetPart] = []
    for names in _components(costs):
        wholes = [costs.whole(name) for name in names]
        total = sum(map(costs.nbytes, wholes))
        if total <= unit_bytes:
            small += wholes
            continue
        best = _cut_each(costs, names, unit_bytes)
        if len(names) > 1 and costs.waste(best) > WASTEFUL:
            others = [_cut_alike(costs, wholes, n) for n in _counts(total, unit_bytes)]
            best = min((best, *others), key=costs.waste)
        units += best
    units += _packed(costs, small, unit_bytes)
    return [replace(unit, number=number) for number, unit in enumerate(units)]


def _check_size(resolved: ResolvedMapping, unit_bytes: int) -> None:
    sizes = {name: spec.nbytes for name, spec in resolved.targets.items()}
    if (total := sum(sizes.values())) <= MANY_UNITS * unit_bytes:
        return
    most = max(sizes, key=sizes.__getitem__)
    raise MappingError(
        f"the conversion makes {readable_bytes(total)}, {readable_bytes(sizes[most])} of it for "
        f"{most!r}: check the sizes in the rule that makes it; if they are right, raise "
        f"memory_bytes= of the options"
    )


def _counts(total: int, unit_bytes: int) -> list[int]:
    """Numbers of slabs to try for this many bytes, the largest first."""
    counts = {max(1, ceil(times * total / unit_bytes)) for times in ALIKE}
    powers = (1 << power for power in range(max(counts).bit_length()))
    return sorted(counts | {power for power in powers if power >= min(counts)}, reverse=True)


def _components(costs: Costs) -> list[list[str]]:
    """Targets with elements, those that share a source tensor together."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    readers: dict[str, str] = {}
    for name, spec in costs.resolved.targets.items():
        if 0 in spec.shape:
            continue
        leader[name] = name
        for source in {copy.source for copy in costs.copies(costs.whole(name))} - {CONSTANT}:
            other = readers.setdefault(source, name)
            leader[find(name)] = find(other)
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(find(name), []).append(name)
    return list(groups.values())


def _cut_each(costs: Costs, names: Sequence[str], unit_bytes: int) -> list[WorkUnit]:
    """Units of some targets, each cut on its own."""
    order = {name: number for number, name in enumerate(costs.resolved.sources)}
    parts = [part for name in names for part in _cut_tensor(costs, name, unit_bytes)]
    parts.sort(key=lambda part: _place(costs, part, order))
    return _packed(costs, parts, unit_bytes)


def _cut_alike(costs: Costs, wholes: Sequence[TargetPart], count: int) -> list[WorkUnit]:
    """Units of some targets that are all cut into ``count`` slabs; a unit has one slab of each."""
    together: list[list[TargetPart]] = [[] for _ in range(count)]
    for whole in wholes:
        best = _best_cut(costs, whole, max(1, costs.nbytes(whole) // count))
        slabs = [whole]
        if best is not None:
            sink = costs.target_chunk(whole.name, best.axis)
            step = ceil(whole.box.sizes[best.axis] / count / sink) * sink
            slabs = _slabs(whole, _SlabCut(best.axis, step, 0))
        for parts, slab in zip(together[: len(slabs)], slabs, strict=True):
            parts.append(slab)
    return [costs.unit(parts) for parts in together if parts]


def _place(costs: Costs, part: TargetPart, order: dict[str, int]) -> tuple[int, ...]:
    """Where in the sources a part begins: the tensor, and how far into it."""
    places = (
        (order[copy.source], *copy.source_box.offsets)
        for copy in costs.copies(part)
        if not copy.is_constant
    )
    return min(places, default=(len(order),))


def _packed(costs: Costs, parts: Sequence[TargetPart], unit_bytes: int) -> list[WorkUnit]:
    """Parts in their order, as many in a unit as fit; one that is too large goes alone."""
    units: list[list[TargetPart]] = []
    room = 0
    for part in parts:
        size = costs.nbytes(part)
        if not units or size > room:
            units.append([])
            room = unit_bytes
        units[-1].append(part)
        room -= size
    return [costs.unit(unit) for unit in units]


@dataclass(frozen=True, slots=True)
class _SlabCut:
    """Slabs along an axis: borders at ``phase`` and every ``step`` from there."""

    axis: int
    step: int
    phase: int


def _cut_tensor(costs: Costs, name: str, capacity: int) -> list[TargetPart]:
    """A target as parts of at most ``capacity`` bytes, as far as it can be cut."""
    done: list[TargetPart] = []
    left = [costs.whole(name)]
    cuts: dict[Shape, _SlabCut | None] = {}
    while left:
        part = left.pop()
        cut = None
        if costs.nbytes(part) > capacity:
            if part.box.sizes not in cuts:
                cuts[part.box.sizes] = _best_cut(costs, part, capacity)
            cut = cuts[part.box.sizes]
        if cut is None:
            done.append(part)
        else:
            left += _slabs(part, cut)
    return sorted(done, key=lambda part: part.box.offsets)


def _best_cut(costs: Costs, part: TargetPart, capacity: int) -> _SlabCut | None:
    """The cut with the least read amplification; None if nothing can be cut.

    Of equals the slowest axis is taken, whose slabs are contiguous.
    """
    cuts = (_cut_along(costs, part, axis, capacity) for axis in range(len(part.box.sizes)))
    return min(
        (cut for cut in cuts if cut.step < part.box.sizes[cut.axis]),
        key=lambda cut: _amplification(costs, _slabs(part, cut)),
        default=None,
    )


def _amplification(costs: Costs, parts: list[TargetPart]) -> float:
    """Bytes fetched for each byte made, of some of the parts.

    Bytes that a slab fetches beyond its own are fetched again by the next slab.
    """
    samples = dict.fromkeys(parts[i * (len(parts) - 1) // (SAMPLES - 1)] for i in range(SAMPLES))
    fetched = sum(costs.fetched(costs.reads([part])) for part in samples)
    return round(fetched / max(1, sum(map(costs.nbytes, samples))), 2)


def _cut_along(costs: Costs, part: TargetPart, axis: int, capacity: int) -> _SlabCut:
    """Slabs along an axis, of whole chunks of source and sink if they fit the capacity."""
    layer_bytes = max(1, costs.nbytes(part) // part.box.sizes[axis])
    most = max(1, capacity // layer_bytes)
    sink = costs.target_chunk(part.name, axis)
    span, phase = _source_span(costs, part, axis)
    granule = lcm(sink, span)
    if granule > most:
        return _SlabCut(axis, max(sink, most // sink * sink), 0)
    step = most // granule * granule
    phase %= granule
    if phase % sink or gcd(phase, step) * layer_bytes < LEAST_BYTES:
        phase = 0
    return _SlabCut(axis, step, phase)


def _source_span(costs: Costs, part: TargetPart, axis: int) -> tuple[int, int]:
    """How far apart, along a target's axis, chunks of the source begin, and where one does.

    For the largest copy that makes up the part.
    """
    copy = max(costs.copies(part), key=lambda copy: copy.elements, default=None)
    if copy is None or copy.is_constant:
        return 1, 0
    # The loop axis that moves furthest along the target's axis.
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


def _slabs(part: TargetPart, cut: _SlabCut) -> list[TargetPart]:
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
