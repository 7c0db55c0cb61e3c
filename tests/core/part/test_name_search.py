"""Patterns of names: as a regular expression finds them, and in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.part.name_search import NameSearch

MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
WILD = re.compile(r"(\*\*/|\*\*|\*|\?)")


def as_expression(pattern: str) -> re.Pattern[str]:
    """The same as a regular expression, which may go back for hours."""
    text = "".join(MEANING.get(part) or re.escape(part) for part in WILD.split(pattern))
    return re.compile(f"{text}(?:/.*)?", re.DOTALL)


patterns = st.lists(st.sampled_from(["*", "**", "**/", "?", "/", "a", "b", "ab"]), max_size=8)
names = st.text("ab/*?\n", max_size=10)


@given(patterns.map("".join), names)
def test_it_means_what_the_expression_means(pattern: str, name: str) -> None:
    expected = as_expression(pattern).fullmatch(name) is not None
    assert NameSearch(pattern).fits(name) is expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("star", ["*", "**", "**/", "*?", "?"])
@pytest.mark.parametrize("stars, length", [(10, 200), (10, 100_000), (3_000, 10_000)])
def test_no_name_takes_long(star: str, stars: int, length: int) -> None:
    """Ten stars and 200 letters took an expression longer than anybody waits."""
    search = NameSearch(f"{star}a" * stars)
    assert not search.fits("a" * length + "b")
    assert search.fits("ba" * length) is (star in ("*", "**", "*?"))
