"""Findings, the content of one rule each: a certain pair, or the pairs of all parts of a leaf.

1. Pairs of parts of the same leaf, or of the same stack of leaves, are one finding.
2. A leaf with parts that are not certain becomes a doubt as a whole.
3. The operations are those of the pair: its layout, a cast where the dtypes differ, a stack. A
   source's parts are split before, a target's concatenated after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xckpt.mapping.infer.conventions import OperationTable
from xckpt.mapping.infer.decide import Decided
from xckpt.mapping.infer.leaf_names import FusedPart
from xckpt.mapping.infer.pairs import Doubt, LeafGroup

STACKED = "layer"
"""The index of a stack's rule."""

Names = tuple[tuple[str, ...], ...]
"""For each place of a rule's side the leaves there: one, or those of a stack."""


@dataclass(frozen=True)
class Finding:
    """Leaves that certainly belong together."""

    pairs: tuple[Decided, ...]
    """One pair, or those of all parts of a leaf, in their order."""

    @property
    def sources(self) -> Names:
        """Mapping names of the source's leaves."""
        return _names(each.pair.source for each in self.pairs)

    @property
    def targets(self) -> Names:
        """Mapping names of the target's leaves."""
        return _names(each.pair.target for each in self.pairs)

    @property
    def is_stack(self) -> bool:
        """Whether one side's leaves are stacked in the other's."""
        pair = self.pairs[0].pair
        return pair.source.position is not None or pair.target.position is not None

    @property
    def operations(self) -> tuple[OperationTable, ...]:
        """The operations from source to target, as a mapping file spells them."""
        branches = [_operations(each) for each in self.pairs]
        inner: tuple[OperationTable, ...] = branches[0]
        if any(each != inner for each in branches):
            inner = ({"each": [list(each) for each in branches]},)
        if part := _part(self.pairs[0].pair.source):
            return ({"split": list(part.sizes)}, *inner)
        if part := _part(self.pairs[0].pair.target):
            return (*inner, {"concatenate": list(part.sizes)})
        return inner


def put_together(decided: Sequence[Decided]) -> tuple[list[Finding], list[Doubt]]:
    """The certain findings, and doubts about leaves with parts that are not certain."""
    grouped: dict[object, list[Decided]] = defaultdict(list)
    for place, each in enumerate(decided):
        grouped[_whole(each) or place].append(each)
    findings: list[Finding] = []
    doubts: list[Doubt] = []
    for pairs in grouped.values():
        part = _part_of(pairs[0])
        if part is None or len(pairs) == len(part.sizes):
            findings.append(Finding(tuple(sorted(pairs, key=_number))))
            continue
        only = (
            f"of the {len(part.sizes)} tensors that lie in one leaf only {len(pairs)} are certain"
        )
        doubts += [Doubt(p.pair.source.leaves, p.pair.target.leaves, only) for p in pairs]
    return findings, doubts


def _whole(decided: Decided) -> object:
    """The leaves that those of one side are parts of; None where they are whole."""
    sides = {"source": decided.pair.source, "target": decided.pair.target}
    return next(((side, _wholes(item)) for side, item in sides.items() if _part(item)), None)


def _part_of(decided: Decided) -> FusedPart | None:
    return _part(decided.pair.source) or _part(decided.pair.target)


def _number(decided: Decided) -> int:
    part = _part_of(decided)
    return part.number if part else 0


def _part(item: LeafGroup) -> FusedPart | None:
    return next((leaf.part for leaf in item.leaves if leaf.part), None)


def _wholes(item: LeafGroup) -> tuple[str, ...]:
    return tuple(leaf.whole for leaf in item.leaves)


def _names(items: Iterable[LeafGroup]) -> Names:
    """Each leaf, or stack of leaves, once."""
    return tuple(dict.fromkeys(map(_wholes, items)))


def _operations(decided: Decided) -> tuple[OperationTable, ...]:
    """The operations of one pair."""
    pair, operations = decided.pair, decided.layout.operations
    dtypes = [item.leaves[0].spec.dtype for item in (pair.source, pair.target)]
    if dtypes[0] != dtypes[1]:
        cast: OperationTable = {"cast": dtypes}
        operations = (*operations, cast)
    if pair.source.position is not None:
        return (*operations, {"stack": STACKED, "axis": pair.axis})
    if pair.target.position is not None:
        return ({"unstack": STACKED, "axis": pair.axis}, *operations)
    return operations
