"""Python values come back as they were."""

from __future__ import annotations

import contextlib
import math
import sys
from enum import IntEnum

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xckpt.core.values import decode_content, decode_value, encode_value, value_kind
from xckpt.errors import CorruptCheckpointError, ManifestError, UnsupportedLeafError

KINDS = ("None", "bool", "int", "float", "complex", "str", "bytes")

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
)


def spelled(value: object) -> str:
    """A value and its type; unlike ==, this tells 0.0 from -0.0 and lets NaN equal itself."""
    return f"{type(value).__name__} {value!r}"


@given(values)
@example(float("nan"))
@example(-0.0)
@example(-math.inf)
@example(sys.float_info.min * sys.float_info.epsilon)
@example(complex(-0.0, float("nan")))
@example(complex(0.0, -0.0))
@example(10**5000)
@example(-(2**64))
@example("\ud800 \udfff \U0010ffff \x00")
@example("\\ud800 \\\\ \\")
@example(b"\x00\xff")
@example(False)
def test_decode_inverts_encode(value):
    kind = value_kind(value)
    assert kind is not None and kind == type(value).__name__.removesuffix("Type")
    text = encode_value(value)
    # A manifest is UTF-8: the text has to be, whatever the value holds.
    assert text.encode().decode() == text
    back = decode_value(kind, text)
    assert back == value if isinstance(value, int) else spelled(back) == spelled(value)
    assert type(back) is type(value)


@given(st.sampled_from([*KINDS, "opaque", "set", ""]), st.text(max_size=12))
@example("complex", "1,2,3")
@example("complex", "")
@example("bytes", "é")
@example("bool", "true")
@example("str", "\\q")
@example("str", "\\")
def test_any_text_is_a_value_or_refused(kind, text):
    with contextlib.suppress(ManifestError):
        assert value_kind(decode_value(kind, text)) == kind


@pytest.mark.parametrize(
    "kind, text",
    [
        ("None", "None"), ("bool", "1"), ("int", "7"), ("int", " 0x7"), ("int", "0x_7"),
        ("int", "0X7"), ("int", "0x"), ("float", "1_0.0"), ("float", " 1.0"), ("float", "1."),
        ("float", "infinity"), ("float", "0x1p3"), ("complex", "1.0, 2.0"), ("complex", "1.0"),
        ("bytes", "aGk"), ("bytes", "a Gk="), ("str", "\\U0001f600"), ("str", "\\u00E9"),
    ],
)  # fmt: skip
def test_what_python_would_take_but_no_encoder_writes_is_refused(kind, text):
    with pytest.raises(ManifestError):
        decode_value(kind, text)


class Level(IntEnum):
    LOW = 1


class Tag(str):
    __slots__ = ()


@pytest.mark.parametrize("leaf", [Level.LOW, Tag("a"), {1}, object(), bytearray(b"a"), range(3)])
def test_other_objects_are_no_values(leaf):
    assert value_kind(leaf) is None
    with pytest.raises(UnsupportedLeafError, match=type(leaf).__name__):
        encode_value(leaf)


@pytest.mark.parametrize(
    "kind, content", [("a str", b"\xbc"), ("a str", b"\xed\xa0\x80"), ("an int", b"7")]
)
def test_stored_content_that_is_no_value_is_refused_by_name(kind, content):
    with pytest.raises(CorruptCheckpointError, match=f"a/b: its . bytes are not {kind} value"):
        decode_content("a/b", kind.split()[1], content)
    assert decode_content("a/b", "opaque", content) == content
