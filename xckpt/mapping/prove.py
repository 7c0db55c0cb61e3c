"""The proof that a mapping fits: on shapes alone, before a byte is read.

1. Every target leaf that is wanted is made, with its shape and dtype, and none that is not wanted.
2. The copies into each target leaf cover it exactly.
3. Every source leaf is covered exactly by the copies out of it, by what is asserted and left out,
   and by what is dropped. Names that are tied count once.

The covers are proven from the copies alone, so a fault in an operation would be found too. A copy's
axes move along one dimension each, so it writes a product of index sets, one for each dimension.
Two kinds of axes are split up, value by value: one that moves along several dimensions, and one
that moves nowhere, which writes every element again. Then `copies_fault` continues:

1. In each dimension, the indices that the same sets hold are one class, so a set is a few runs of
   classes. Where all sets are intervals the classes are what lies between their ends.
2. With classes for indices a product is a few boxes, and `cover_fault` proves that they cover the
   tensor. Its witness is a box of classes; the first indices of those are the answer.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, pairwise, product
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.cover import CoverFault, cover_fault
from xckpt.errors import SHOWN_PROBLEMS
from xckpt.mapping.names import of_one_leaf
from xckpt.mapping.pattern import Pattern, literal, skeleton
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import Ints, StridedCopy

IndexSet = tuple[int, tuple[tuple[int, int], ...]]
"""First index, and the (step, size) of the axes that move from it, ascending."""
Run = tuple[int, int]
"""First index and length."""

COMPARED = 200
"""Patterns that a leaf's name is compared with, to find a misspelt one."""
PARTS_DONE = (0.0, 0.05, 0.1, 0.4, 1.0)
"""Which part of the time of a proof has usually passed after each of its parts."""


def problems_with(
    resolved: ResolvedMapping,
    target: Mapping[str, TensorSpec],
    failed: Sequence[Rule] = (),
    *,
    all_used: bool = True,
    progress: Callable[[float], None] | None = None,
) -> list[str]:
    """Everything that keeps a resolved mapping from making exactly these leaves from all of its
    source.

    Args:
        resolved: the mapping on the source.
        target: the leaves that are wanted.
        failed: rules that failed; their leaves are not blamed a second time.
        all_used: whether a source leaf that no rule takes is a fault.
        progress: called with the part of the proof that is done.

    Example:
        >>> from xckpt.mapping.mapping import LeafMapping
        >>> spec = TensorSpec((2,), "int8")
        >>> resolved = LeafMapping([Rule("w", "v")]).resolve({"w": spec, "b": spec})
        >>> problems_with(resolved, {"v": spec})
        ["source 'b': no rule uses [0, 2)"]
    """
    failed = list(dict.fromkeys(failed))
    faults = (
        () if failed else _other_names(resolved),
        _misfits(resolved, target, failed),
        _unmade(resolved, target, failed),
        _target_faults(resolved),
        _source_faults(resolved, failed, all_used),
    )
    problems: list[str] = []
    for some, done in zip(faults, PARTS_DONE, strict=True):
        problems += some
        if progress is not None:
            progress(done)
    return problems


def _whole(spec: TensorSpec) -> str:
    return str(Box.whole(spec.shape))


def _other_names(resolved: ResolvedMapping) -> Iterator[str]:
    """A hint where no rule takes any leaf: the inverse is meant, or names have a prefix that the
    rules lack. Only the first rules and names are compared.
    """
    if resolved.targets or resolved.dropped:
        return
    names = [*islice(resolved.sources, COMPARED)]
    for rule in islice(resolved.idle, COMPARED):
        made = next((name for name in names if _matches(rule.target_patterns, name)), None)
        if made is not None:
            yield (
                f"no rule takes a leaf of the source, and rule {rule} makes its {made!r}: is the "
                f"inverse meant (inverse() or --inverse)?"
            )
            return
    patterns = [pattern for rule in resolved.idle for pattern in rule.source_patterns]
    for name in names[:SHOWN_PROBLEMS]:
        for end in (at + 1 for at, letter in enumerate(name) if letter in "/."):
            if _matches(patterns, name[end:]):
                prefix = literal(name[:end])
                yield (
                    f"no rule takes a leaf of the source, but one would take {name!r} without "
                    f"{name[:end]!r}: Mapping([Rule({prefix + '{n...}'!r}, '{{n...}}')]).then(...)"
                )
                return


def _misfits(
    resolved: ResolvedMapping, target: Mapping[str, TensorSpec], failed: Sequence[Rule]
) -> Iterator[str]:
    for name, spec in resolved.targets.items():
        maker = resolved.makers[name]
        if maker in failed:
            continue
        if name in target:
            if spec != target[name]:
                yield f"target {name!r} is {target[name]}, but rule {maker} makes {spec}"
            continue
        sources = (copy.source for copy in resolved.copies[name])
        again = next((source for source in sources if source in target), None)
        if again is not None:
            yield (
                f"rule {maker} fires twice: it makes {name!r} of {again!r}, which has the name of "
                "a target already"
            )
        else:
            yield f"target {name!r} is not wanted, but rule {maker} makes {_whole(spec)} of it"


def _unmade(
    resolved: ResolvedMapping, target: Mapping[str, TensorSpec], failed: Sequence[Rule]
) -> Iterator[str]:
    blamed = [pattern for rule in failed for pattern in rule.target_patterns]
    missing = [n for n in target if n not in resolved.targets and not _matches(blamed, n)]
    for number, name in enumerate(missing):
        idle = resolved.idle if number < SHOWN_PROBLEMS else ()
        would = next((rule for rule in idle if _matches(rule.target_patterns, name)), None)
        why = "no rule makes it" if would is None else f"rule {would} would, but takes no leaf"
        yield f"target {name!r} has a gap: {_whole(target[name])}; {why}"


def _target_faults(resolved: ResolvedMapping) -> Iterator[str]:
    for first, second in of_one_leaf(resolved.targets):
        rules = f"rule {resolved.makers[first]} and rule {resolved.makers[second]}"
        yield f"targets {first!r} and {second!r} are one leaf, which {rules} make"
    for name, copies in resolved.copies.items():
        fault = copies_fault(resolved.targets[name].shape, copies)
        if fault is not None:
            holders = " and ".join(repr(copies[i].source) for i in fault.holders)
            words = {"gap": "has a gap", "overlap": "overlaps", "outside": "reaches outside"}
            by = f", from {holders}" if holders else ""
            maker = resolved.makers[name]
            yield f"target {name!r} {words[fault.kind]}: {fault.box}{by} (rule {maker})"


Use = tuple[StridedCopy, str]
"""A copy out of a source leaf, and the rule that uses it."""


def _uses(resolved: ResolvedMapping) -> dict[str, list[Use]]:
    """Source leaf -> what uses it, each element once where all is well."""
    uses: dict[str, list[Use]] = defaultdict(list)
    aliases: dict[str, list[Use]] = defaultdict(list)
    users = [
        *((f"target {name!r}", copies) for name, copies in resolved.copies.items()),
        *((each.reason, each.tensor.copies) for each in resolved.assertions),
        *(("a drop", tensor.copies) for tensor in resolved.dropped),
    ]
    for user, copies in users:
        for copy in copies:
            (aliases if copy.alias else uses)[copy.source].append((copy, user))
    for name, others in aliases.items():
        # The first of tied names may be unwanted: then the next one counts.
        if name not in uses:
            uses[name] = [use for use in others if use[1] == others[0][1]]
    return uses


def _nearly(name: str, idle: Sequence[Rule]) -> str:
    """The rule that a leaf's name nearly fits, if there is one among the idle."""
    texts = ((re.sub(r"\{[^}]*\}", "0", text), rule) for rule in idle for text in rule.source)
    plain = {skeleton(text)[0]: rule for text, rule in islice(texts, COMPARED)}
    near = difflib.get_close_matches(skeleton(name)[0], plain, 1, 0.85)
    return f"; rule {plain[near[0]]} takes no leaf: is its name misspelt?" if near else ""


def _source_faults(
    resolved: ResolvedMapping, failed: Sequence[Rule], all_used: bool
) -> Iterator[str]:
    unused, uses, shown = set(resolved.unused), _uses(resolved), 0
    for name, spec in resolved.sources.items():
        if name in unused:
            if not all_used:
                continue
            idle = resolved.idle if shown < SHOWN_PROBLEMS else ()
            yield f"source {name!r}: no rule uses {_whole(spec)}{_nearly(name, idle)}"
            shown += 1
            continue
        users = uses.get(name, [])
        fault = copies_fault(spec.shape, [copy.turned() for copy, _ in users])
        if fault is None or any(_matches(rule.source_patterns, name) for rule in failed):
            continue
        if fault.kind == "gap":
            yield f"source {name!r}: nothing uses {fault.box}"
        else:
            both = " and ".join(users[i][1] for i in fault.holders)
            words = "is used twice" if fault.kind == "overlap" else "lies outside, used"
            yield f"source {name!r}: {fault.box} {words}, by {both}"


def _matches(patterns: Sequence[Pattern], name: str) -> bool:
    """Whether a name fits one of some patterns, whatever the ranges of their indices."""
    return any(pattern.fits(name) for pattern in patterns)


def copies_fault(shape: Ints, copies: Sequence[StridedCopy]) -> CoverFault | None:
    """A witness that the copies do not write every element exactly once; None if they do.

    Holders are ordinals of copies; the same one twice, if it writes an element twice.

    Example:
        >>> def every(step, start, count):
        ...     return StridedCopy("%", "t", (count,), (), ((),), (start,), ((step,),))
        >>> even, odd = every(2, 0, 3), every(2, 1, 3)
        >>> copies_fault((6,), [even, odd]) is None
        True
        >>> copies_fault((6,), [even])
        CoverFault(kind='gap', box=Box(offsets=(1,), sizes=(1,)), holders=())
        >>> copies_fault((6,), [even, odd, every(1, 3, 2)])
        CoverFault(kind='overlap', box=Box(offsets=(3,), sizes=(1,)), holders=(1, 2))
    """
    whole = Box.whole(shape)
    if 0 in shape or (len(copies) == 1 and _is_whole(whole, copies[0])):
        return None
    if not copies:
        return CoverFault("gap", whole, ())
    for number, copy in enumerate(copies):
        if not whole.holds(copy.target_box):
            return CoverFault("outside", copy.target_box, (number,))
    products = [(n, sets) for n, copy in enumerate(copies) for sets in _products(copy)]
    dimensions = [_classes(size, [sets[d] for _, sets in products]) for d, size in enumerate(shape)]
    pieces = [
        (number, runs)
        for number, sets in products
        for runs in product(*(of[each] for (_, of), each in zip(dimensions, sets, strict=True)))
    ]
    boxes = Boxes.of([_sides(runs) for _, runs in pieces])
    fault = cover_fault([len(classes) for classes, _ in dimensions], boxes)
    if fault is None:
        return None
    firsts = [classes[i] for (classes, _), i in zip(dimensions, fault.box.offsets, strict=True)]
    return CoverFault(fault.kind, Box(*_sides(firsts)), tuple(pieces[i][0] for i in fault.holders))


def _sides(runs: Sequence[Run]) -> tuple[Ints, Ints]:
    """Offsets and sizes of the box that has a run in each dimension."""
    return tuple(low for low, _ in runs), tuple(size for _, size in runs)


def _is_whole(whole: Box, copy: StridedCopy) -> bool:
    """Whether each axis of a copy steps through a dimension of its own; the usual case."""
    steps_by_one = all(sum(row) == 1 and min(row) >= 0 for row in copy.target_strides)
    return steps_by_one and copy.elements == whole.elements and copy.target_box == whole


def _products(copy: StridedCopy) -> Iterator[tuple[IndexSet, ...]]:
    """The elements that a copy writes, as products of a set for each dimension."""
    axes: list[list[tuple[int, int]]] = [[] for _ in copy.target_offsets]
    for axis, (size, row) in enumerate(zip(copy.sizes, copy.target_strides, strict=True)):
        moving = [d for d, step in enumerate(row) if step]
        if size > 1 and len(moving) != 1:
            for value in range(size if moving else 2):
                yield from _products(copy.cut(axis, value, value + 1))
            return
        if size > 1:
            axes[moving[0]].append((row[moving[0]], size))
    yield tuple(
        (offset, tuple(sorted(each)))
        for offset, each in zip(copy.target_offsets, axes, strict=True)
    )


def _classes(size: int, sets: Sequence[IndexSet]) -> tuple[list[Run], dict[IndexSet, list[Run]]]:
    """The classes of a dimension's indices.

    Returns:
        The first indices of each class, and for each set its runs of classes. A run of indices that
        the set has twice is there twice.
    """
    lengths = {each: _interval(each) for each in sets}
    if None not in lengths.values():
        ends = {each: (each[0], each[0] + (length or 0)) for each, length in lengths.items()}
        cuts = sorted({0, size, *chain.from_iterable(ends.values())})
        place = {cut: number for number, cut in enumerate(cuts)}
        runs = {each: [(place[a], place[b] - place[a])] for each, (a, b) in ends.items()}
        return [(a, b - a) for a, b in pairwise(cuts)], runs
    counts = np.stack([_counts(size, each) for each in lengths])
    _, firsts = np.unique(counts, axis=1, return_index=True)
    firsts.sort()
    cuts = np.flatnonzero((counts[:, 1:] != counts[:, :-1]).any(axis=0)) + 1
    ends = np.append(cuts, size)[np.searchsorted(cuts, firsts, side="right")]
    runs = map(_runs, counts[:, firsts].tolist())
    classes = zip(firsts.tolist(), (ends - firsts).tolist(), strict=True)
    return list(classes), dict(zip(lengths, runs, strict=True))


def _interval(indices: IndexSet) -> int | None:
    """The length of a set that has every index between its ends once; None of any other."""
    length = 1
    for step, size in indices[1]:
        if step != length:
            return None
        length *= size
    return length


def _counts(size: int, indices: IndexSet) -> NDArray[np.int32]:
    """How often a set has each index of a dimension."""
    offset, axes = indices
    index = np.array([offset])
    for step, length in axes:
        index = np.add.outer(index, step * np.arange(length)).ravel()
    return np.bincount(index, minlength=size).astype(np.int32)


def _runs(counts: list[int]) -> list[Run]:
    """The runs of classes that a set has, from how often it has each class."""
    runs: list[Run] = []
    for count, group in groupby(enumerate(counts), key=itemgetter(1)):
        classes = [number for number, _ in group]
        runs += [(classes[0], len(classes))] * count
    return runs
