"""The proof that a mapping fits: on shapes alone, before a byte is read.

1. Every target leaf that is wanted is made, with its shape and dtype, and none that is not wanted.
2. The copies into each target leaf cover it exactly.
3. Every source leaf is covered exactly by the copies out of it, by what is asserted and left out,
   and by what is dropped. Names that are tied count once.

The covers are proven from the copies alone, so a fault in an operation would be found too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xckpt.core.geometry.box import Box
from xckpt.errors import SHOWN_PROBLEMS
from xckpt.mapping.pattern import Pattern
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy
from xckpt.mapping.strided_cover import copies_fault


def problems_with(
    resolved: ResolvedMapping, target: Mapping[str, TensorSpec], failed: Sequence[Rule] = ()
) -> list[str]:
    """All that keeps a resolved mapping from making just these leaves of all of its source.

    Leaves of rules that failed are not blamed a second time.
    """
    failed = list(dict.fromkeys(failed))
    return [
        *_misfits(resolved, target, failed),
        *_unmade(resolved, target, failed),
        *_target_faults(resolved),
        *_source_faults(resolved, failed),
    ]


def _whole(spec: TensorSpec) -> str:
    return str(Box.whole(spec.shape))


def _misfits(
    resolved: ResolvedMapping, target: Mapping[str, TensorSpec], failed: Sequence[Rule]
) -> Iterator[str]:
    for name, made in resolved.targets.items():
        maker = resolved.makers[name]
        if maker in failed:
            continue
        if name in target:
            if made != target[name]:
                yield f"target {name!r} is {target[name]}, but rule {maker} makes {made}"
            continue
        sources = (copy.source for copy in resolved.copies[name])
        again = next((source for source in sources if source in target), None)
        if again is not None:
            yield (
                f"rule {maker} fires twice: it makes {name!r} of {again!r}, which has the name of "
                "a target already"
            )
        else:
            yield f"target {name!r} is not wanted, but rule {maker} makes {_whole(made)} of it"


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
    for name, copies in resolved.copies.items():
        fault = copies_fault(resolved.targets[name].shape, copies)
        if fault is not None:
            holders = " and ".join(repr(copies[i].source) for i in fault.holders)
            words = {"gap": "has a gap", "overlap": "overlaps", "outside": "reaches outside"}
            by = f", from {holders}" if holders else ""
            maker = resolved.makers[name]
            yield f"target {name!r} {words[fault.kind]}: {fault.box}{by} (rule {maker})"


Use = tuple[StridedCopy, str]
"""A copy out of a source leaf, and who uses it."""


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
        # The first of tied names may be one that is not wanted: then the next one counts.
        if name not in uses:
            uses[name] = [use for use in others if use[1] == others[0][1]]
    return uses


def _source_faults(resolved: ResolvedMapping, failed: Sequence[Rule]) -> Iterator[str]:
    unused, uses = set(resolved.unused), _uses(resolved)
    for name, spec in resolved.sources.items():
        if name in unused:
            yield f"source {name!r}: no rule uses {_whole(spec)}"
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
    return any(pattern.expression.fullmatch(name) for pattern in patterns)
