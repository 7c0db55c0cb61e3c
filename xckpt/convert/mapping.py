"""A mapping between two models' leaves: rules, resolved on shapes alone.

1. Names of the source are shared out among the rules; every instance of a rule gets its leaves.
2. The instance's operations run on traced tensors (`xckpt.convert.tracing`), so each target leaf
   ends as strided copies out of source leaves.
3. `ResolvedMapping.copies_into` cuts those to a box of a target leaf: that is all that reading and
   writing need. The inverse mapping is derived rule by rule, and resolves in the same way.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable
from collections.abc import Mapping as Map
from dataclasses import dataclass, replace
from typing import Any

from xckpt.convert.bundles import Bundle, Slot, Trace
from xckpt.convert.checks import problems_with
from xckpt.convert.copies import StridedCopy
from xckpt.convert.matching import Instance, match_rules
from xckpt.convert.operations import Constant, run
from xckpt.convert.resolved import ResolvedMapping
from xckpt.convert.rules import Rule
from xckpt.convert.tensors import TensorSpec
from xckpt.convert.toml import write_document
from xckpt.convert.tracing import Traced, leaf
from xckpt.errors import MappingError

__all__ = ["Mapping", "ResolvedMapping"]

VERSION = 1
"""Version of the mapping file's form."""


@dataclass(frozen=True, slots=True, init=False)
class Mapping:
    """How the leaves of one model become those of another.

    Example:
        >>> from xckpt.convert.operations import Transpose
        >>> mapping = Mapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))]),
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
    """

    rules: tuple[Rule, ...]
    """In any order: no leaf may be matched by two of them."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        object.__setattr__(self, "rules", tuple(rules))

    def inverse(self) -> Mapping:
        """The mapping back, derived."""
        return Mapping(rule.inverse() for rule in self.rules)

    def resolve(
        self, source: Map[str, TensorSpec], wanted: Map[str, TensorSpec] | None = None
    ) -> ResolvedMapping:
        """The target leaves that a source of these shapes gives, and the copies that make them.

        What the target wants decides only which optional names and which constants are made.
        Where it is not known, constants are made and optional names are not.

        Raises:
            MappingError: rules are ambiguous, lack a leaf, make one twice, or do not fit the
                shapes; all problems are listed.
        """
        matches = match_rules(self.rules, source)
        problems = list(matches.problems)
        trace = Trace()
        leaves = {name: leaf(name, spec) for name, spec in source.items()}
        made: dict[str, Traced] = {}
        makers: dict[str, Rule] = {}
        for instance in matches.instances:
            try:
                for name, tensor in _targets(instance, leaves, trace, wanted):
                    if name in made:
                        problems.append(
                            f"{name!r} is made twice: by rule {makers[name]} and by rule "
                            f"{instance.rule}"
                        )
                    made[name], makers[name] = tensor, instance.rule
            except MappingError as error:
                problems.append(f"rule {instance.rule}{_at(instance)}: {error}")
        if problems:
            raise MappingError.listing("the mapping does not fit the source", problems)
        return ResolvedMapping(
            sources=dict(source),
            targets={name: tensor.spec for name, tensor in made.items()},
            copies={name: _named(name, tensor) for name, tensor in made.items()},
            assertions=tuple(trace.assertions),
            dropped=tuple(trace.dropped),
            lossy=tuple(trace.lossy),
            unused=tuple(matches.unused),
            idle=tuple(matches.idle),
            makers=makers,
        )

    def check(self, source: Map[str, TensorSpec], target: Map[str, TensorSpec]) -> ResolvedMapping:
        """Prove on shapes alone that the source makes up the target: nothing left, nothing twice.

        Raises:
            MappingError: every source leaf that is not used, every target leaf that is not made,
                every other shape or dtype, listed together.
        """
        resolved = self.resolve(source, target)
        problems = problems_with(resolved, target)
        if problems:
            raise MappingError.listing("the mapping does not fit", problems)
        return resolved

    @classmethod
    def from_document(cls, document: Map[str, Any]) -> Mapping:
        """The mapping that a parsed TOML document stands for.

        Raises:
            MappingError: a field is missing, unknown or wrong.
        """
        if strange := sorted(set(document) - {"version", "rule"}):
            raise MappingError(f"a mapping has version and rule, not {', '.join(strange)}")
        if document.get("version", VERSION) != VERSION:
            raise MappingError(f"mapping version {document['version']!r} is not {VERSION}")
        rules = document.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, Map) for rule in rules):
            raise MappingError("rules are tables, each under [[rule]]")
        problems: list[str] = []
        found: list[Rule] = []
        for number, rule in enumerate(rules, 1):
            try:
                found.append(Rule.from_document(rule))
            except MappingError as error:
                problems.append(f"rule {number}: {error}")
        if problems:
            raise MappingError.listing("the mapping's rules are wrong", problems)
        return cls(found)

    def to_document(self) -> dict[str, Any]:
        """The mapping as plain dicts, lists, strings and numbers."""
        return {"version": VERSION, "rule": [rule.to_document() for rule in self.rules]}

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Mapping:
        """Read a mapping from a TOML file.

        Raises:
            MappingError: the file is no TOML, or no mapping.
            OSError: it cannot be read.
        """
        with open(path, "rb") as file:
            try:
                return cls.from_document(tomllib.load(file))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise MappingError(f"{os.fspath(path)} is no TOML: {error}") from error
            except MappingError as error:
                raise MappingError(f"{os.fspath(path)}: {error}", error.problems) from error

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the mapping to a TOML file, from which `from_file` makes the same mapping."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(write_document(self.to_document()))


def _at(instance: Instance) -> str:
    values = ", ".join(f"{name} = {value}" for name, value in instance.values.items())
    return f" at {values}" if values else ""


def _targets(
    instance: Instance,
    leaves: Map[str, Traced],
    trace: Trace,
    wanted: Map[str, TensorSpec] | None,
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
    made: list[tuple[str, str, Traced]] = []
    for pattern, slot in zip(patterns, run(rule.operations, bundle, trace), strict=True):
        for key, tensor in slot.tensors.items():
            values = {**instance.values, **dict(zip(slot.indices, key, strict=True))}
            made.append((pattern.text, pattern.name(values), tensor))
    kept = [
        (name, tensor)
        for text, name, tensor in made
        if text not in rule.optional or (wanted is not None and name in wanted)
    ]
    if made and not kept and wanted is None:
        # Optional names all: the first one carries the data.
        kept = [(name, tensor) for text, name, tensor in made if text == made[0][0]]
    return kept


def _is_made(rule: Rule, name: str, wanted: Map[str, TensorSpec] | None) -> bool:
    """Whether a rule without source makes a leaf: where it is wanted, or nobody knows."""
    if wanted is not None:
        return name in wanted
    first = rule.operations[0]
    unknown = isinstance(first, Constant) and first.value == "unchecked"
    return not unknown and not rule.optional


def _named(name: str, tensor: Traced) -> tuple[StridedCopy, ...]:
    """A leaf's copies, with its name."""
    return tuple(replace(copy, target=name).simplified() for copy in tensor.copies)
