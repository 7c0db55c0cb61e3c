"""Pickles written from descriptions: Python's own unpickler and ours read what was meant."""

from __future__ import annotations

import datetime
import io
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from xckpt.formats.torch_save.pickle_machine import Record, Symbol, load
from xckpt.formats.torch_save.pickle_writer import call, dump, instance, outside
from xckpt.formats.torch_save.values import NAMES

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=30,
)


def typed(value: Any) -> Any:
    """A value that tells True from 1 and -0.0 from 0.0."""
    if isinstance(value, dict):
        return [(typed(key), typed(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(part) for part in value]
    return type(value), repr(value)


@given(VALUES)
@examples(50, 1000)
def test_plain_values(value: object) -> None:
    pickled = dump(value)
    assert typed(pickle.loads(pickled)) == typed(value)
    assert typed(load(pickled, NAMES)) == typed(value)


@pytest.mark.parametrize(
    "number",
    [sign * (1 << bits) + more for bits in (7, 8, 15, 16, 31, 32, 63, 2031, 2032, 2040, 9999)
     for sign in (1, -1) for more in (-1, 0, 1)],
)  # fmt: skip
def test_ints_where_they_take_a_byte_more(number: int) -> None:
    assert pickle.loads(dump(number)) == load(dump(number), {}) == number


def test_numbers_that_are_none() -> None:
    nan, inf = pickle.loads(dump([math.nan, -math.inf]))
    assert math.isnan(nan) and inf == -math.inf


def test_the_memo_of_many_strings() -> None:
    """Numbers of one byte and of four."""
    words = [str(number) for number in range(600)] * 2
    pickled = dump(words)
    assert pickle.loads(pickled) == load(pickled, {}) == words
    assert len(pickled) < 600 * 15 + 600 * 6


def test_descriptions() -> None:
    value = {"when": call("datetime.date", (2024, 2, 29)), "kind": Symbol("datetime.date")}
    assert pickle.loads(dump(value)) == {"when": datetime.date(2024, 2, 29), "kind": datetime.date}
    record: Any = load(dump(instance("module.Class", {"a": 1})), {"module.Class": Record})
    assert (record.name, record.arguments, record.state) == ("module.Class", (), {"a": 1})

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return "outside", pid

    assert Unpickler(io.BytesIO(dump(outside(("a", 1))))).load() == ("outside", ("a", 1))


def test_what_is_no_plain_value() -> None:
    with pytest.raises(TypeError, match="a set is not a plain value"):
        dump([{1}])
    assert pickle.loads(dump([{2, 1}], sorted)) == [[1, 2]]  # type: ignore[arg-type]
