"""What a manager writes into a checkpoint's metadata comes back as the record."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.json_values import check_json
from xckpt.core.run.record import StepRecord, read_record, run_metadata, tensor_bytes

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(
    st.integers(0, 10**9),
    st.floats(0, 1e11, allow_nan=False),
    st.dictionaries(texts, st.floats(), max_size=3),
    st.none() | st.integers(0, 10**9),
)
def test_a_record_comes_back(
    number: int, time: float, metrics: dict[str, float], base: int | None
) -> None:
    record = StepRecord(number, time, metrics, 7, base=base)
    written = run_metadata(record)
    check_json(written, "metadata")
    again = read_record(number, record.name, json.dumps(written).encode(), 7)
    # NaN differs from itself.
    assert repr(again) == repr(record)


@pytest.mark.parametrize(
    "user",
    [
        *(None, 3, [], {}, {"run": None}, {"run": "a"}, {"run": {"step": 3}}),
        {"run": {"step": 3, "time": "now"}},
        {"run": {"step": 3, "time": 1.0, "metrics": {"loss": "low"}}},
        {"run": {"step": 3, "time": 1.0, "other": 1}},
        {"run": {"step": 3, "time": 1.0, "base": -1}},
    ],
)
def test_other_metadata_are_no_record(user: Any) -> None:
    assert read_record(3, "3", json.dumps(user).encode(), 9) == StepRecord(3, None, {}, 9, "3")


@pytest.mark.parametrize(
    "user",
    [
        b'{"run":{"step":3,"time":1e999}}',
        b'{"run":{"step":3,"time":1.0},"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"run":{"step":' + b"9" * 10_000 + b',"time":1.0}}',
        b"{",
    ],
)
def test_absurd_metadata_are_no_record(user: bytes) -> None:
    assert read_record(3, "3", user, 9) == StepRecord(3, None, {}, 9, "3")


def test_bytes_of_tensors() -> None:
    assert tensor_bytes([("bfloat16", (3, 2)), ("int4", ()), ("unheard of", (5,))]) == 13


def test_the_number_of_a_step_is_an_int_of_any_library() -> None:
    record = StepRecord(cast(Any, np.int64(5)))
    assert type(record.number) is int and record == StepRecord(5)
    for number in (1.5, None, "1", True):
        with pytest.raises(TypeError, match=r"StepRecord\(number=\) takes an int, not the "):
            StepRecord(cast(Any, number))
