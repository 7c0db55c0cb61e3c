"""Dividing the source's leaves among the rules: each leaf is taken once, or it is a problem.

Names are looked up by skeleton (runs of digits made equal) and by literal digits, so ten thousand
leaves and a thousand rules are ten thousand look-ups; only patterns with a text are tried against
every name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from xckpt.core.text.printable import in_few
from xckpt.errors import MappingError
from xckpt.mapping.pattern import Pattern, Value, skeleton
from xckpt.mapping.rule import Rule

Key = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class RuleInstance:
    """A rule at one value of the indices that stand on both sides."""

    rule: Rule
    values: Mapping[str, Value]
    """Those indices and texts."""
    stacked: tuple[str, ...]
    """Indices of the source alone."""
    sources: tuple[Mapping[tuple[int, ...], str], ...]
    """For each source pattern: values of the stacked indices -> leaf name."""


@dataclass(slots=True)
class Matches:
    """The instances of all rules, and the leaves and rules left over.

    Example:
        >>> matches = Matches()
        >>> matches.note_takers("step", [])
        >>> matches.unused
        ['step']
    """

    instances: list[RuleInstance] = field(default_factory=list[RuleInstance])
    unused: list[str] = field(default_factory=list[str])
    """Leaves that no rule takes."""
    idle: list[Rule] = field(default_factory=list[Rule])
    """Rules that take no leaf."""
    problems: list[str] = field(default_factory=list[str])
    failed: list[Rule] = field(default_factory=list[Rule])
    """The rules that the problems are about."""

    def fail(self, rule: Rule, problem: object) -> None:
        """Note what is wrong with a rule."""
        self.problems.append(f"rule {rule}: {problem}")
        self.failed.append(rule)

    def note_takers(self, name: str, takers: Sequence[Rule]) -> None:
        """Note a leaf that no rule takes, or that several do."""
        if not takers:
            self.unused.append(name)
        elif len(takers) > 1:
            several = " and ".join(f"rule {rule}" for rule in takers[:3])
            self.problems.append(f"source {name!r} is ambiguous: {several} match it")
            self.failed += takers


def match_rules(rules: Sequence[Rule], names: Iterable[str]) -> Matches:
    """Divide the leaves among the rules.

    Example:
        >>> rule = Rule("h.{layer}.w", "h/{layer}/kernel")
        >>> matches = match_rules([rule], ["h.0.w", "h.1.w", "step"])
        >>> [dict(instance.values) for instance in matches.instances], matches.unused
        ([{'layer': 0}, {'layer': 1}], ['step'])
    """
    matches = Matches()
    # rule -> source pattern -> values of that rule's source indices -> leaf
    taken: list[list[dict[Key, str]]] = [[{} for _ in rule.source] for rule in rules]
    lookup = _Lookup(rules)
    indices = [rule.source_indices for rule in rules]
    for name in names:
        takers: list[Rule] = []
        for number, place, pattern in lookup.candidates(name):
            rule = rules[number]
            try:
                values = pattern.match(name, rule.indices)
            except MappingError as error:
                matches.fail(rule, error)
            else:
                if values is None:
                    continue
                key = tuple(values[index] for index in indices[number])
                taken[number][place][key] = name
            takers.append(rule)
        matches.note_takers(name, takers)
    for rule, leaves in zip(rules, taken, strict=True):
        _instantiate(rule, leaves, matches)
    return matches


Entry = tuple[int, int, Pattern]
"""Number of a rule, place of a pattern in its source, the pattern."""


class _Lookup:
    """The patterns that may match a name, found without trying them all.

    By skeleton, then by which runs of digits are literal in the pattern, then by those runs.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._with_texts: list[Entry] = []
        self._others: dict[str, dict[tuple[int, ...], dict[tuple[str, ...], list[Entry]]]] = {}
        for number, rule in enumerate(rules):
            for place, pattern in enumerate(rule.source_patterns):
                self._add((number, place, pattern))

    def _add(self, entry: Entry) -> None:
        required = entry[2].skeleton
        if required is None:
            self._with_texts.append(entry)
            return
        text, runs = required
        literal = tuple(i for i, run in enumerate(runs) if run is not None)
        key = tuple(run for run in runs if run is not None)
        by_runs = self._others.setdefault(text, {}).setdefault(literal, {})
        by_runs.setdefault(key, []).append(entry)

    def candidates(self, name: str) -> Iterator[Entry]:
        """Patterns that may match; all others do not."""
        text, runs = skeleton(name)
        for literal, by_runs in self._others.get(text, {}).items():
            yield from by_runs.get(tuple(runs[i] for i in literal), ())
        yield from self._with_texts


def _instantiate(rule: Rule, leaves: list[dict[Key, str]], matches: Matches) -> None:
    """Group the leaves of one rule by the indices that stand on both sides."""
    if not rule.source:
        _constants(rule, matches)
        return
    keys = list(dict.fromkeys(key for by_key in leaves for key in by_key))
    if not keys:
        matches.idle.append(rule)
        return
    names = rule.source_indices
    wanted, problems = _wanted(rule, keys)
    lacking = [
        pattern.name(dict(zip(names, key, strict=True)))
        for pattern, by_key in zip(rule.source_patterns, leaves, strict=True)
        if by_key or pattern.text not in rule.optional
        for key in wanted
        if key not in by_key
    ]
    if lacking:
        problems.append(f"the source has no {in_few([*map(repr, lacking)])}")
    if problems:
        matches.problems += [f"rule {rule}: {problem}" for problem in problems]
        matches.failed.append(rule)
        return
    matches.instances += _grouped(rule, leaves, wanted)


def _grouped(rule: Rule, leaves: list[dict[Key, str]], keys: list[Key]) -> Iterator[RuleInstance]:
    """An instance for each value of the indices that are not stacked."""
    names, kept = rule.source_indices, rule.shared_indices
    stacked = tuple(name for name in names if name not in kept)
    places = [names.index(name) for name in stacked]
    groups: dict[Key, list[Key]] = {}
    for key in keys:
        shared = tuple(v for n, v in zip(names, key, strict=True) if n in kept)
        groups.setdefault(shared, []).append(key)
    shared_names = [name for name in names if name in kept]
    for shared, members in groups.items():
        sources = tuple(
            {tuple(int(key[p]) for p in places): by_key[key] for key in members if by_key}
            for by_key in leaves
        )
        values = dict(zip(shared_names, shared, strict=True))
        yield RuleInstance(rule, values, stacked, sources)


def _wanted(rule: Rule, keys: list[Key]) -> tuple[list[Key], list[str]]:
    """The values that a rule's source indices must have, given those that they have.

    Stated ranges must be full. An index that is stacked counts from 0 without a gap, in step with
    every value of the others.
    """
    names, kept = rule.source_indices, rule.shared_indices
    bound = [i for i, name in enumerate(names) if name in rule.indices or name not in kept]
    choices: list[Sequence[Value]] = []
    problems: list[str] = []
    for i in bound:
        if names[i] in rule.indices:
            choices.append(rule.indices[names[i]])
            continue
        values = sorted({int(key[i]) for key in keys})
        choices.append(values)
        if values != list(range(len(values))):
            gap = next(j for j, value in enumerate(values) if value != j)
            problems.append(f"index {names[i]!r} has {values[gap]} but not {gap}")
    wanted: dict[Key, None] = {}
    for key in keys:
        if key in wanted:
            continue
        for chosen in product(*choices):
            full = list(key)
            for i, value in zip(bound, chosen, strict=True):
                full[i] = value
            wanted[tuple(full)] = None
    return list(wanted), problems


def _constants(rule: Rule, matches: Matches) -> None:
    """A rule without source has an instance for each stated value of the target's indices."""
    names = rule.target_indices
    if open_names := [name for name in names if name not in rule.indices]:
        matches.fail(rule, f"state the range of {', '.join(open_names)}")
        return
    for values in product(*(rule.indices[name] for name in names)):
        matches.instances.append(RuleInstance(rule, dict(zip(names, values, strict=True)), (), ()))
