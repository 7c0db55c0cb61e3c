"""What JSON carries as it is, and what it would silently change.

JSON writers turn NaN into null, bytes into text, sets into lists and int keys into strings, so what
a user passes is checked before anything is written. Tuples are lists to JSON and pass.

JSON readers take the first or the last of two members of one name, or both: `repeated_name` finds
them, so that nobody can show one reader what another does not see.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite

from xckpt.errors import ManifestError

__all__ = ["check_json", "json_problems", "repeated_name"]

DEEPEST = 64
"""Most containers around a value."""

LONGEST_INT = 4096
"""Most bits of an int; Python refuses to read back what has more than about 14,000."""


def check_json(value: object, what: str) -> None:
    """Refuse what JSON would not give back.

    Raises:
        ManifestError: lists every such place.

    Example:
        >>> check_json({"run": "a", "betas": (0.9, 0.99)}, "metadata")
        >>> check_json({"loss": float("nan")}, "metadata")
        Traceback (most recent call last):
        ...
        xckpt.errors.ManifestError: metadata cannot be written as JSON
          - metadata/loss: nan is no JSON number
    """
    problems = list(json_problems(value, what))
    if problems:
        raise ManifestError.listing(f"{what} cannot be written as JSON", problems)


def json_problems(value: object, where: str, above: tuple[int, ...] = ()) -> Iterator[str]:
    """A line for each part of a value that JSON would not give back.

    ``above`` holds the ids of the containers around the value.
    """
    if id(value) in above:
        yield f"{where[:80]}: contains itself"
    elif len(above) > DEEPEST:
        yield f"{where[:80]}...: more than {DEEPEST} containers deep"
    elif isinstance(value, dict):
        for key, child in value.items():
            if type(key) is not str:
                yield f"{where}: the key {key!r} is a {type(key).__name__}; JSON keys are strings"
            else:
                yield from _string_problem(key, where)
                yield from json_problems(child, f"{where}/{key}", (*above, id(value)))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from json_problems(child, f"{where}/{index}", (*above, id(value)))
    elif type(value) is str:
        yield from _string_problem(value, where)
    elif type(value) is float:
        if not isfinite(value):
            yield f"{where}: {value!r} is no JSON number"
    elif type(value) is int:
        if value.bit_length() > LONGEST_INT:
            yield f"{where}: an int of more than {LONGEST_INT} bits"
    elif value is not None and type(value) is not bool:
        yield f"{where}: a {type(value).__module__}.{type(value).__qualname__} is no JSON value"


def _string_problem(text: str, where: str) -> Iterator[str]:
    try:
        text.encode()
    except UnicodeEncodeError:
        yield f"{where}: {text[:40]!r} holds half a character (a lone surrogate)"


class _RepeatedName(Exception):
    """Ends the search."""


def repeated_name(text: bytes) -> str | None:
    """A name that some object of a JSON text has twice, however it is spelled; None if none has.

    Raises:
        RecursionError: the text is nested too deep to look through.
        UnicodeDecodeError: it is no UTF-8.
        ValueError: it is no JSON.

    Example:
        >>> repeated_name(b'{"a":{"b":1},"b":[{"c":1,"\\\\u0063":2}]}')
        'c'
    """
    try:
        # What the names stand for is of no interest, and an int may be too long to be one.
        json.loads(text.decode(), object_pairs_hook=_names_once, parse_int=len, parse_float=len)
    except _RepeatedName as found:
        return str(found)
    return None


def _names_once(pairs: Sequence[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _RepeatedName(Counter(name for name, _ in pairs).most_common(1)[0][0])
