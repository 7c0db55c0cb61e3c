"""Running a mapping's rules on shapes: the target leaves that they make, and from which sources.

1. `match_rules` divides the source leaves among the rules.
2. Each instance of a rule runs its operations on traced tensors.
3. Problems are collected with the rules that caused them, so that the proof does not report the
   leaves of a failed rule a second time.
4. `ResolvedMapping` is the result: target leaves as strided copies out of source leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.box_lookup import intersect
from xckpt.core.text.printable import in_few
from xckpt.errors import MappingError
from xckpt.mapping.match import RuleInstance, match_rules
from xckpt.mapping.operations import Constant
from xckpt.mapping.operations.base import run
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, restrict
from xckpt.mapping.trace import Assertion, Lossy, Trace
from xckpt.mapping.traced import Bundle, Slot, Traced

SHOWN_LEAVES = 4
"""Leaves of one instance that a message names."""

MATCHED = 0.6
"""The part of a step's time that usually goes into dividing the leaves among the rules."""

REPORTED = 1000
"""Instances between two reports of progress."""

MANY_COPIES = 8
"""From this many copies on, their boxes are compared at once, as columns."""


@dataclass(frozen=True, slots=True)
class ResolvedMapping:
    """A mapping on known shapes: every target leaf as copies out of source leaves.

    Reading, writing and the proof work from it.

    Example:
        >>> from xckpt.mapping.mapping import LeafMapping
        >>> from xckpt.mapping.operations import Transpose
        >>> mapping = LeafMapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))])])
        >>> resolved = mapping.resolve({"fc.weight": TensorSpec((8, 4), "float32")})
        >>> {name: str(spec) for name, spec in resolved.targets.items()}
        {'fc/kernel': 'float32[4, 8]'}
        >>> [row] = resolved.copies_into("fc/kernel", Box((0, 0), (1, 8)))
        >>> row.source, row.source_box
        ('fc.weight', Box(offsets=(0, 0), sizes=(8, 1)))
    """

    sources: Mapping[str, TensorSpec]
    """All leaves of the source."""
    targets: Mapping[str, TensorSpec]
    """All leaves that the mapping makes, in the order of the rules."""
    copies: Mapping[str, tuple[StridedCopy, ...]]
    """Target leaf -> copies that cover it."""
    assertions: tuple[Assertion, ...] = ()
    """Assertions on the data, to be checked before anything is written."""
    dropped: tuple[Traced, ...] = ()
    """Tensors made from the source that are dropped unchecked."""
    lossy: tuple[Lossy, ...] = ()
    """The lossy steps, with their bounds."""
    unused: tuple[str, ...] = ()
    """Source leaves that no rule takes."""
    idle: tuple[Rule, ...] = ()
    """Rules that take no leaf of this source."""
    makers: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    """Target leaf -> the rule that makes it."""
    _boxes: dict[str, Boxes] = field(default_factory=dict[str, Boxes], compare=False, repr=False)

    def __repr__(self) -> str:
        """In a line: a model has many leaves."""
        return f"<ResolvedMapping: {len(self.targets):,} leaves of {len(self.sources):,}>"

    def copies_into(self, name: str, box: Box) -> tuple[StridedCopy, ...]:
        """The copies restricted to a box of a target leaf.

        Offsets stay relative to the whole leaf. Only copies whose bounding box meets the box are
        restricted.

        Raises:
            KeyError: the mapping makes no such leaf.
        """
        copies = self.copies[name]
        if 0 in box.sizes:
            return ()
        if len(copies) < MANY_COPIES:
            return restrict(copies, box)
        if name not in self._boxes:
            pairs = [(copy.target_box.offsets, copy.target_box.sizes) for copy in copies]
            self._boxes[name] = Boxes.of(pairs)
        meeting, _, _ = intersect(self._boxes[name], Boxes.of([(box.offsets, box.sizes)]))
        return restrict([copies[i] for i in map(int, meeting)], box)


@dataclass(slots=True)
class Resolution:
    """The leaves that rules made, step by step, and the problems."""

    source: Mapping[str, TensorSpec]
    """Every leaf of the source."""
    made: dict[str, Traced]
    """Leaf of the last step -> what it is made of; before the first step, the source's leaves."""
    makers: dict[str, Rule] = field(default_factory=dict[str, Rule])
    """Leaf of the last step -> the rule that makes it."""
    trace: Trace = field(default_factory=Trace)
    unused: list[str] = field(default_factory=list[str])
    """Source leaves that no rule takes."""
    steps: int = 0
    """How many steps the rules have taken."""
    idle: list[Rule] = field(default_factory=list[Rule])
    """Rules that take no leaf."""
    problems: list[str] = field(default_factory=list[str])
    failed: list[Rule] = field(default_factory=list[Rule])
    """The rules that the problems are about."""

    @property
    def resolved(self) -> ResolvedMapping:
        """The result, as reading and writing take it."""
        return ResolvedMapping(
            sources=dict(self.source),
            targets={name: tensor.spec for name, tensor in self.made.items()},
            copies={
                name: tuple(replace(copy, target=name).simplified() for copy in tensor.copies)
                for name, tensor in self.made.items()
            },
            assertions=tuple(self.trace.assertions),
            dropped=tuple(self.trace.dropped),
            lossy=tuple(self.trace.lossy),
            unused=tuple(self.unused),
            idle=tuple(self.idle),
            makers=self.makers,
        )

    def take(
        self,
        rules: Sequence[Rule],
        wanted: Mapping[str, TensorSpec] | None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Run the rules of one step on the leaves of the step before.

        Args:
            rules: in any order.
            wanted: the target's leaves, if they are known and this is the last step.
            progress: called now and then with the part of the step that is done.
        """
        leaves, self.made, self.makers = self.made, {}, {}
        matches = match_rules(rules, leaves)
        self.idle += matches.idle
        self.problems += matches.problems
        self.failed += matches.failed
        for number, instance in enumerate(matches.instances, 1):
            if progress is not None and number % REPORTED == 1:
                progress(MATCHED + (1 - MATCHED) * number / len(matches.instances))
            try:
                targets = _targets(instance, leaves, self.trace, wanted)
            except MappingError as error:
                where = _where(instance, leaves)
                self.problems.append(f"rule {instance.rule}{where}: {error}")
                self.failed.append(instance.rule)
                continue
            for name, tensor in targets:
                self._add(name, tensor, instance.rule)
        self.problems += self.trace.uneven_rotations()
        self.trace.rotated.clear()
        if self.steps == 0:
            self.unused = matches.unused
        else:
            self.problems += [f"step between: {n!r} is used by no rule" for n in matches.unused]
        self.steps += 1

    def _add(self, name: str, tensor: Traced, rule: Rule) -> None:
        """Add a leaf; if another rule has made it already, both rules are at fault."""
        if name in self.made:
            other = self.makers[name]
            both = f"rule {rule} twice" if rule == other else f"rule {other} and rule {rule}"
            whole = Box.whole(tensor.shape)
            self.problems.append(f"target {name!r} overlaps: {whole} is made by {both}")
            self.failed += [rule, other]
        self.made[name], self.makers[name] = tensor, rule


def _where(instance: RuleInstance, leaves: Mapping[str, Traced]) -> str:
    """The indices of an instance and the leaves that it takes, each with its box."""
    values = ", ".join(f"{name} = {value}" for name, value in instance.values.items())
    names = [name for by_key in instance.sources for name in by_key.values()]
    shown = [f"{name!r} {Box.whole(leaves[name].shape)}" for name in names]
    taken = f" on {in_few(shown, SHOWN_LEAVES)}" if names else ""
    return f" at {values}{taken}" if values else taken


def _targets(
    instance: RuleInstance,
    leaves: Mapping[str, Traced],
    trace: Trace,
    wanted: Mapping[str, TensorSpec] | None,
) -> list[tuple[str, Traced]]:
    """The target leaves that one instance of a rule makes."""
    rule = instance.rule
    trace.rule, trace.ranges, trace.wanted = str(rule), rule.indices, None
    patterns = rule.target_patterns
    if not rule.source:
        name = patterns[0].name(instance.values)
        if not _is_made(rule, name, wanted):
            return []
        if len(rule.operations) == 1 and wanted is not None:
            trace.wanted = wanted.get(name)
    bundle: Bundle = tuple(
        Slot(instance.stacked, {key: leaves[name] for key, name in by_key.items()})
        for by_key in instance.sources
    )
    possible: list[tuple[str, str, Traced]] = []
    for pattern, slot in zip(patterns, run(rule.operations, bundle, trace), strict=True):
        for key, tensor in slot.tensors.items():
            values = {**instance.values, **dict(zip(slot.indices, key, strict=True))}
            possible.append((pattern.text, pattern.name(values), tensor))
    return _without_unwanted(possible, rule, wanted)


def _without_unwanted(
    possible: Sequence[tuple[str, str, Traced]], rule: Rule, wanted: Mapping[str, TensorSpec] | None
) -> list[tuple[str, Traced]]:
    """The leaves that stay, as (name, tensor); optional ones stay if they are wanted.

    If the target is not known and all are optional, those of the first pattern carry the data.

    Args:
        possible: (pattern, name, tensor) of each leaf that the rule can make.
        rule: the rule.
        wanted: the target's leaves, if they are known.
    """
    kept = [
        (name, tensor)
        for text, name, tensor in possible
        if text not in rule.optional or (wanted is not None and name in wanted)
    ]
    if possible and not kept and wanted is None:
        return [(name, tensor) for text, name, tensor in possible if text == possible[0][0]]
    return kept


def _is_made(rule: Rule, name: str, wanted: Mapping[str, TensorSpec] | None) -> bool:
    """Whether a rule without source makes a leaf: it is wanted, or the target is not known."""
    if wanted is not None:
        return name in wanted
    first = rule.operations[0]
    unknown = isinstance(first, Constant) and first.value == "unchecked"
    return not unknown and not rule.optional
