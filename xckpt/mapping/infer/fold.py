"""Folding leaves that belong together into few rules: twelve layers are one rule.

1. A name is a template and its numbers: those that are a whole component, or end one after ``_``.
2. Links of the same templates and the same operations are one rule, if their numbers go along. The
   numbers of the first name are the indices. Every other number is one of them, or ``a * it + b``;
   or the first name's is ``a * it + b``.
3. A rule may match no leaf but those it explains, on either side. If it would, its indices get a
   range; if that does not help, each link has a rule of its own.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xckpt.mapping.infer.conventions import OperationTable
from xckpt.mapping.infer.leaf_names import CONCEPTS

_NUMBER = re.compile(r"(?<![^/._])(0|[1-9]\d{0,17})(?![^/.])")
"""A number that is a whole component, or ends one after an underscore."""


RuleTable = dict[str, object]
"""A rule as a mapping file spells it."""

Template = tuple[str, ...]
"""The text between the numbers of a name: one more than there are numbers."""

Column = tuple[int, ...]
"""What a number is in each link."""


@dataclass(frozen=True)
class Link:
    """Leaves of the source and of the target, and what turns the ones into the others."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[OperationTable, ...]


@dataclass(frozen=True)
class _NamePattern:
    """A name of a rule in the making."""

    template: Template
    stands: Sequence[str]
    """The text in place of each number: digits, or an index in braces."""

    @property
    def text(self) -> str:
        """The pattern as a rule spells it."""
        literals = [literal(text) for text in self.template]
        return "".join(map("".join, itertools.zip_longest(literals, self.stands, fillvalue="")))

    @property
    def indices(self) -> set[str]:
        """The indices that stand in it."""
        return {name for each in self.stands for name in _indices(each)}

    def matches(self, name: str) -> bool:
        """Whether a name fits the template and its constant numbers."""
        template, numbers = _split(name)
        return template == self.template and all(
            not each.isdigit() or int(each) == number
            for each, number in zip(self.stands, numbers, strict=True)
        )


@dataclass(frozen=True)
class _NumberedNames:
    """The names of links that have the same templates."""

    templates: tuple[Template, ...]
    columns: list[Column]
    """Every number of the names, with its value in each link."""

    @classmethod
    def of(cls, links: Sequence[Sequence[str]]) -> _NumberedNames:
        """The names of each link."""
        numbers = [[n for name in names for n in _split(name)[1]] for names in links]
        return cls(_templates(links[0]), list(zip(*numbers, strict=True)))

    def patterns(self, stands: Sequence[str]) -> list[_NamePattern]:
        """The names with something in the place of each number."""
        left = iter(stands)
        return [
            _NamePattern(template, list(itertools.islice(left, len(template) - 1)))
            for template in self.templates
        ]


def fold(
    links: Sequence[Link], sources: Collection[str], targets: Collection[str]
) -> list[RuleTable]:
    """The rules, as a mapping file spells them.

    Args:
        links: what belongs together.
        sources: names of all leaves of the source.
        targets: names of all leaves of the target.

    Example:
        >>> links = [Link((f"h.{n}.weight",), (f"h/{n}/scale",), ()) for n in range(3)]
        >>> fold(links, [f"h.{n}.weight" for n in range(3)], [f"h/{n}/scale" for n in range(3)])
        [{'source': 'h.{layer}.weight', 'target': 'h/{layer}/scale'}]
    """
    groups: dict[object, list[Link]] = defaultdict(list)
    for link in links:
        templates = _templates(link.sources), _templates(link.targets)
        groups[templates, repr(link.operations)].append(link)
    rules: list[RuleTable] = []
    for group in groups.values():
        rules += _folded(group, sources, targets) or [
            rule(_literals(link.sources), _literals(link.targets), link.operations)
            for link in group
        ]
    return rules


def literal(text: str) -> str:
    """A pattern that is just this text."""
    return text.replace("{", "{{").replace("}", "}}")


def _literals(names: Sequence[str]) -> list[str]:
    return [literal(name) for name in names]


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


def _templates(names: Sequence[str]) -> tuple[Template, ...]:
    return tuple(_split(name)[0] for name in names)


def rule(
    sources: Sequence[str],
    targets: Sequence[str],
    operations: Sequence[OperationTable],
    indices: object = None,
) -> RuleTable:
    """A rule as a mapping file spells it, without what is empty."""
    document: RuleTable = {"source": _short(sources), "target": _short(targets)}
    if operations:
        document["operations"] = list(operations)
    if indices:
        document["indices"] = indices
    return document


def _short(names: Sequence[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else list(names)


def counted(names: Sequence[str], index: str) -> str:
    """The pattern of names that differ in one number, counted from 0; a single name stays.

    Raises:
        ValueError: there is no such number.

    Example:
        >>> counted(["h.0.ln_1.weight", "h.1.ln_1.weight"], "layer")
        'h.{layer}.ln_1.weight'
    """
    if len(names) == 1:
        return literal(names[0])
    one = _NumberedNames.of([[name] for name in names])
    wanted = tuple(range(len(names)))
    stands = [f"{{{index}}}" if each == wanted else str(each[0]) for each in one.columns]
    if stands.count(f"{{{index}}}") != 1:
        raise ValueError(f"{names[0]} and others do not differ in just one number")
    return one.patterns(stands)[0].text


def _folded(
    group: Sequence[Link], sources: Collection[str], targets: Collection[str]
) -> list[RuleTable]:
    """One rule for a group; none if there is no such rule."""
    if len(group) == 1:
        return []
    names = _NumberedNames.of([(*link.sources, *link.targets) for link in group])
    found = _stands(names)
    if found is None:
        return []
    stands, values = found
    patterns = names.patterns(stands)
    if any(each.indices != values.keys() for each in patterns):
        return []  # A name must say which others it goes with.
    count = len(group[0].sources)
    one, other = patterns[:count], patterns[count:]
    texts = [each.text for each in one], [each.text for each in other]
    exact = _matching(one, sources) == {name for link in group for name in link.sources}
    exact &= _matching(other, targets) == {name for link in group for name in link.targets}
    if exact:
        return [rule(*texts, group[0].operations)]
    ranges = {name: _range(column) for name, column in values.items()}
    full = [range(*each) for each in ranges.values() if each is not None]
    if len(full) < len(ranges) or len(list(itertools.product(*full))) != len(group):
        return []
    indices = {name: list(each) for name, each in ranges.items() if each}
    return [rule(*texts, group[0].operations, indices)]


def _matching(patterns: Sequence[_NamePattern], names: Collection[str]) -> set[str]:
    """The names that fit one of the patterns."""
    return {name for name in names if any(each.matches(name) for each in patterns)}


def _stands(names: _NumberedNames) -> tuple[list[str], dict[str, Column]] | None:
    """The text for each number, and each index's values; None if a number follows from none."""
    values: dict[str, Column] = {}
    stands: list[str] = []
    first = len(names.templates[0]) - 1
    for place, column in enumerate(names.columns):
        if len(set(column)) == 1:
            stands.append(str(column[0]))
        elif place < first:
            index = _index_name(names.templates[0][place], values)
            values[index] = column
            stands.append(f"{{{index}}}")
        else:
            found = _in_terms_of(column, values, stands)
            if found is None:
                return None
            stands.append(found)
    return stands, values


def _in_terms_of(column: Column, values: dict[str, Column], stands: list[str]) -> str | None:
    """A number in terms of an index; where that is simpler, the index becomes the number.

    It may if the index is used only in the first name.
    """
    for name in values:
        if values[name] == column:
            return f"{{{name}}}"
    for name in values:
        affine = _affine(values[name], column)
        if affine is not None:
            return f"{{{_term(name, *affine)}}}"
        affine = _affine(column, values[name])
        uses = [place for place, each in enumerate(stands) if name in _indices(each)]
        if affine is not None and len(uses) == 1:
            values[name] = column
            stands[uses[0]] = f"{{{_term(name, *affine)}}}"
            return f"{{{name}}}"
    return None


def _indices(stand: str) -> list[str]:
    """The indices in the text for a number."""
    return re.findall(r"[a-z_]\w*", stand)


def _affine(of: tuple[int, ...], column: tuple[int, ...]) -> tuple[int, int] | None:
    """``a`` and ``b`` with ``column = a * of + b``, from three different values on."""
    steps = sorted(set(zip(of, column, strict=True)))
    if len(steps) < 3 or len({each for each, _ in steps}) != len(steps):
        return None
    (x, y), (z, w) = steps[:2]
    a, rest = divmod(w - y, z - x)
    b = y - a * x
    fits = rest == 0 and a > 0 and b >= 0 and all(q == a * p + b for p, q in steps)
    return (a, b) if fits else None


def _term(name: str, a: int, b: int) -> str:
    scaled = name if a == 1 else f"{a}*{name}"
    return scaled if b == 0 else f"{scaled}+{b}"


def _index_name(before: str, taken: Collection[str]) -> str:
    """``layer`` after ``model.layers.``."""
    words = re.findall(r"[A-Za-z]+", before)
    word = words[-1].lower() if words and re.search(r"[A-Za-z]_?[./_]*$", before) else "index"
    word = "layer" if CONCEPTS.get(word) == "layers" and word != "block" else word
    word = word.removesuffix("s") if len(word) > 2 and not word.endswith("ss") else word
    names = itertools.chain([word], (f"{word}{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def _range(column: Sequence[int]) -> tuple[int, ...] | None:
    """``start, stop`` or ``start, stop, step`` of the values; None if they are no range."""
    values = sorted(set(column))
    step = values[1] - values[0] if len(values) > 1 else 1
    if values != list(range(values[0], values[-1] + 1, step)):
        return None
    ends = (values[0], values[-1] + 1)
    return ends if step == 1 else (*ends, step)
