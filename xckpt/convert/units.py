"""Units of work: what of the target is made together, so that memory is bounded and reading cheap.

A part is a box of one target tensor; a unit is some parts that are read, copied and written
together. What a unit reads of a source tensor is read once, so that chunks are read twice only
where they lie across the border of two units.

1. `cut_tensor`: a tensor above the size of a unit is cut into parts, slabs along one axis and then
   perhaps along another. Of the axes the one is taken along which parts read the least in vain: a
   transposed matrix is cut into columns, as its source's chunks are rows. Slabs begin where chunks
   of the source begin, as far as the size allows, and at multiples of what the sink asks for.
2. `plan_units`: parts are put in the order in which they lie in the sources, and packed.
3. Where that reads much in vain, as with groups of query, key and value in one tensor, all tensors
   that share a source are cut into equally many slabs, which come together.

All of this depends on shapes, copies and chunks alone: every process finds the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd, lcm, prod
from typing import Protocol

from xckpt.convert.reads import SourceRead, source_reads
from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box, Shape
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, restrict

__all__ = ["TargetPart", "WorkUnit", "plan_units"]

Chunks = Callable[[str], Shape]
"""Name -> the elements of each dimension that belong together."""

LOOKED_AT = 3
"""Slabs that are looked at to judge an axis."""

WASTEFUL = 1.2
"""Units that read this many times what they want are planned again."""

ALIKE = (2, 1, 0.5, 0.25)
"""How many slabs are tried then, in units of the usual size: down to four times as large."""

LEAST_BYTES = 1 << 20
"""Slabs begin where chunks of the source begin, unless chunks of the target would be smaller."""


class Resolved(Protocol):
    """What is asked of a resolved mapping."""

    @property
    def sources(self) -> Mapping[str, TensorSpec]:
        """The tensors that are read."""
        ...

    @property
    def targets(self) -> Mapping[str, TensorSpec]:
        """The tensors that are made."""
        ...

    def copies_into(self, name: str, box: Box) -> Sequence[StridedCopy]:
        """The copies that make up a box of a target."""
        ...


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A box of a target tensor."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Parts that are made together."""

    parts: tuple[TargetPart, ...]
    target_bytes: int
    source_bytes: int

    @property
    def nbytes(self) -> int:
        """Memory that it takes to make it."""
        return self.target_bytes + self.source_bytes


def plan_units(
    resolved: Resolved,
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
    """
    planner = _Planner(resolved, source_chunks, target_chunks)
    units: list[WorkUnit] = []
    small: list[TargetPart] = []
    for names in _components(resolved, planner):
        wholes = [TargetPart(name, _whole(resolved.targets[name])) for name in names]
        total = sum(map(planner.nbytes, wholes))
        if total <= unit_bytes:
            small += wholes
            continue
        found = planner.units_of(names, unit_bytes)
        if len(names) > 1 and planner.waste(found) > WASTEFUL:
            others = [planner.units_alike(names, n) for n in _counts(total, unit_bytes)]
            found = min((found, *others), key=planner.waste)
        units += found
    return units + planner.packed(small, unit_bytes)


def _counts(total: int, unit_bytes: int) -> list[int]:
    """Numbers of slabs to try for so many bytes, the largest first."""
    counts = {max(1, ceil(times * total / unit_bytes)) for times in ALIKE}
    powers = (1 << power for power in range(max(counts).bit_length()))
    return sorted(counts | {power for power in powers if power >= min(counts)}, reverse=True)


def _components(resolved: Resolved, planner: _Planner) -> list[list[str]]:
    """Targets with elements, those that share a source tensor together."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    readers: dict[str, str] = {}
    for name, spec in resolved.targets.items():
        if 0 in spec.shape:
            continue
        leader[name] = name
        for source in {copy.source for copy in planner.copies(name)} - {""}:
            other = readers.setdefault(source, name)
            leader[find(name)] = find(other)
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(find(name), []).append(name)
    return list(groups.values())


def _whole(spec: TensorSpec) -> Box:
    return Box((0,) * len(spec.shape), spec.shape)


class _Planner:
    """Cuts and packs; remembers the copies of each target."""

    def __init__(
        self, resolved: Resolved, source_chunks: Chunks, target_chunks: Chunks | None
    ) -> None:
        self.resolved = resolved
        self.source_chunks = source_chunks
        self.target_chunks = target_chunks
        self._copies: dict[str, tuple[StridedCopy, ...]] = {}
        self._places = {name: number for number, name in enumerate(resolved.sources)}

    def copies(self, name: str) -> tuple[StridedCopy, ...]:
        """The copies that make up a whole target."""
        if name not in self._copies:
            whole = _whole(self.resolved.targets[name])
            self._copies[name] = tuple(self.resolved.copies_into(name, whole))
        return self._copies[name]

    def copies_of(self, part: TargetPart) -> tuple[StridedCopy, ...]:
        """The copies that make up a part."""
        if part.box == _whole(self.resolved.targets[part.name]):
            return self.copies(part.name)
        return restrict(self.copies(part.name), part.box)

    def nbytes(self, part: TargetPart) -> int:
        """Bytes of a part's elements."""
        return prod(part.box.sizes) * item_size(self.resolved.targets[part.name].dtype)

    def units_of(self, names: Sequence[str], unit_bytes: int) -> list[WorkUnit]:
        """Units of some targets, each cut as suits it."""
        parts = [part for name in names for part in self.cut(name, unit_bytes)]
        return self.packed(sorted(parts, key=self._place), unit_bytes)

    def units_alike(self, names: Sequence[str], count: int) -> list[WorkUnit]:
        """Units of some targets, all cut into ``count`` slabs: one of each in a unit."""
        together: list[list[TargetPart]] = [[] for _ in range(count)]
        for name in names:
            whole = TargetPart(name, _whole(self.resolved.targets[name]))
            best = self._best_cut(whole, max(1, self.nbytes(whole) // count))
            slabs = [whole]
            if best is not None:
                sink = self.target_chunks(name)[best.axis] if self.target_chunks else 1
                step = ceil(whole.box.sizes[best.axis] / count / sink) * sink
                slabs = _slabs(whole, _SlabCut(best.axis, step, 0))
            for parts, slab in zip(together[: len(slabs)], slabs, strict=True):
                parts.append(slab)
        return [self._unit(tuple(parts)) for parts in together if parts]

    def _place(self, part: TargetPart) -> tuple[float, ...]:
        """Where in the sources a part begins: the tensor, and how far into it."""
        first = min(
            (
                (self._places[copy.source], copy.source_box)
                for copy in self.copies_of(part)
                if copy.source
            ),
            key=lambda found: (found[0], found[1].offsets),
            default=(len(self._places), Box((), ())),
        )
        return (first[0], *first[1].offsets)

    def packed(self, parts: Sequence[TargetPart], unit_bytes: int) -> list[WorkUnit]:
        """Parts in their order, as many in a unit as fit; one that is too large goes alone."""
        units: list[list[TargetPart]] = []
        room = 0
        for part in parts:
            size = self.nbytes(part)
            if not units or size > room:
                units.append([])
                room = unit_bytes
            units[-1].append(part)
            room -= size
        return [self._unit(tuple(each)) for each in units]

    def _unit(self, parts: tuple[TargetPart, ...]) -> WorkUnit:
        return WorkUnit(
            parts,
            sum(self.nbytes(part) for part in parts),
            sum(self._bytes(reading) for reading in self.source_reads(parts)),
        )

    def source_reads(self, parts: Sequence[TargetPart]) -> list[SourceRead]:
        """What parts read."""
        return source_reads(
            (number, copy) for number, part in enumerate(parts) for copy in self.copies_of(part)
        )

    def _bytes(self, reading: SourceRead) -> int:
        spec = self.resolved.sources[reading.name]
        return prod(reading.box.sizes) * item_size(spec.dtype)

    def fetched(self, reading: SourceRead) -> int:
        """Bytes of the chunks that a reading touches."""
        spec = self.resolved.sources[reading.name]
        elements = 1
        box = zip(
            reading.box.offsets,
            reading.box.sizes,
            self.source_chunks(reading.name),
            spec.shape,
            strict=True,
        )
        for offset, size, chunk, extent in box:
            low = offset // chunk * chunk
            elements *= min(extent, ceil((offset + size) / chunk) * chunk) - low
        return elements * item_size(spec.dtype)

    def waste(self, units: Sequence[WorkUnit]) -> float:
        """Bytes fetched for each byte that is wanted."""
        fetched = wanted = 0
        for unit in units:
            for reading in self.source_reads(unit.parts):
                fetched += self.fetched(reading)
                item = item_size(self.resolved.sources[reading.name].dtype)
                wanted += sum(copy.elements for _, copy in reading.copies) * item
        return fetched / max(1, wanted)

    def cut(self, name: str, capacity: int) -> list[TargetPart]:
        """A target as parts of at most ``capacity`` bytes, as far as it can be cut."""
        done: list[TargetPart] = []
        left = [TargetPart(name, _whole(self.resolved.targets[name]))]
        steps: dict[Shape, _SlabCut | None] = {}
        while left:
            part = left.pop()
            if self.nbytes(part) <= capacity:
                done.append(part)
                continue
            if part.box.sizes not in steps:
                steps[part.box.sizes] = self._best_cut(part, capacity)
            best = steps[part.box.sizes]
            if best is None:
                done.append(part)
            else:
                left += _slabs(part, best)
        return sorted(done, key=lambda part: part.box.offsets)

    def _best_cut(self, part: TargetPart, capacity: int) -> _SlabCut | None:
        """The slabs that read the least in vain; None if nothing can be cut.

        Of equals the slowest axis is taken, whose slabs are contiguous.
        """
        best: _SlabCut | None = None
        least = 0.0
        for axis, size in enumerate(part.box.sizes):
            cut = self._cut_along(part, axis, capacity)
            if cut.step >= size:
                continue
            slabs = _slabs(part, cut)
            shown = [slabs[i * (len(slabs) - 1) // (LOOKED_AT - 1)] for i in range(LOOKED_AT)]
            fetched = wanted = 0
            for slab in dict.fromkeys(shown):
                fetched += sum(self.fetched(each) for each in self.source_reads([slab]))
                wanted += self.nbytes(slab)
            # What a slab fetches in vain the next one fetches again.
            cost = round(fetched / max(1, wanted), 2)
            if best is None or cost < least:
                best, least = cut, cost
        return best

    def _cut_along(self, part: TargetPart, axis: int, capacity: int) -> _SlabCut:
        """Slabs along an axis, of whole chunks of source and sink if they fit the capacity."""
        size = part.box.sizes[axis]
        layer = max(1, self.nbytes(part) // size)
        most = max(1, capacity // layer)
        sink = self.target_chunks(part.name)[axis] if self.target_chunks else 1
        span, phase = self._spans(part, axis)
        granule = lcm(sink, span)
        if granule > most:
            return _SlabCut(axis, max(sink, most // sink * sink), 0)
        step = most // granule * granule
        phase %= granule
        if phase % sink or gcd(phase, step) * layer < LEAST_BYTES:
            phase = 0
        return _SlabCut(axis, step, phase)

    def _spans(self, part: TargetPart, axis: int) -> tuple[int, int]:
        """How far apart, along a target's axis, chunks of the source begin, and where one does.

        Of the largest copy that makes up the part.
        """
        copy = max(self.copies_of(part), key=lambda copy: copy.elements, default=None)
        if copy is None or not copy.source:
            return 1, 0
        # Of the loop axes that move along the target's axis, the one that moves furthest.
        moving = [loop for loop, steps in enumerate(copy.target_strides) if steps[axis]]
        if not moving:
            return 1, 0
        loop = max(moving, key=lambda loop: abs(copy.target_strides[loop][axis]))
        step = abs(copy.target_strides[loop][axis])
        shape = self.resolved.sources[copy.source].shape
        found = (step, 0)
        chunk = self.source_chunks(copy.source)
        for dimension, along in enumerate(map(abs, copy.source_strides[loop])):
            size = chunk[dimension]
            if along and size < shape[dimension] and size % along == 0:
                span = size // along * step
                start = copy.source_offsets[dimension] // along * step
                if span > found[0]:
                    found = span, (copy.target_offsets[axis] - start) % span
        return found


@dataclass(frozen=True, slots=True)
class _SlabCut:
    """Slabs along an axis: borders at ``phase`` and every ``step`` from there."""

    axis: int
    step: int
    phase: int


def _slabs(part: TargetPart, cut: _SlabCut) -> list[TargetPart]:
    """A part cut along an axis, at the same places wherever the part begins."""
    axis = cut.axis
    low, size = part.box.offsets[axis], part.box.sizes[axis]
    first = low + (cut.phase - low) % cut.step
    edges = sorted({low, low + size, *range(first, low + size, cut.step)})
    slabs: list[TargetPart] = []
    for a, b in pairwise(edges):
        offsets = (*part.box.offsets[:axis], a, *part.box.offsets[axis + 1 :])
        sizes = (*part.box.sizes[:axis], b - a, *part.box.sizes[axis + 1 :])
        slabs.append(TargetPart(part.name, Box(offsets, sizes)))
    return slabs
