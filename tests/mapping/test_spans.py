"""Where the parts of a pattern lie: as a regular expression finds them, and in linear time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.steps import steps
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import MappingError
from xckpt.mapping.pattern import Pattern
from xckpt.mapping.spans import MOST_DIGITS, Piece, spans

PIECES = st.lists(
    st.sampled_from([("number", None), ("text", None)])
    | st.tuples(st.just("literal"), st.text("a01./", min_size=1, max_size=2)),
    max_size=5,
)
SECONDS = 1.0 * ALLOWANCE


def expression(pieces: list[Piece], lazy: str) -> str:
    texts = {"number": f"(0|[1-9][0-9]*{lazy})", "text": f"(.+{lazy})"}
    return "".join(texts.get(kind) or re.escape(literal or "") for kind, literal in pieces)


@given(PIECES, st.text("a01./2\n", max_size=9), st.booleans())
def test_the_spans_are_those_of_a_regular_expression(pieces, name, longest):
    match = re.fullmatch(expression(pieces, "" if longest else "?"), name, re.DOTALL)
    assert spans(name, pieces, longest=longest) == (None if match is None else list(match.groups()))


HOSTILE = pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("{a...}a{b...}a{c...}a{d...}a{e...}a{f...}z", "a" * 200),
        ("{a...}a{b...}a{c...}a{d...}a{e...}a{f...}z", "a" * 100_000),
        ("{a}{b}{c}{d}{e}{f}{g}z", "1" * 100_000),
        ("{a}1{b}1{c}1{d}1{e}z", "1" * 100_000),
        ("{a...}{b...}{c...}{d...}z", "é" * 100_000),
    ],
)


@HOSTILE
def test_a_hostile_name_takes_no_more_steps(pattern, name):
    parsed = Pattern.parse(pattern)
    assert parsed.match(name, {}) is None
    assert steps(lambda: parsed.match(name, {})) < 50


@pytest.mark.thorough
@HOSTILE
def test_a_hostile_name_takes_no_longer(pattern, name):
    parsed = Pattern.parse(pattern)
    begun = time.process_time()
    assert parsed.match(name, {}) is None
    assert time.process_time() - begun < SECONDS


def test_digits_beside_a_literal_of_digits_are_ambiguous():
    with pytest.raises(MappingError, match="in several ways"):
        Pattern.parse("h{layer}1{block}").match("h1111", {})


def test_a_number_of_absurd_length_is_none():
    pattern = Pattern.parse("h{layer}")
    assert pattern.match("h" + "9" * MOST_DIGITS, {}) == {"layer": int("9" * MOST_DIGITS)}
    assert pattern.match("h" + "9" * (MOST_DIGITS + 1), {}) is None
