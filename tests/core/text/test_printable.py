"""What is printed holds no character that drives a terminal, and JSON means what it meant."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.text.printable import printable, printable_json, printable_lines

ANY = st.text(st.characters())
"""Any characters, lone surrogates too."""


@given(ANY)
def test_a_text_becomes_one_printable_line(text):
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


@given(ANY, ANY)
def test_lines_of_a_message_are_indented(first, second):
    shown = printable_lines(f"{first}\n  - {second}")
    margin, *rest = shown.split("\n")
    assert margin.isprintable()
    assert all(line.isprintable() and line.startswith("  ") for line in rest)
    assert printable_lines(shown) == shown


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner)))
def test_json_means_the_same(value):
    for indent in (None, 2):
        shown = printable_json(json.dumps(value, ensure_ascii=False, indent=indent))
        assert json.loads(shown) == value
        assert all(line.isprintable() for line in shown.split("\n"))


def test_what_drives_a_terminal():
    for drives in (
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\x9b2J",
        "\r",
        "\b",
        "\u202e",
        "\u2066",
        "\ud800",
    ):
        assert (
            not set(drives)
            & {"\x1b", "\x9b", "\r", "\b", "\u202e", "\u2066", "\ud800"}
            & set(printable(drives))
        )
