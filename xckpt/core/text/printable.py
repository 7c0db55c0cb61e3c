"""Names and texts of a checkpoint, made safe to print: they may hold control sequences.

What is escaped is all that `str.isprintable` refuses: control characters (C0, DEL, C1, so every
escape sequence), characters that turn the writing direction, line separators, lone surrogates.

1. `printable` makes one line of a text.
2. `printable_lines` keeps line breaks before two spaces: messages list what is wrong below their
   first line, indented, so that no name can begin a line of its own at the margin.
3. `printable_json` spells such characters as JSON does, so that it means the same as before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BARE_BREAK = re.compile(r"\n(?!  )")
"""A line break that no message makes."""


def printable(text: str) -> str:
    """A text in one line, without control characters.

    Example:
        >>> printable("a\\x1b[31m\\u202eb\\n"), printable("naïve 重み")
        ('a\\\\x1b[31m\\\\u202eb\\\\n', 'naïve 重み')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_lines(text: str) -> str:
    """A message of several lines, all but the first indented, without other control characters.

    Example:
        >>> print(printable_lines("2 are wrong\\n  - a\\x07\\n  - b\\nall is well"))
        2 are wrong
          - a\\x07
          - b\\nall is well
    """
    if text.isprintable():
        return text
    return "\n".join(map(printable, _BARE_BREAK.sub(r"\\n", text).split("\n")))


def in_few(names: Sequence[str], shown: int = 5) -> str:
    """Names in one line, the first of them.

    Example:
        >>> in_few(["a", "b"]), in_few(list("abcdefg"))
        ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return printable(", ".join(names[:shown])) + more


def printable_json(text: str) -> str:
    """A JSON document whose strings are printable, and mean what they meant.

    Example:
        >>> print(printable_json('"\\x9b\\u202e"'))
        "\\u009b\\u202e"
    """
    return "\n".join(
        line if line.isprintable() else "".join(map(_spelled, line)) for line in text.split("\n")
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _spelled(char: str) -> str:
    """A character as a JSON string may hold it."""
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
