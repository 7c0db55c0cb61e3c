"""Planning units of work: memory is bounded, and each chunk is read as rarely as possible.

1. Targets that share a source tensor are planned together. If they are small as a whole, they are
   packed with other small ones.
2. A tensor above the size of a unit is cut into parts (`xckpt.convert.units.slabs`). Parts are put
   in the order in which they lie in the sources, and packed.
3. Where that reads much that is not wanted, as with groups of query, key and value in one tensor,
   all tensors that share a source are cut into equally many slabs, one of each in a unit.

All of this depends on shapes, copies and chunks alone: every process finds the same units.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from xckpt.convert.units.slabs import SlabCut, best_cut, cut_tensor, slabs
from xckpt.convert.units.unit import Chunks, Costs, Resolved, TargetPart, WorkUnit

WASTEFUL = 1.2
"""Units that read this many times what they want are planned a second time."""

ALIKE = (2, 1, 0.5, 0.25)
"""Numbers of slabs tried then, in units of the usual size: down to four times as large."""


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
    return units + _packed(costs, small, unit_bytes)


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
        for source in {copy.source for copy in costs.copies(costs.whole(name))} - {""}:
            other = readers.setdefault(source, name)
            leader[find(name)] = find(other)
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(find(name), []).append(name)
    return list(groups.values())


def _cut_each(costs: Costs, names: Sequence[str], unit_bytes: int) -> list[WorkUnit]:
    """Units of some targets, each cut on its own."""
    order = {name: number for number, name in enumerate(costs.resolved.sources)}
    parts = [part for name in names for part in cut_tensor(costs, name, unit_bytes)]
    parts.sort(key=lambda part: _place(costs, part, order))
    return _packed(costs, parts, unit_bytes)


def _cut_alike(costs: Costs, wholes: Sequence[TargetPart], count: int) -> list[WorkUnit]:
    """Units of some targets, all cut into ``count`` slabs: one of each in a unit."""
    together: list[list[TargetPart]] = [[] for _ in range(count)]
    for whole in wholes:
        best = best_cut(costs, whole, max(1, costs.nbytes(whole) // count))
        cut = [whole]
        if best is not None:
            sink = costs.target_chunk(whole.name, best.axis)
            step = ceil(whole.box.sizes[best.axis] / count / sink) * sink
            cut = slabs(whole, SlabCut(best.axis, step, 0))
        for parts, slab in zip(together[: len(cut)], cut, strict=True):
            parts.append(slab)
    return [costs.unit(parts) for parts in together if parts]


def _place(costs: Costs, part: TargetPart, order: dict[str, int]) -> tuple[int, ...]:
    """Where in the sources a part begins: the tensor, and how far into it."""
    places = (
        (order[copy.source], *copy.source_box.offsets) for copy in costs.copies(part) if copy.source
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
