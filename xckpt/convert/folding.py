"""From leaves that belong together to few rules: twelve layers are one rule.

1. A name is a template and its numbers: those that are a whole component, or end one after ``_``.
2. Links of one pair of templates and the same operations are one rule, if their numbers go along:
   each number of the target is a number of the source, or ``a * it + b``; or the other way.
3. A rule may match no leaf but those it explains, on either side. If it would, its indices get a
   range; if that does not help, each link has a rule of its own.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xckpt.convert.conventions import Operation
from xckpt.convert.leaf_names import CONCEPTS

__all__ = ["Link", "Rule", "counted", "fold", "literal", "rule", "without_numbers"]

_NUMBER = re.compile(r"(?<![^/._])(0|[1-9]\d{0,17})(?![^/.])")
"""A number that is a whole component, or ends one after an underscore."""


Rule = dict[str, object]
"""A rule as a mapping file spells it."""


@dataclass(frozen=True)
class Link:
    """One source's leaf and one target's, and what turns the one into the other."""

    source: str
    target: str
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class _Side:
    """One side's names in a group of links."""

    template: tuple[str, ...]
    """The text between the numbers."""
    numbers: tuple[tuple[int, ...], ...]
    """For each link its numbers."""

    def column(self, position: int) -> tuple[int, ...]:
        return tuple(row[position] for row in self.numbers)

    @property
    def count(self) -> int:
        return len(self.template) - 1


def fold(links: Sequence[Link], sources: Collection[str], targets: Collection[str]) -> list[Rule]:
    """The rules, as a mapping file spells them.

    Args:
        links: what belongs together.
        sources: names of all leaves of the source.
        targets: names of all leaves of the target.

    Example:
        >>> links = [Link(f"h.{n}.weight", f"h/{n}/scale", ()) for n in range(3)]
        >>> names = [[link.source for link in links], [link.target for link in links]]
        >>> fold(links, *names)
        [{'source': 'h.{layer}.weight', 'target': 'h/{layer}/scale'}]
    """
    groups: dict[object, list[Link]] = defaultdict(list)
    for link in links:
        one, other = _split(link.source)[0], _split(link.target)[0]
        groups[one, other, repr(link.operations)].append(link)
    rules: list[Rule] = []
    for group in groups.values():
        rules += _folded(group, sources, targets) or [
            rule(literal(link.source), literal(link.target), link.operations) for link in group
        ]
    return rules


def literal(text: str) -> str:
    """A pattern that is just this text."""
    return text.replace("{", "{{").replace("}", "}}")


def without_numbers(name: str) -> str:
    """A name with ``*`` for each number that may be an index.

    Example:
        >>> without_numbers("model.layers.11.fc1.weight")
        'model.layers.*.fc1.weight'
    """
    return _NUMBER.sub("*", name)


def _split(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    parts = _NUMBER.split(name)
    return tuple(parts[::2]), tuple(int(part) for part in parts[1::2])


def rule(source: str, target: str, operations: Sequence[Operation], indices: object = None) -> Rule:
    """A rule as a mapping file spells it, without what is empty."""
    document: Rule = {"source": source, "target": target}
    if operations:
        document["operations"] = list(operations)
    if indices:
        document["indices"] = indices
    return document


def counted(names: Sequence[str], index: str) -> str:
    """The pattern of names that one number from 0 on tells apart; of one name that name.

    Raises:
        ValueError: there is no such number.

    Example:
        >>> counted(["h.0.ln_1.weight", "h.1.ln_1.weight"], "layer")
        'h.{layer}.ln_1.weight'
    """
    if len(names) == 1:
        return literal(names[0])
    side = _Side(_split(names[0])[0], tuple(_split(name)[1] for name in names))
    wanted = tuple(range(len(names)))
    stands = [
        f"{{{index}}}" if side.column(position) == wanted else str(side.numbers[0][position])
        for position in range(side.count)
    ]
    if stands.count(f"{{{index}}}") != 1:
        raise ValueError(f"{names[0]} and others are not told apart by one number")
    return _text(side, stands)


def _folded(
    group: Sequence[Link], sources: Collection[str], targets: Collection[str]
) -> list[Rule]:
    """One rule for a group; none if there is no such rule."""
    if len(group) == 1:
        return []
    source = _Side(_split(group[0].source)[0], tuple(_split(link.source)[1] for link in group))
    target = _Side(_split(group[0].target)[0], tuple(_split(link.target)[1] for link in group))
    patterns = _patterns(source, target)
    if patterns is None:
        return []
    one, other, values = patterns
    exact = _matching(one, source, sources) == {link.source for link in group}
    exact &= _matching(other, target, targets) == {link.target for link in group}
    if exact:
        return [rule(_text(source, one), _text(target, other), group[0].operations)]
    ranges = {name: _range(column) for name, column in values.items()}
    full = [range(*each) for each in ranges.values() if each is not None]
    if len(full) < len(ranges) or len(list(itertools.product(*full))) != len(group):
        return []
    indices = {name: list(each) for name, each in ranges.items() if each}
    return [rule(_text(source, one), _text(target, other), group[0].operations, indices)]


def _patterns(
    source: _Side, target: _Side
) -> tuple[list[str], list[str], dict[str, tuple[int, ...]]] | None:
    """What stands for each number of the source and of the target, and each index's values."""
    columns = [source.column(position) for position in range(source.count)]
    one = [str(column[0]) if len(set(column)) == 1 else "" for column in columns]
    other: list[str] = []
    values: dict[str, tuple[int, ...]] = {}
    names: dict[int, str] = {}
    for position in range(source.count):
        if not one[position]:
            name = names[position] = _index_name(source.template[position], values)
            values[name] = columns[position]
            one[position] = f"{{{name}}}"
    for position in range(target.count):
        column = target.column(position)
        if len(set(column)) == 1:
            other.append(str(column[0]))
            continue
        found = _in_terms_of(column, columns, names, values, one)
        if found is None:
            return None
        other.append(found)
    # A target's name must say which source it comes from, and the other way.
    used = set(re.findall(r"[a-z_]\w*", " ".join(other)))
    return (one, other, values) if used == set(values) else None


def _in_terms_of(
    column: tuple[int, ...],
    columns: Sequence[tuple[int, ...]],
    names: dict[int, str],
    values: dict[str, tuple[int, ...]],
    one: list[str],
) -> str | None:
    """A target's number by an index; where that is simpler, the index becomes the target's."""
    for name in names.values():
        if values[name] == column:
            return f"{{{name}}}"
    for position, name in names.items():
        affine = _affine(values[name], column)
        if affine is not None:
            return f"{{{_term(name, *affine)}}}"
        affine = _affine(column, columns[position])
        if affine is not None and one[position] == f"{{{name}}}":
            values[name] = column
            one[position] = f"{{{_term(name, *affine)}}}"
            return f"{{{name}}}"
    return None


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


def _text(side: _Side, stands: Sequence[str]) -> str:
    literals = [literal(text) for text in side.template]
    return "".join(map("".join, itertools.zip_longest(literals, stands, fillvalue="")))


def _matching(stands: Sequence[str], side: _Side, names: Collection[str]) -> set[str]:
    """The names that fit the template and its constant numbers."""
    found: set[str] = set()
    for name in names:
        template, numbers = _split(name)
        if template == side.template and all(
            not each.isdigit() or int(each) == number
            for each, number in zip(stands, numbers, strict=True)
        ):
            found.add(name)
    return found


def _range(column: Sequence[int]) -> tuple[int, ...] | None:
    """``start, stop`` or ``start, stop, step`` of the values; None if they are no range."""
    values = sorted(set(column))
    step = values[1] - values[0] if len(values) > 1 else 1
    if values != list(range(values[0], values[-1] + 1, step)):
        return None
    ends = (values[0], values[-1] + 1)
    return ends if step == 1 else (*ends, step)
