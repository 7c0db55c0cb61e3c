"""Folding findings that belong together into few rules: twelve layers are one rule.

1. A name is a template and its numbers: those that are a whole component, or end one after ``_``.
2. Findings of the same templates and operations are one rule, if their numbers agree. The
   numbers of the first name are the indices. Every other number is one of them, or ``a * it + b``;
   or the first name's is ``a * it + b``.
3. A rule may only match the leaves that it explains, on either side. Otherwise its indices get a
   range; if that does not help, each finding has a rule of its own.
4. The leaves of a stack are numbered from 0 by its rule's index.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from math import prod

from xckpt.mapping.infer.decide import Finding
from xckpt.mapping.infer.leaves import CONCEPTS, STACKED, counted
from xckpt.mapping.pattern import Affine, Pattern, literal
from xckpt.mapping.rule import Rule

_NUMBER = re.compile(r"(?<![^/._])(0|[1-9]\d{0,17})(?![^/.])")
"""A number that is a whole component, or ends one after an underscore."""

Template = tuple[str, ...]
"""The text between the numbers of a name: one more than there are numbers."""

Column = tuple[int, ...]
"""The values of a number in the findings."""

Alike = dict[str, list[str]]
"""A name without digits -> the names that differ from it in these alone."""

Number = int | Affine
"""A number in a pattern: itself, or an index."""


def fold(
    findings: Sequence[Finding], sources: Collection[str], targets: Collection[str]
) -> list[Rule]:
    """The rules of all findings.

    Args:
        findings: what belongs together.
        sources: names of all leaves of the source.
        targets: names of all leaves of the target.

    Example:
        >>> findings = [Finding(((f"h.{n}.weight",),), ((f"h/{n}/scale",),), ()) for n in range(3)]
        >>> [rule] = fold(findings, *zip(*((f"h.{n}.weight", f"h/{n}/scale") for n in range(3))))
        >>> print(rule)
        h.{layer}.weight -> h/{layer}/scale
    """
    groups: dict[object, list[Finding]] = defaultdict(list)
    stacks: list[Rule] = []
    for finding in findings:
        if finding.is_stack:
            stacks.append(_stack_rule(finding))
        else:
            templates = tuple(_split(name)[0] for name in _names(finding))
            key = len(finding.sources), templates, finding.operations, finding.assumes
            groups[key].append(finding)
    alike = _alike(sources), _alike(targets)
    rules: list[Rule] = []
    for group in groups.values():
        folded = _folded(group, *alike)
        rules += [folded] if folded else map(_literal_rule, group)
    return [*rules, *stacks]


def without_numbers(name: str) -> str:
    """A name with ``*`` for each number that may be an index.

    Example:
        >>> without_numbers("model.layers.11.fc1.weight")
        'model.layers.*.fc1.weight'
    """
    return _NUMBER.sub("*", name)


def _split(name: str) -> tuple[Template, tuple[int, ...]]:
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), tuple(int(part) for part in parts[1::2])


def _names(finding: Finding) -> list[str]:
    """The names of a finding without stacks, the source's first."""
    return [name for [name] in finding.sources + finding.targets]


def _literal_rule(finding: Finding) -> Rule:
    names = [literal(name) for name in _names(finding)]
    count = len(finding.sources)
    return Rule(names[:count], names[count:], finding.operations, assumes=finding.assumes)


def _stack_rule(finding: Finding) -> Rule:
    sources, targets = (
        [counted(names, STACKED) or literal(names[0]) for names in side]
        for side in (finding.sources, finding.targets)
    )
    count = max(len(names) for names in finding.sources + finding.targets)
    indices = {STACKED: range(count)}
    return Rule(sources, targets, finding.operations, indices, assumes=finding.assumes)


def _texts(templates: Iterable[Template], numbers: Iterable[Number]) -> list[str]:
    """The patterns of names, with something in the place of each of their numbers."""
    braced = (f"{{{number}}}" if isinstance(number, Affine) else str(number) for number in numbers)
    return [
        literal(first) + "".join(next(braced) + literal(text) for text in others)
        for first, *others in templates
    ]


def _folded(group: Sequence[Finding], sources: Alike, targets: Alike) -> Rule | None:
    """One rule for a group; None if there is no such rule."""
    names = [_names(finding) for finding in group]
    numbers, values = _numbers(names) if len(group) > 1 else ([], {})
    if not values:
        return None
    texts = _texts((_split(name)[0] for name in names[0]), numbers)
    patterns = [Pattern.parse(text) for text in texts]
    if any(set(pattern.indices) != values.keys() for pattern in patterns):
        return None  # Each name must determine the others of its finding.
    count = len(group[0].sources)
    places = list(zip(*names, strict=True))
    stated: dict[str, range] = {}
    if not (
        _match_only(patterns[:count], sources, itertools.chain(*places[:count]))
        and _match_only(patterns[count:], targets, itertools.chain(*places[count:]))
    ):
        ranges = {name: range_of(column) for name, column in values.items()}
        stated = {name: each for name, each in ranges.items() if each is not None}
        if len(stated) < len(ranges) or prod(map(len, stated.values())) != len(group):
            return None
    operations, assumes = group[0].operations, group[0].assumes
    return Rule(texts[:count], texts[count:], operations, stated, assumes=assumes)


def _match_only(patterns: Sequence[Pattern], names: Alike, explained: Iterable[str]) -> bool:
    """Whether the patterns fit just the names that they explain, whatever the numbers."""
    wanted = set(explained)
    near = itertools.chain.from_iterable(names[each] for each in {*map(_without_digits, wanted)})
    return wanted == {name for name in near if any(each.fits(name) for each in patterns)}


def _alike(names: Iterable[str]) -> Alike:
    """The names by what they are without digits: a pattern's numbers fit nothing but these."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[_without_digits(name)].append(name)
    return alike


def _without_digits(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _numbers(names: Sequence[Sequence[str]]) -> tuple[list[Number], dict[str, Column]]:
    """What each number of the names is in the pattern, and each index's values. Without values if a
    number follows from no index.
    """
    template, _ = _split(names[0][0])
    rows = [[number for name in each for number in _split(name)[1]] for each in names]
    values: dict[str, Column] = {}
    numbers: list[Number] = []
    for place, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) == 1:
            numbers.append(column[0])
        elif place < len(template) - 1:
            name = _index_name(template[place], values)
            values[name] = column
            numbers.append(_index(name))
        elif number := _in_terms_of(column, values, numbers):
            numbers.append(number)
        else:
            return [], {}
    return numbers, values


def _in_terms_of(column: Column, values: dict[str, Column], numbers: list[Number]) -> Affine | None:
    """A number in terms of an index; where that is simpler, the index becomes the number.

    It may if the index is used only in the first name.
    """
    for name, own in values.items():
        if own == column:
            return _index(name)
    for name, own in values.items():
        if number := _line(name, own, column):
            return number
        uses = [place for place, each in enumerate(numbers) if _has_index(each, name)]
        if len(uses) == 1 and (number := _line(name, column, own)):
            values[name] = column
            numbers[uses[0]] = number
            return _index(name)
    return None


def _index(name: str) -> Affine:
    return Affine(((name, 1),))


def _has_index(number: Number, name: str) -> bool:
    return isinstance(number, Affine) and name in dict(number.factors)


def _line(name: str, values: Column, column: Column) -> Affine | None:
    """``a * name + b`` that gives the column for these values; three different ones at least."""
    points = dict(zip(values, column, strict=True))
    if len(points) < 3 or len(points) != len(set(zip(values, column, strict=True))):
        return None
    return Affine.through([name], {(value,): number for value, number in points.items()})


def _index_name(before: str, taken: Collection[str]) -> str:
    """``layer`` after ``model.layers.``."""
    words = re.findall(r"[A-Za-z]+", before)
    word = words[-1].lower() if words and re.search(r"[A-Za-z]_?[./_]*$", before) else "index"
    word = "layer" if CONCEPTS.get(word) == "layers" and word != "block" else word
    word = word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
    names = itertools.chain([word], (f"{word}{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def range_of(values: Iterable[int]) -> range | None:
    """The range that has just these values; None if there is none.

    Example:
        >>> range_of([4, 0, 2]), range_of([0, 1, 3])
        (range(0, 5, 2), None)
    """
    ordered = sorted(set(values))
    step = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    full = range(ordered[0], ordered[-1] + 1, step)
    return full if list(full) == ordered else None
