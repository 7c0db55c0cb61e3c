"""Writing the TOML of mapping files: one rule a table, one operation a line.

Only what a mapping's document holds: tables of strings, whole numbers, numbers, truth values, lists
and tables. The layout is for people; `tomllib` reads it back to the same document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["write_document"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
LINE = 100
"""Longest line before a list is spread over several."""


def write_document(document: Mapping[str, Any]) -> str:
    """A document as TOML; lists of tables at the top become ``[[name]]`` sections.

    Example:
        >>> print(write_document({"version": 1, "rule": [{"source": "a", "target": "b"}]}))
        version = 1
        <BLANKLINE>
        [[rule]]
        source = "a"
        target = "b"
        <BLANKLINE>
    """
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """A table's own pairs, then the lists of tables in it, then the tables in it."""
    lists = {
        key: value
        for key, value in document.items()
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value)
    }
    tables = {key: value for key, value in document.items() if isinstance(value, Mapping)}
    for key, value in document.items():
        if key not in lists and key not in tables:
            yield from _pair(key, value)
    for key, rows in lists.items():
        for table in rows:
            yield ""
            yield f"[[{above}{_key(key)}]]"
            for name, value in table.items():
                yield from _pair(name, value)
    for key, table in tables.items():
        yield ""
        yield f"[{above}{_key(key)}]"
        yield from _lines(table, f"{above}{_key(key)}.")


def _pair(key: str, value: object) -> Iterator[str]:
    line = f"{_key(key)} = {_inline(value)}"
    spread = isinstance(value, list) and len(value) > 1 and not isinstance(value[0], int)
    if not isinstance(value, list) or not (spread or len(line) > LINE) or not value:
        yield line
        return
    yield f"{_key(key)} = ["
    for item in value:
        yield f"    {_inline(item)},"
    yield "]"


def _inline(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        # A JSON string is a TOML string, but for one control character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_inline(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _inline(key)
