"""A Python number and a 0-d array are one leaf to a load, and no value changes unasked."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import xckpt
from tests.support.jobs import fresh_path
from xckpt.core.dtypes import DTYPES
from xckpt.core.targets.numbers import as_element, as_number, number_difference, number_kind
from xckpt.errors import TreeMismatchError

DTYPE_NAMES = st.sampled_from(sorted(DTYPES))
NUMBERS = st.booleans() | st.integers() | st.floats() | st.complex_numbers()


@given(NUMBERS, DTYPE_NAMES)
@example(-(2**63) - 1, "bfloat16")  # NumPy has no integer type for it
@example(2**80, "float8_e4m3fn")
@example(2**80, "int4")
@example(10**400, "bfloat16")
@example(2**80, "float64")
@example(1.5e308 + 1.5e308j, "complex64")  # its absolute value is no float
@example(1.5e308 + 1.5e308j, "complex128")
def test_what_an_array_takes_it_gives_back(value: complex, dtype: str) -> None:
    kind = type(value).__name__
    if number_difference(kind, dtype, cast=True) or number_difference(dtype, kind, cast=True):
        return
    try:
        element = as_element(value, dtype, "x", rounds=False)
    except TreeMismatchError:
        return
    assert element.shape == () and element.dtype == DTYPES[dtype]
    back = as_number(element, dtype, kind, "x")
    assert type(back) is type(value)
    assert back == value or (back != back and value != value)


@given(st.integers(), DTYPE_NAMES.filter(lambda name: number_kind(name) == "int"))
def test_an_int_is_taken_by_the_dtypes_that_hold_it(value: int, dtype: str) -> None:
    info = ml_dtypes.iinfo(DTYPES[dtype])
    if int(info.min) <= value <= int(info.max):
        assert int(as_element(value, dtype, "x", rounds=False)) == value
    else:
        with pytest.raises(TreeMismatchError, match="cannot hold"):
            as_element(value, dtype, "x", rounds=True)


@given(st.floats(allow_nan=False), DTYPE_NAMES.filter(lambda name: number_kind(name) == "float"))
def test_a_rounded_float_stays_finite_and_does_not_vanish(value: float, dtype: str) -> None:
    try:
        element = float(as_element(value, dtype, "x", rounds=True))
    except TreeMismatchError:
        return
    assert math.isfinite(element) == math.isfinite(value)
    assert (element == 0) == (value == 0)


MISFITS = [
    (np.float32(3), 0, False, "a 0-d float32 array in the checkpoint, a Python int wanted (cast"),
    (1.0, np.int32(0), False, "a Python float in the checkpoint, a 0-d int32 array wanted (cast"),
    (2**24 + 1, np.float32(0), True, "holds 16777217, which float32 cannot hold"),
    (np.bool_(True), 0, False, "a bool in the checkpoint, a Python int wanted (cast=True"),
    (np.complex64(1), 0.0, True, "a 0-d complex64 array in the checkpoint, a Python float wanted"),
    (np.float32(3.5), 0, True, "holds 3.5, which a Python int cannot hold"),
    (np.float32(np.nan), 0, True, "holds nan, which a Python int cannot hold"),
    (np.int64(2**63 - 1), 0.0, True, "holds 9223372036854775807, which a Python float cannot hold"),
    (300, np.int8(0), False, "holds 300, which int8 cannot hold"),
    (2**70, np.int64(0), True, "which int64 cannot hold"),
    (0.1, np.float32(0), False, "holds 0.1, which float32 cannot hold exactly; cast=True rounds"),
    (1e300, np.float32(0), True, "holds 1e+300, which float32 cannot hold"),
    (1e-300, np.float32(0), True, "holds 1e-300, which float32 cannot hold"),
    ("a", np.float32(0), True, "the checkpoint holds a Python str, not a tensor"),
    (np.zeros(1), 0.0, True, "holds a float64 tensor of shape (1,), not a Python value"),
]


@pytest.mark.parametrize(("saved", "like", "cast", "message"), MISFITS)
def test_a_value_that_would_change_is_refused(
    saved: object, like: object, cast: bool, message: str
) -> None:
    path = fresh_path()
    xckpt.save(path, {"x": saved})
    with pytest.raises(TreeMismatchError, match="x: .*" + re.escape(message)) as caught:
        xckpt.load(path, {"x": like}, cast=cast)
    assert len(caught.value.problems) == 1


FITS = [
    (np.int32(5), 0, False, 5),
    (np.float32(0.5), 0.0, False, 0.5),
    (ml_dtypes.bfloat16(1.5), 0.0, False, 1.5),
    (np.bool_(True), False, False, True),
    (np.complex64(1j), 0j, False, 1j),
    (np.float32(3), 0, True, 3),
    (np.int8(3), 0.0, True, 3.0),
    (np.int8(1), False, True, True),
    (5, np.int32(0), False, np.int32(5)),
    (0.25, np.float16(0), False, np.float16(0.25)),
    (0.1, np.float32(0), True, np.float32(0.1)),
    (True, np.bool_(False), False, np.bool_(True)),
    (7, np.float32(0), False, np.float32(7)),
]


@pytest.mark.parametrize(("saved", "like", "cast", "loaded"), FITS)
def test_numbers_and_arrays_are_exchanged(
    saved: object, like: object, cast: bool, loaded: object
) -> None:
    path = fresh_path()
    xckpt.save(path, {"x": saved})
    result: Any = xckpt.load(path, {"x": like}, cast=cast)["x"]
    assert result == loaded
    if isinstance(like, np.generic):
        assert result.dtype == like.dtype and result.shape == ()
    else:
        assert type(result) is type(like)


def test_they_are_exchanged_in_place() -> None:
    path = fresh_path()
    xckpt.save(path, {"step": 7, "rates": [np.float64(0.1), 0.2]})
    step, rate = np.zeros((), np.int32), np.zeros(())
    state = {"step": step, "rates": [0.0, rate]}
    xckpt.load_into(path, state)
    assert state["step"] is step and step == 7
    assert state["rates"] == [0.1, rate] and rate == 0.2
