"""Where the parts of a pattern lie in a name, in time linear in the name.

A regular expression with several texts tries every way to divide a name among them, and names come
from untrusted checkpoints. Here nothing is tried:

1. `_ends` goes through the parts from the last to the first. It keeps the positions from which the
   parts behind match the rest of the name, as the bits of an int.
2. `spans` goes from the first part to the last, and takes for each the longest or the shortest
   stretch after which the rest still matches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Kind = Literal["number", "text"]
Piece = tuple[Literal["literal"], str] | tuple[Kind, None]
"""A part of a pattern: a literal text, a whole number without leading zeros, or any text."""

MOST_DIGITS = 1000
"""The most digits of a number in a name: Python refuses to convert more than 4,300."""


def spans(name: str, pieces: Sequence[Piece], *, longest: bool) -> list[str] | None:
    """The part of a name for each number and text; None if the name does not match.

    Example:
        >>> pattern = [("text", None), ("literal", "."), ("text", None)]
        >>> spans("a.b.c", pattern, longest=True), spans("a.b.c", pattern, longest=False)
        (['a.b', 'c'], ['a', 'b.c'])
        >>> spans("h12", [("literal", "h"), ("number", None)], longest=True)
        ['12']
    """
    ends = _ends(name, pieces)
    if not ends[0] & 1:
        return None
    found: list[str] = []
    at = 0
    for (kind, literal), after in zip(pieces, ends[1:], strict=True):
        if literal is not None:
            at += len(literal)
            continue
        stop = len(name) if kind == "text" else _run_end(name, at)
        within = (after >> (at + 1)) & ((1 << (stop - at)) - 1)
        step = within.bit_length() if longest else (within & -within).bit_length()
        found.append(name[at : at + step])
        at += step
    return found


def _ends(name: str, pieces: Sequence[Piece]) -> list[int]:
    """For each piece, and for the end, the positions from which the pieces on match the rest."""
    ends = [1 << len(name)]
    for kind, literal in reversed(pieces):
        after = ends[-1]
        if not after:
            here = 0
        elif literal is not None:
            here = _starts(name, literal) & (after >> len(literal))
        elif kind == "text":
            here = (1 << (after.bit_length() - 1)) - 1
        else:
            here = _number_starts(name, after)
        ends.append(here)
    return ends[::-1]


def _starts(name: str, literal: str) -> int:
    """The positions at which a literal stands."""
    found: list[int] = []
    at = name.find(literal)
    while at >= 0:
        found.append(at)
        at = name.find(literal, at + 1)
    return _bits(found)


def _number_starts(name: str, after: int) -> int:
    """The positions from which a number leads to one of the positions ``after``."""
    is_end = bin(after)[:1:-1].ljust(len(name) + 1, "0")
    found: list[int] = []
    end = -1
    """The nearest of these positions to which digits lead."""
    for at in range(len(name) - 1, -1, -1):
        if not "0" <= name[at] <= "9":
            end = -1
            continue
        if is_end[at + 1] == "1":
            end = at + 1
        if 0 < end - at <= (1 if name[at] == "0" else MOST_DIGITS):
            found.append(at)
    return _bits(found)


def _bits(positions: Sequence[int]) -> int:
    """The int that has a bit at each of some positions."""
    if len(positions) < 8:
        return sum(1 << at for at in positions)
    digits = bytearray(b"0") * (max(positions) + 1)
    for at in positions:
        digits[-1 - at] = ord("1")
    return int(digits, 2)


def _run_end(name: str, at: int) -> int:
    """Where a number that begins at a position ends at the latest."""
    if name[at] == "0":
        return at + 1
    end = at
    while end < len(name) and end - at < MOST_DIGITS and "0" <= name[end] <= "9":
        end += 1
    return end
