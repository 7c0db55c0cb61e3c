"""What a cast may do to numbers, held against Python's own; and the error of one that may not."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.states import SIGNALLING, signalling_nans
from xckpt.convert import convert
from xckpt.core.dtypes import DTYPES
from xckpt.core.targets.casting import (
    CastingCopies,
    Spoiled,
    castable,
    is_exact_cast,
    spoiled_elements,
)
from xckpt.errors import MappingError, TreeMismatchError
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.operations import Cast, Scale
from xckpt.mapping.rule import Rule

REAL = [name for name in DTYPES if not name.startswith("complex")]
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(width=32) | st.sampled_from([1e6, -7.0, 6.9])


@st.composite
def casts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Elements of one type and what became of them."""
    before, after = draw(st.sampled_from(REAL)), draw(st.sampled_from(REAL))
    numbers = draw(st.lists(NUMBERS, min_size=1, max_size=8))
    with np.errstate(all="ignore"):
        wide = [np.asarray(number).astype(np.float32) for number in numbers]
        values = np.array(wide).astype(DTYPES[before])
        if np.dtype(DTYPES[before]).kind in "iu":
            values = np.array([int(n) if math.isfinite(n) else 0 for n in numbers], object)
            info = np.iinfo(before)
            values = np.clip(values, info.min, info.max).astype(DTYPES[before])
        return values, castable(values, DTYPES[after]).astype(DTYPES[after])


@given(casts())
def test_python_finds_the_same_elements(cast: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = cast
    found = spoiled_elements(before, after)
    name = after.dtype.name
    for index, (old, new) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        if name == "float4_e2m1fn":
            wanted = not abs(old) < 7  # 6 is the largest; NaN has no word
        elif "float" in name:
            wanted = not math.isfinite(new) and repr(old) not in (repr(new), "nan")
        else:
            wanted = not math.isfinite(old) or math.trunc(old) != new
        assert (found is not None and bool(found[index])) == wanted, (old, new, before.dtype, name)


def test_an_imaginary_part_has_no_place_among_real_numbers() -> None:
    values = np.array([1, 2 + 1j, 3 - 0j], "complex64")
    found = spoiled_elements(values, np.real(values))
    assert found is not None and found.tolist() == [False, True, False]
    assert spoiled_elements(values[::2], np.real(values[::2])) is None


@given(casts())
def test_an_exact_cast_spoils_nothing_but_nan(cast: tuple[np.ndarray, np.ndarray]) -> None:
    before, after = cast
    if is_exact_cast(before.dtype.name, after.dtype.name):
        found = spoiled_elements(before, after)
        assert found is None or not np.isfinite(before[found]).any()


@pytest.mark.parametrize("after", ["float16", "float64", "int8"])
@pytest.mark.parametrize("before", SIGNALLING)
def test_a_signalling_nan_is_a_nan_and_no_warning(before: str, after: str) -> None:
    values = np.append(signalling_nans(before), np.array([1], DTYPES[before]))
    with np.errstate(all="ignore"):
        cast = values.astype(DTYPES[after])
    found = spoiled_elements(values, cast)
    nans = [True] * (len(values) - 1) + [False]
    assert (None if found is None else found.tolist()) == (nans if after == "int8" else None)


@pytest.mark.parametrize("before", REAL)
def test_every_type_is_cast_to_every_other(before: str) -> None:
    values = np.ones((2, 3), DTYPES[before])  # 1 is a value of all of them
    for after in DTYPES:
        target, copies = np.zeros((2, 3), DTYPES[after]), CastingCopies()
        copies.copy("w", target, values, (0, 0))
        copies.check()
        assert (target == np.ones((), DTYPES[after])).all(), (before, after)


@given(st.lists(st.integers(-300, 300), min_size=1, max_size=12), st.integers(1, 12))
def test_parts_are_counted_as_the_whole(numbers: list[int], cut: int) -> None:
    values = np.array(numbers)
    copies = CastingCopies()
    for low in range(0, len(values), cut):
        part = values[low : low + cut]
        copies.copy("w", np.zeros(len(part), np.int8), part, (low,))
    with np.errstate(all="ignore"):
        whole = Spoiled.of(values, values.astype(np.int8))
    if whole is None:
        copies.check()
    else:
        with pytest.raises(TreeMismatchError) as caught:
            copies.check()
        assert f"w: {whole}; load it as it was saved" in str(caught.value)


def test_a_load_refuses_what_overflows(tmp_path: Path) -> None:
    weights = np.ones((3, 70_000), np.float32)
    weights[1, 5] = weights[2, 69_999] = 1e6
    xckpt.save(tmp_path / "a", {"w": weights, "n": np.array([1, 300]), "fine": np.array([1e-9])})
    like = {"w": np.zeros((3, 70_000), "f2"), "n": np.zeros(2, "u1"), "fine": np.zeros(1, "f2")}
    for call in (xckpt.load, xckpt.load_into):
        with pytest.raises(TreeMismatchError) as caught:
            call(tmp_path / "a", like, cast=True)
        assert "w: 2 elements do not fit into float16, the first at (1, 5): 1000000.0" in str(
            caught.value
        )
        assert "n: 1 element does not fit into uint8, the first at (1,): 300" in str(caught.value)
        assert {problem.leaf for problem in caught.value.problems} == {"w", "n"}


def test_a_load_casts_between_types_for_which_no_library_has_a_cast(tmp_path: Path) -> None:
    saved = {"scale": np.array([0.5, 4], "float8_e8m0fnu"), "w": np.array([1, -2, 7], "int4")}
    xckpt.save(tmp_path / "a", saved)
    like = {"scale": np.zeros(2, "float8_e4m3fn"), "w": np.zeros(3, "int2")}
    with pytest.raises(
        TreeMismatchError, match=r"w: 1 element does not fit into int2, .* \(2,\): 7"
    ):
        xckpt.load(tmp_path / "a", like, cast=True)
    scale = xckpt.load(tmp_path / "a", like["scale"], at="scale", cast=True)
    assert scale.dtype == like["scale"].dtype and scale.astype("f4").tolist() == [0.5, 4]


def test_a_load_of_another_format_refuses_it_too(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.array([0.0, -3e38], "f4")}, tmp_path / "m.safetensors")
    with pytest.raises(TreeMismatchError, match=r"int32, the first at \(1,\): -3"):
        xckpt.load(tmp_path / "m.safetensors", {"w": np.zeros(2, "i4")}, cast=True)


@pytest.mark.parametrize(
    "operation, dtype",
    [(Cast(("float32", "float16")), "float16"), (Scale(1e35), "float32")],
    ids=["cast", "scale"],
)
def test_a_mapping_refuses_it(tmp_path: Path, operation: Cast | Scale, dtype: str) -> None:
    values = np.ones((2, 3), np.float32)
    values[1, 2] = 1e6
    xckpt.save(tmp_path / "a", {"w": values})
    mapping = LeafMapping([Rule("w", "v", [operation])])
    words = rf"'v': by a \w+ 1 element does not fit into {dtype}, the first at \(1, 2\): 1000000.0"
    with pytest.raises(MappingError, match=words):
        xckpt.load(
            tmp_path / "a", {"v": np.zeros((2, 3), dtype)}, mapping=mapping, allow_lossy=True
        )
    with pytest.raises(MappingError, match=words):
        convert(tmp_path / "a", tmp_path / "b", mapping=mapping, allow_lossy=True)
    assert not (tmp_path / "b").exists()


def test_a_conversion_to_a_smaller_dtype_refuses_it(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.array([1.0, 1e6], "f4")})
    with pytest.raises(MappingError, match=r"'w': by a cast 1 element does not fit into float16"):
        convert(tmp_path / "a", tmp_path / "b", dtype="float16")
