"""The pattern of the moments that belong to the leaves of a pattern.

1. Where the optimizer's names hold the parameter's whole name, something stands before it and after
   it: ``state/{name...}/exp_avg``.
2. Where the optimizer numbers the parameters, the number is a sum of the pattern's indices, if the
   layers are numbered alike: ``state/{4*layer+2}/exp_avg``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import product

from xckpt.errors import MappingError
from xckpt.mapping.optimizer.states import MomentLeaf
from xckpt.mapping.pattern import Affine, Pattern, literal


def moment_pattern(
    pattern: Pattern, ranges: Mapping[str, range], places: Mapping[str, MomentLeaf]
) -> tuple[str, dict[str, range]]:
    """The pattern of the moments of a pattern's leaves, and the ranges that it needs.

    Args:
        pattern: of parameters' names.
        ranges: the stated values of its indices.
        places: name of each parameter that the pattern matches -> where its moment is.

    Raises:
        MappingError: the moments' names follow no pattern.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> where = {"after": "/mu", "slot": "mu", "spec": TensorSpec((4,), "float32")}
        >>> numbered = {f"h.{n}.b": MomentLeaf("state/", f"{2 * n + 1}", **where, is_number=True)
        ...             for n in range(3)}
        >>> moment_pattern(Pattern.parse("h.{layer}.b"), {}, numbered)
        ('state/{2*layer+1}/mu', {'layer': range(0, 3)})
    """
    forms = {
        (place.before, owner.removesuffix(place.key), place.after, place.is_number)
        for owner, place in places.items()
    }
    if len(forms) == 1:
        before, cut, after, is_number = forms.pop()
        text = literal(cut)
        if not is_number and pattern.text.startswith(text):
            return literal(before) + pattern.text[len(text) :] + literal(after), {}
    return _numbered(pattern, ranges, places)


def _numbered(
    pattern: Pattern, ranges: Mapping[str, range], places: Mapping[str, MomentLeaf]
) -> tuple[str, dict[str, range]]:
    """``state/{4*layer+2}/exp_avg`` for moments that are numbered."""
    texts = {(place.before, place.after) for place in places.values()}
    if len(texts) == 1 and all(place.is_number for place in places.values()) and not pattern.texts:
        points: dict[tuple[int, ...], int] = {}
        for owner, place in places.items():
            values = pattern.match(owner, ranges) or {}
            points[tuple(int(values[name]) for name in pattern.indices)] = int(place.key)
        number = _affine(pattern.indices, points)
        if number is not None:
            before, after = texts.pop()
            columns = zip(pattern.indices, zip(*points, strict=True), strict=True)
            needed = {name: _range(column) for name, column in columns}
            return f"{literal(before)}{number}{literal(after)}", needed
    raise MappingError(
        f"the moments of {pattern.text} lie under no common name, nor under numbers that follow "
        "from the indices; get_optimizer_state_dict names torch's moments"
    )


def _affine(names: Sequence[str], points: Mapping[tuple[int, ...], int]) -> str | None:
    """The number of a moment as a sum of the indices; None if it is none."""
    if not names:
        return str(points[()])
    columns = [sorted({point[place] for point in points}) for place in range(len(names))]
    if set(points) != set(product(*columns)):
        return None
    factors = _factors(columns, points)
    if factors is None:
        return None
    first = tuple(column[0] for column in columns)
    constant = points[first] - _scaled(factors, first)
    fits = all(number == constant + _scaled(factors, point) for point, number in points.items())
    if constant < 0 or not fits:
        return None
    return f"{{{Affine(tuple(zip(names, factors, strict=True)), constant)}}}"


def _factors(
    columns: Sequence[Sequence[int]], points: Mapping[tuple[int, ...], int]
) -> list[int] | None:
    """By how much the number grows with each index; None if that is no whole number from 1 up.

    An index with a single value gets 1.
    """
    first = tuple(column[0] for column in columns)
    factors: list[int] = []
    for place, column in enumerate(columns):
        if len(column) == 1:
            factors.append(1)
            continue
        second = (*first[:place], column[1], *first[place + 1 :])
        factor, rest = divmod(points[second] - points[first], column[1] - column[0])
        if rest or factor < 1:
            return None
        factors.append(factor)
    return factors


def _scaled(factors: Sequence[int], point: Sequence[int]) -> int:
    return sum(factor * value for factor, value in zip(factors, point, strict=True))


def _range(values: Collection[int]) -> range:
    found = sorted(set(values))
    step = found[1] - found[0] if len(found) > 1 else 1
    return range(found[0], found[-1] + 1, step)
