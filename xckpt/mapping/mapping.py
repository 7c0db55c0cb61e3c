"""A mapping between two models' leaves: rules, resolved on shapes alone.

1. `xckpt.mapping.match` divides the source's leaves among the rules; every instance of a rule
   gets its own.
2. `xckpt.mapping.resolve` runs the instance's operations on traced tensors, so each target leaf
   ends as strided copies out of source leaves. A following mapping continues with those tensors.
3. `ResolvedMapping.copies_into` cuts those to a box of a target leaf: reading and writing need
   nothing else. The inverse mapping is derived rule by rule, and resolves in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from xckpt.core.text.arguments import named, shown_value
from xckpt.core.text.printable import in_few
from xckpt.errors import MappingError
from xckpt.mapping.document import read_file, write_file
from xckpt.mapping.names import specs_of
from xckpt.mapping.operations.base import is_list, is_table
from xckpt.mapping.prove import problems_with
from xckpt.mapping.resolve import Resolution, ResolvedMapping
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.traced import leaf

VERSION = 1
"""Version of the mapping file's form."""

RESOLVED = 0.6
"""The part of the time of `LeafMapping.check` that usually goes before the proof."""


def check_mapping(mapping: object, call: str) -> None:
    """Refuse an argument of a call that is not a mapping.

    Raises:
        TypeError: it is neither a mapping nor None.

    Example:
        >>> check_mapping({"w": "v"}, "load")
        Traceback (most recent call last):
        TypeError: load takes mapping=xckpt.convert.Mapping(...), not a dict
    """
    if mapping is not None and not isinstance(mapping, LeafMapping):
        kind = type(mapping).__name__
        raise TypeError(f"{call} takes mapping=xckpt.convert.Mapping(...), not {named(kind)}")


def _in_a_line(self: LeafMapping) -> str:
    count = "1 rule" if len(self.rules) == 1 else f"{len(self.rules):,} rules"
    rules = in_few([str(rule) for rule in self.rules], shown=3)
    then = "" if self.following is None else f", then {self.following!r}"
    return f"<Mapping of {count}{': ' if rules else ''}{rules}{then}>"


@dataclass(frozen=True, slots=True, init=False)
class LeafMapping:
    """How the leaves of one model become those of another; publicly `xckpt.convert.Mapping`.

    Example:
        >>> from xckpt.mapping.operations import Transpose
        >>> mapping = LeafMapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))]),
        ...                    Rule("fc.bias", "fc/bias")])
        >>> source = {"fc.weight": TensorSpec((8, 4), "float32"),
        ...           "fc.bias": TensorSpec((8,), "float32")}
        >>> resolved = mapping.resolve(source)
        >>> print(resolved.targets["fc/kernel"])
        float32[4, 8]
        >>> mapping.inverse().inverse() == mapping
        True
        >>> mapping.inverse().resolve(resolved.targets).targets == source
        True
        >>> mapping.to_file("rules.toml")
        >>> LeafMapping.from_file("rules.toml") == mapping
        True
    """

    rules: tuple[Rule, ...]
    """In any order: no leaf may be matched by two of them."""
    following: LeafMapping | None
    """The next step, on the leaves that the rules make; see `then`."""

    def __init__(self, rules: Iterable[Rule] = (), following: LeafMapping | None = None) -> None:
        object.__setattr__(self, "rules", _checked(rules))
        object.__setattr__(self, "following", following)

    __repr__ = _in_a_line

    def inverse(self) -> LeafMapping:
        """The mapping back, derived: each rule inverted, the last step first."""
        back = LeafMapping(rule.inverse() for rule in self.rules)
        return back if self.following is None else self.following.inverse().then(back)

    def then(self, following: LeafMapping) -> LeafMapping:
        """This mapping followed by another one; no intermediate leaf is made.

        Example:
            >>> from xckpt.mapping.operations import Transpose
            >>> there = LeafMapping([Rule("a.weight", "b/kernel", [Transpose((1, 0))])])
            >>> both = there.then(there.inverse())
            >>> resolved = both.resolve({"a.weight": TensorSpec((2, 3), "int8")})
            >>> resolved.copies["a.weight"][0].source_strides
            ((1, 0), (0, 1))
        """
        last = following if self.following is None else self.following.then(following)
        return LeafMapping(self.rules, last)

    def accept(self, *texts: str) -> LeafMapping:
        """This mapping with the assumptions of its rules accepted.

        Args:
            texts: parts of the texts that are accepted; by default all are.

        Example:
            >>> rule = Rule("wq.weight", "query/kernel", assumes="the rotary order is one")
            >>> LeafMapping([rule]).accept("rotary").assumed
            ()
        """
        rules = [
            replace(rule, assumes="")
            if not texts or any(text in rule.assumes for text in texts)
            else rule
            for rule in self.rules
        ]
        return LeafMapping(rules, self.following and self.following.accept(*texts))

    @property
    def assumed(self) -> tuple[Rule, ...]:
        """The rules that assume something, of all steps."""
        later = self.following.assumed if self.following else ()
        return (*(rule for rule in self.rules if rule.assumes), *later)

    def require_accepted(self) -> None:
        """Refuse a mapping that assumes something.

        Raises:
            MappingError: lists what each rule assumes.
        """
        by_reason: dict[str, list[Rule]] = {}
        for rule in self.assumed:
            by_reason.setdefault(rule.assumes, []).append(rule)
        if by_reason:
            raise MappingError.listing(
                "the mapping assumes what neither names nor shapes show; compare it with the two "
                "models' code, then take mapping.accept() or --accept-assumed",
                [f"{_some(rules)}: {reason}" for reason, rules in by_reason.items()],
            )

    def resolve(
        self,
        source: object,
        wanted: object = None,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> ResolvedMapping:
        """The target leaves that a source of these shapes gives, and the copies that make them.

        Args:
            source: `TensorSpec` by mapping name, or a tree of anything with shape and dtype.
            wanted: the same, of the target. It decides only which optional names and which
                constants are made; without it, constants are made and optional names are not.
            progress: called now and then with the part of the work that is done, from 0 to 1.

        Raises:
            MappingError: rules are ambiguous, lack a leaf, make one twice, or do not fit the
                shapes; all problems are listed.
        """
        target = None if wanted is None else specs_of(wanted)
        resolution = _resolution(self, specs_of(source), target, progress)
        if resolution.problems:
            summary = "the mapping does not fit the source"
            raise MappingError.listing(summary, resolution.problems)
        return resolution.resolved

    def check(
        self,
        source: object,
        target: object = None,
        *,
        progress: Callable[[float], None] | None = None,
    ) -> ResolvedMapping:
        """Prove on shapes alone that the source makes up the target: nothing left, nothing twice.

        Args:
            source: `TensorSpec` by mapping name, or a tree of anything with shape and dtype.
            target: the same, of the target; None for the leaves that the mapping makes.
            progress: called now and then with the part of the work that is done, from 0 to 1.

        Raises:
            MappingError: what `resolve` raises, every source leaf that is not used, every target
                leaf that is not made, every other shape or dtype, listed together.

        Example:
            >>> spec = TensorSpec((2,), "int8")
            >>> LeafMapping([Rule("w", "v")]).check({"w": spec, "b": spec}, {"v": spec})
            Traceback (most recent call last):
            xckpt.errors.MappingError: the mapping does not fit
              - source 'b': no rule uses [0, 2)
        """
        wanted = None if target is None else specs_of(target)
        resolving = part_of(progress, 0.0, RESOLVED)
        resolution = _resolution(self, specs_of(source), wanted, resolving)
        resolved = resolution.resolved
        made = resolved.targets if wanted is None else wanted
        proving = part_of(progress, RESOLVED, 1.0)
        faults = problems_with(resolved, made, resolution.failed, progress=proving)
        problems = [*resolution.problems, *faults]
        if problems:
            raise MappingError.listing("the mapping does not fit", problems)
        return resolved

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> LeafMapping:
        """The mapping in a parsed TOML document.

        Raises:
            MappingError: a field is missing, unknown or wrong.

        Example:
            >>> rule = {"source": "w", "target": "v", "operations": [{"transpose": [1, 0]}]}
            >>> LeafMapping.from_document({"rule": [rule]}).rules[0].operations
            (Transpose(axes=(1, 0)),)
        """
        if not is_table(document):
            given = shown_value(document)
            raise MappingError(f"a mapping's document is a table (a dict), not {given}")
        if strange := sorted(set(document) - {"version", "rule", "then"}):
            raise MappingError(f"a mapping has no {', '.join(strange)}: only version, rule, then")
        if document.get("version", VERSION) != VERSION:
            raise MappingError(f"mapping version {document['version']!r}; xckpt reads {VERSION}")
        rules = document.get("rule", [])
        if not is_list(rules) or not all(map(is_table, rules)):
            raise MappingError("rules are tables, each under [[rule]]")
        problems: list[str] = []
        parsed: list[Rule] = []
        for number, rule in enumerate(rules, 1):
            try:
                parsed.append(Rule.from_document(rule))
            except MappingError as error:
                problems.append(f"rule {number}: {error}")
        if problems:
            raise MappingError.listing("the mapping's rules are wrong", problems)
        following = document.get("then")
        if following is not None and not is_table(following):
            raise MappingError("then is a table with rules of its own: [[then.rule]]")
        return cls(parsed, None if following is None else cls.from_document(following))

    def to_document(self) -> dict[str, Any]:
        """The mapping as plain dicts, lists, strings and numbers."""
        document: dict[str, Any] = {"version": VERSION}
        document["rule"] = [rule.to_document() for rule in self.rules]
        if self.following is not None:
            document["then"] = self.following.to_document()
        return document

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LeafMapping:
        """Read a mapping from a TOML file.

        Raises:
            MappingError: the file is not TOML, longer than 64 MiB, or no mapping.
            OSError: it cannot be read.
            TypeError: it is not a path.
        """
        return read_file(path, cls.from_document)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the mapping to a TOML file, from which `from_file` makes the same mapping."""
        write_file(path, self.to_document())


def _resolution(
    mapping: LeafMapping,
    source: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec] | None,
    progress: Callable[[float], None] | None,
) -> Resolution:
    """What the steps of a mapping make of a source, one after the other, and the problems."""
    if "" in source:
        raise MappingError("a mapping takes leaves by name, but the source is a leaf without one")
    resolution = Resolution(source, {name: leaf(name, spec) for name, spec in source.items()})
    steps = [mapping]
    while steps[-1].following is not None:
        steps.append(steps[-1].following)
    for number, step in enumerate(steps):
        part = part_of(progress, number / len(steps), (number + 1) / len(steps))
        resolution.take(step.rules, None if step.following else wanted, part)
    return resolution


def _checked(rules: object) -> tuple[Rule, ...]:
    """The rules of a mapping.

    Raises:
        TypeError: they are not a list of rules.
    """
    given = tuple(cast("Iterable[object]", rules)) if isinstance(rules, Iterable) else None
    if given is None or not all(isinstance(each, Rule) for each in given):
        raise TypeError("a mapping is made of a list of rules: Mapping([Rule(source, target)])")
    return cast("tuple[Rule, ...]", given)


def part_of(
    progress: Callable[[float], None] | None, start: float, end: float
) -> Callable[[float], None] | None:
    """What a part of some work reports to: from ``start`` to ``end`` of the whole.

    Example:
        >>> part_of(print, 0.5, 1.0)(0.5)
        0.75
    """
    if progress is None:
        return None
    return lambda part: progress(start + (end - start) * part)


def _some(rules: Sequence[Rule]) -> str:
    more = f" and {len(rules) - 1} more" if len(rules) > 1 else ""
    return f"rule {rules[0]}{more}"
