"""Which values JSON carries unchanged.

JSON writers turn NaN into null, bytes into text, sets into lists and int keys into strings, so a
user's values are checked before anything is written. Tuples become lists and are accepted.

Where an object has a name twice, JSON readers take the first member, the last or both.
`repeated_name` finds such names, so that no two readers see different documents.
"""

# An object that is a dict or a list has keys and elements of unknown type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite

from xckpt.core.names import is_utf8
from xckpt.core.text.arguments import named
from xckpt.errors import ManifestError

DEEPEST = 64
"""The most containers that may surround a value."""

LONGEST_INT = 4096
"""The most bits of an int; Python refuses to read back more than about 14,000."""


def check_json(value: object, what: str) -> None:
    """Refuse values that JSON would not give back.

    Raises:
        ManifestError: there are such values; lists each with its place.

    Example:
        >>> check_json({"run": "a", "betas": (0.9, 0.99)}, "metadata")
        >>> check_json({"loss": float("nan")}, "metadata")
        Traceback (most recent call last):
        ...
        xckpt.errors.ManifestError: metadata cannot be written as JSON
          - metadata/loss: nan is not a JSON number
    """
    problems = list(json_problems(value, what))
    if problems:
        raise ManifestError.listing(f"{what} cannot be written as JSON", problems)


def json_problems(value: object, where: str, above: tuple[int, ...] = ()) -> Iterator[str]:
    """One line for each part of a value that JSON would not give back.

    ``above`` holds the ids of the containers around the value.
    """
    if id(value) in above:
        yield f"{where[:80]}: contains itself"
    elif len(above) > DEEPEST:
        yield f"{where[:80]}...: more than {DEEPEST} containers deep"
    elif isinstance(value, dict):
        for key, child in value.items():
            if type(key) is not str:
                kind = named(type(key).__name__)
                yield f"{where}: the key {key!r} is {kind}; JSON keys are strings"
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
            yield f"{where}: {value!r} is not a JSON number"
    elif type(value) is int:
        if value.bit_length() > LONGEST_INT:
            yield f"{where}: an int of more than {LONGEST_INT} bits"
    elif value is not None and type(value) is not bool:
        kind = named(f"{type(value).__module__}.{type(value).__qualname__}")
        yield f"{where}: {kind} is not a JSON value"


def _string_problem(text: str, where: str) -> Iterator[str]:
    if not is_utf8(text):
        yield f"{where}: {text[:40]!r} holds half a character (a lone surrogate)"


class _RepeatedName(Exception):
    """Ends the search."""


def repeated_name(text: bytes) -> str | None:
    """A name that an object of a JSON text has twice, however it is spelled; None if there is none.

    Raises:
        RecursionError: the text is nested too deeply.
        UnicodeDecodeError: the text is not UTF-8.
        ValueError: the text is not JSON.

    Example:
        >>> repeated_name(b'{"a":{"b":1},"b":[{"c":1,"\\\\u0063":2}]}')
        'c'
    """
    try:
        # Only names matter here, and Python refuses to parse a very long int.
        json.loads(text.decode(), object_pairs_hook=_names_once, parse_int=len, parse_float=len)
    except _RepeatedName as found:
        return str(found)
    return None


def _names_once(pairs: Sequence[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise _RepeatedName(Counter(name for name, _ in pairs).most_common(1)[0][0])
