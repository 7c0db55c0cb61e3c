"""Patterns of leaf names, matched in time that is linear in the name, whatever its text.

1. A pattern is a row of tokens: stars, and single characters.
2. A place is a number of tokens that the name has passed so far. All places where it may be are
   kept at once, as the bits of an int.
3. A character of the name takes them to the next: Thompson's search for regular expressions (1968).
   Python's own goes back to try another way, for hours where a pattern has ten stars and a name 200
   letters. Steps are kept for the next names, which begin alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

_TOKEN = re.compile(r"\*\*/|\*\*|\*|.", re.DOTALL)
_STARS = ("**/", "**", "*")
_MOST_KEPT = 4096
"""Sets of places whose steps are kept."""


class NameSearch:
    """Says which names fit a pattern; see `xckpt.core.part.selection.NamePattern`.

    Example:
        >>> hostile = "a" * 100_000
        >>> [NameSearch("*a" * 50 + end).fits(hostile) for end in ("", "b")]
        [True, False]
    """

    def __init__(self, pattern: str) -> None:
        parts = [*_parts(pattern)]
        # Behind the pattern; or behind the "/" and any text that may follow.
        self._fitting: Final = 0b101 << len(parts)
        self._bits: Final = Counter[str]()
        """Part -> the places before one."""
        for place, part in enumerate([*parts, "/", "**"]):
            self._bits[part] |= 1 << place
        self._kept: Final[dict[int, _Places]] = {}
        self._begin: Final = _Places(self, self._with_skipped(1))

    def fits(self, name: str) -> bool:
        """Whether the pattern fits a name, or that of a container around it."""
        places = self._begin
        for character in name:
            places = places[character]
        return bool(places.bits & self._fitting)

    def after(self, places: int, character: str) -> _Places:
        """The places after one more character."""
        passed, stays = self._bits[character], self._bits["**"]
        if character != "/":
            passed, stays = passed | self._bits["?"], stays | self._bits["*"]
        found = self._with_skipped((places & passed) << 1 | places & stays)
        if len(self._kept) == _MOST_KEPT:
            for each in (self._begin, *self._kept.values()):
                each.clear()
            self._kept.clear()
        return self._kept.setdefault(found, _Places(self, found))

    def _with_skipped(self, places: int) -> int:
        """These places, and those behind what may be nothing; at most three such stand together."""
        entrances = self._bits[""]
        may_be_nothing = entrances | self._bits["*"] | self._bits["**"]
        for _ in range(3):
            places |= (places & may_be_nothing) << 1 | (places & entrances) << 3
        return places


class _Places(dict[str, "_Places"]):
    """Where a name may be, as bits: character -> where it may be after that."""

    __slots__ = ("_search", "bits")

    def __init__(self, search: NameSearch, bits: int) -> None:
        super().__init__()
        self._search = search
        self.bits = bits

    def __missing__(self, character: str) -> _Places:
        after = self[character] = self._search.after(self.bits, character)
        return after


def _parts(pattern: str) -> Iterator[str]:
    """Its tokens, without stars that add nothing to the one before.

    ``**/`` becomes an entrance, from which a name may pass all three, any text, and a "/".

    Example:
        >>> [*_parts("a***b")], [*_parts("**/**/c")]
        (['a', '**', 'b'], ['', '**', '/', 'c'])
    """
    before = ""
    for token in _TOKEN.findall(pattern):
        if token in _STARS and before in ("**", token):
            continue
        yield from ("", "**", "/") if token == "**/" else (token,)
        before = token
