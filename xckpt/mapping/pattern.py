"""Names with typed indices, so that one rule covers many leaves.

A pattern is anchored: it matches a whole name or not at all. In braces stand

- ``{layer}``: a whole number without leading zeros,
- ``{layer+1}``, ``{6*block+5}``, ``{6*block+local}``: a number that is affine in indices,
- ``{rest...}``: any text of at least one character, "/" and "." included.

Everything else is literal; ``{{`` and ``}}`` are braces. An index that stands alone somewhere is
read there; an index that only stands in sums is found by trying the values of its stated range.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

from xckpt.errors import MappingError
from xckpt.mapping.spans import Piece, spans

Value = int | str
Ranges = Mapping[str, range]

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_TEXT = re.compile(r"([A-Za-z_]\w*)\.\.\.")
_TERM = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*)(?:\*(\d+))?|(\d+)")
_DIGITS = re.compile(r"[0-9]+")
_RUNS = re.compile(r"[0-9\0]+")


@dataclass(frozen=True, slots=True)
class Affine:
    """``constant + sum(factor * index)``.

    Example:
        >>> str(Affine.parse("6*block + 5"))
        '6*block+5'
    """

    factors: tuple[tuple[str, int], ...]
    constant: int = 0

    @classmethod
    def parse(cls, text: str) -> Affine:
        """What stands between braces.

        Raises:
            MappingError: it is not a sum of indices, multiples of indices and numbers.
        """
        factors: dict[str, int] = {}
        constant = 0
        for term in text.replace(" ", "").split("+"):
            match = _TERM.fullmatch(term)
            if match is None:
                raise MappingError(
                    f"{{{text}}}: an index is a name, a number times a name, or a sum of these"
                )
            before, name, after, number = match.groups()
            if number is not None:
                constant += int(number)
            else:
                factors[name] = factors.get(name, 0) + int(before or 1) * int(after or 1)
        if not factors or 0 in factors.values():
            raise MappingError(f"{{{text}}} has no index in it")
        return cls(tuple(factors.items()), constant)

    @classmethod
    def through(cls, names: Sequence[str], points: Mapping[tuple[int, ...], int]) -> Affine | None:
        """The sum that gives a number at each point of a grid; None if there is none.

        Every factor is 1 or more; that of an index with a single value is 1.

        Args:
            names: of the indices.
            points: values of the indices -> the number there.

        Example:
            >>> print(Affine.through(["n"], {(0,): 5, (1,): 7, (2,): 9}))
            2*n+5
        """
        columns = [sorted(set(column)) for column in zip(*points, strict=True)]
        if set(points) != set(product(*columns)):
            return None
        first = tuple(column[0] for column in columns)
        factors = [1] * len(columns)
        for place, column in enumerate(columns):
            if len(column) > 1:
                second = (*first[:place], column[1], *first[place + 1 :])
                factors[place] = (points[second] - points[first]) // (column[1] - column[0])
        at_first = sum(factor * value for factor, value in zip(factors, first, strict=True))
        line = cls(tuple(zip(names, factors, strict=True)), points[first] - at_first)
        fits = all(
            line.at(dict(zip(names, point, strict=True))) == number
            for point, number in points.items()
        )
        return line if fits and line.constant >= 0 and all(each > 0 for each in factors) else None

    def at(self, values: Mapping[str, Value]) -> int:
        """The number for these indices."""
        return self.constant + sum(factor * int(values[name]) for name, factor in self.factors)

    def __str__(self) -> str:
        terms = [name if factor == 1 else f"{factor}*{name}" for name, factor in self.factors]
        return "+".join([*terms, *([str(self.constant)] if self.constant else [])])


class Text(NamedTuple):
    """Any text of at least one character.

    Example:
        >>> Pattern.parse("model.{rest...}").parts
        ('model.', Text(name='rest'))
    """

    name: str


Part = str | Affine | Text
"""A literal, a number or a text."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern; make one with `Pattern.parse`.

    Example:
        >>> pattern = Pattern.parse("model.layers.{layer}.{rest...}")
        >>> pattern.match("model.layers.12.mlp.up.weight", {})
        {'rest': 'mlp.up.weight', 'layer': 12}
        >>> pattern.match("model.layers.x.mlp", {}) is None
        True
        >>> Pattern.parse("h/{6*block+5}").name({"block": 2})
        'h/17'
    """

    text: str
    parts: tuple[Part, ...]
    """What the pattern is made of, in order."""
    indices: tuple[str, ...]
    """Names of the indices and texts, each once, in order of appearance."""
    pieces: tuple[Piece, ...]
    """The same, as a name is compared with it."""
    certain: bool
    """Whether a name can match in one way only, as far as that can be seen."""

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def parse(cls, text: str) -> Pattern:
        """The parsed pattern of ``text``.

        Raises:
            MappingError: braces do not close, or what stands between them is not an index.
        """
        parts = _parts(text)
        indices = dict.fromkeys(name for part in parts for name in _names(part))
        texts = [part.name for part in parts if isinstance(part, Text)]
        numbers = {name for part in parts if isinstance(part, Affine) for name, _ in part.factors}
        for name in texts:
            if name in numbers:
                raise MappingError(f"{text!r}: {name!r} is both a number and a text")
        adjacent = any(map(_meet, parts, parts[1:]))
        certain = len(texts) < 2 and not adjacent
        return cls(text, parts, tuple(indices), tuple(map(_piece, parts)), certain)

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts."""
        return tuple(part.name for part in self.parts if isinstance(part, Text))

    @property
    def skeleton(self) -> tuple[str, tuple[str | None, ...]] | None:
        """The skeleton and runs of digits (None: any) of every matching name. None if the pattern
        has a text.
        """
        if self.texts:
            return None
        marked = "".join(part if isinstance(part, str) else "\0" for part in self.parts)
        runs = tuple(None if "\0" in run else run for run in _RUNS.findall(marked))
        return _RUNS.sub("0", marked), runs

    def name(self, values: Mapping[str, Value]) -> str:
        """The name for these values of the indices."""
        return "".join(_spelled(part, values) for part in self.parts)

    def fits(self, name: str) -> bool:
        """Whether a name looks like the pattern, whatever its indices."""
        return spans(name, self.pieces, longest=True) is not None

    def match(self, name: str, ranges: Ranges) -> dict[str, Value] | None:
        """The indices for which the pattern is ``name``, within their ranges; None if it never is.

        Raises:
            MappingError: several values of the indices give this name.
        """
        found = spans(name, self.pieces, longest=True)
        if found is None:
            return None
        if not self.certain and spans(name, self.pieces, longest=False) != found:
            raise MappingError(f"{self.text!r} matches {name!r} in several ways")
        values: dict[str, Value] = {}
        equations: list[tuple[Affine, int]] = []
        placeholders = [part for part in self.parts if not isinstance(part, str)]
        for part, text in zip(placeholders, found, strict=True):
            if isinstance(part, Affine):
                equations.append((part, int(text)))
            elif values.setdefault(part.name, text) != text:
                return None
        solutions = list(islice(_solutions(equations, ranges), 2))
        if len(solutions) > 1:
            raise MappingError(
                f"{self.text!r} is {name!r} for {solutions[0]} and for {solutions[1]}"
            )
        return {**values, **solutions[0]} if solutions else None


def _parts(text: str) -> tuple[Part, ...]:
    """The parts of a pattern's text."""
    parts: list[Part] = []
    end = 0
    for token in _TOKEN.finditer(text):
        parts.append(text[end : token.start()])
        end = token.end()
        if token[0] in ("{{", "}}"):
            parts.append(token[0][0])
        elif token[1] is None:
            raise MappingError(f"{text!r}: a brace does not close; {{{{ is a literal one")
        elif name := _TEXT.fullmatch(token[1].strip()):
            parts.append(Text(name[1]))
        else:
            parts.append(Affine.parse(token[1]))
    return tuple(part for part in (*parts, text[end:]) if part != "")


def _names(part: Part) -> Iterable[str]:
    """The names of the indices or of the text in a part."""
    if isinstance(part, Affine):
        return [name for name, _ in part.factors]
    return [part.name] if isinstance(part, Text) else ()


def _spelled(part: Part, values: Mapping[str, Value]) -> str:
    """A part of a name, for these values of the indices."""
    if isinstance(part, str):
        return part
    return str(part.at(values) if isinstance(part, Affine) else values[part.name])


def _meet(before: Part, after: Part) -> bool:
    """Whether it can be open where a part ends and the next one begins."""
    if isinstance(before, str):
        return False
    return not isinstance(after, str) or (isinstance(before, Affine) and after[0].isdigit())


def _piece(part: Part) -> Piece:
    """A part as a name is compared with it."""
    if isinstance(part, str):
        return "literal", part
    return ("number", None) if isinstance(part, Affine) else ("text", None)


def _solutions(equations: list[tuple[Affine, int]], ranges: Ranges) -> Iterator[dict[str, int]]:
    """Values of the indices for which each sum is its number."""
    known: dict[str, int] = {}
    for sum_, number in equations:
        if len(sum_.factors) == 1:
            ((name, factor),) = sum_.factors
            value, rest = divmod(number - sum_.constant, factor)
            if rest or known.setdefault(name, value) != value or not _allowed(name, value, ranges):
                return
    names = dict.fromkeys(name for sum_, _ in equations for name, _ in sum_.factors)
    unknown = [name for name in names if name not in known]
    # One of them follows from the others: the one whose range is longest, or not stated.
    unknown.sort(key=lambda name: len(ranges[name]) if name in ranges else 1 << 62)
    *tried, last = unknown or [""]
    for name in tried:
        if name not in ranges:
            raise MappingError(f"index {name!r} stands only in sums: state its range")
    solved = next((each for each in equations if last in dict(each[0].factors)), None)
    for values in product(*(ranges[name] for name in tried)):
        attempt = {**known, **dict(zip(tried, values, strict=True))}
        if solved is not None:
            sum_, number = solved
            others = sum_.at({**attempt, last: 0})
            attempt[last] = (number - others) // dict(sum_.factors)[last]
        if all(_allowed(name, attempt[name], ranges) for name in unknown) and all(
            sum_.at(attempt) == number for sum_, number in equations
        ):
            yield {name: attempt[name] for name in names}


def _allowed(name: str, value: int, ranges: Ranges) -> bool:
    return value in ranges[name] if name in ranges else value >= 0


def skeleton(name: str) -> tuple[str, list[str]]:
    """A name with each run of digits made one "0", and those runs.

    Example:
        >>> skeleton("layers.12.fc1")
        ('layers.0.fc0', ['12', '1'])
    """
    return _DIGITS.sub("0", name), _DIGITS.findall(name)


def literal(text: str) -> str:
    """A pattern that is just this text.

    Example:
        >>> literal("a{0}")
        'a{{0}}'
    """
    return text.replace("{", "{{").replace("}", "}}")
