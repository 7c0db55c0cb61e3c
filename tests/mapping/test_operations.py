"""Operations: arguments that cannot be, inputs that do not fit, and which casts are exact."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.core.targets.casting import is_exact_cast
from xckpt.errors import MappingError
from xckpt.mapping import operations
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.operations import (
    Add,
    Cast,
    Concatenate,
    Constant,
    Deinterleave,
    Drop,
    Each,
    GroupedDeinterleave,
    GroupedInterleave,
    Interleave,
    Operation,
    Pad,
    Rearrange,
    Reshape,
    Rope,
    Scale,
    Split,
    Stack,
    Strip,
    Tie,
    Transpose,
    Unstack,
    Untie,
)
from xckpt.mapping.operations.base import TensorOperation, operation_from_document, run
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import Arithmetic
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Slot, constant, leaf

ONE_OF_EACH = [
    Add(1.0),
    Cast(("float32", "bfloat16")),
    Concatenate((1, 2), 1),
    Constant(0, (2,), "int8"),
    Deinterleave(2),
    Drop("unchecked"),
    Each(((Transpose((1, 0)),), (Split((1, 2)),))),
    GroupedDeinterleave((2, 1), 3),
    GroupedInterleave((2, 1), 3),
    Interleave(2),
    Pad(3),
    Rearrange("(a b) c -> c (b a)", {"a": 2, "b": 3}),
    Reshape(((6, -1), (2, 3, -1))),
    Rope("halves", 4),
    Scale(2.0),
    Split((1, 2), 1),
    Stack("layer"),
    Strip(3),
    Tie(2),
    Transpose((1, 2, 0)),
    Unstack("layer"),
    Untie(2),
]


def test_every_operation_is_tried() -> None:
    kinds = {kind for kind in vars(operations).values() if isinstance(kind, type)}
    named = {kind for kind in kinds if issubclass(kind, Operation) and kind is not Operation}
    assert {type(each) for each in ONE_OF_EACH} == named


@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=lambda each: each.name)
def test_an_argument_of_another_type_is_refused_by_its_name(operation: Operation) -> None:
    for field in fields(operation):
        call = re.escape(f"{type(operation).__name__}({field.name}=) takes ")
        for wrong in (object(), b"a"):
            with pytest.raises(TypeError, match=f"^{call}.*, not the {type(wrong).__name__}"):
                replace(operation, **{field.name: wrong})


def test_an_argument_may_be_a_list_and_have_numbers_of_numpy() -> None:
    sizes: Any = [np.int64(1), 2]
    assert str(Split(sizes, axis=cast(int, np.int8(1)))) == "split [1, 2], axis 1"
    assert Rope("halves", 4) == Rope("halves", cast(int, np.int64(4)))
    wrong: Any = "sideways"
    with pytest.raises(MappingError, match=r"^Rope\(to=\) takes Literal.*not the str 'sideways'"):
        Rope(wrong, 4)


@pytest.mark.parametrize("operation", ONE_OF_EACH, ids=lambda each: each.name)
def test_every_operation_is_its_inverses_inverse_and_its_own_document(operation: Operation) -> None:
    assert operation.inverse() != operation
    assert operation.inverse().inverse() == operation
    assert operation_from_document(operation.to_document()) == operation
    assert hash(operation) == hash(operation.inverse().inverse())
    assert operation.exactness == operation.inverse().exactness or isinstance(operation, Cast)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Transpose((0, 2)), "not an order of 2 axes"),
        (lambda: Reshape(((-1, -1), (4,))), "at most one size left open"),
        (lambda: Reshape(((2, -2), (4,))), "at most one size left open"),
        (lambda: Reshape(((2, 3), (4,))), "differ in their number of elements"),
        (lambda: Rearrange("a a -> a"), "a is twice on one side"),
        (lambda: Rearrange("a -> a b"), "b is on one side only"),
        (lambda: Rearrange("a -> a", {"b": 1}), "a size is stated for b"),
        (lambda: Rearrange("a -> a", {"a": 0}), "sizes are at least 1"),
        (lambda: Rearrange("a b"), "before -> after"),
        (lambda: Rearrange("a -> a -> a"), "before -> after"),
        (lambda: Rearrange("(a -> a"), "is not a list of names"),
        (lambda: Rearrange("a, b -> b a"), "is not a list of names"),
        (lambda: Rope("pairs", 0), "0 heads"),
        (lambda: Rope("pairs", 1, rotary=3), "not pairs"),
        (lambda: Split(()), "not sizes of parts"),
        (lambda: Split((3, -1)), "not sizes of parts"),
        (lambda: GroupedInterleave((-1,), 2), "not sizes of parts"),
        (lambda: GroupedInterleave((1,), 0), "no 0 groups"),
        (lambda: GroupedDeinterleave((1,), 0), "no 0 groups"),
        (lambda: Interleave(0), "no 0 parts"),
        (lambda: Deinterleave(-1), "no -1 parts"),
        (lambda: Tie(0), "no tensor has 0 names"),
        (lambda: Untie(0), "no tensor has 0 names"),
        (lambda: Pad(-1), "a pad has no size -1"),
        (lambda: Strip(-1), "a pad has no size -1"),
        (lambda: Cast(("float32", "float33")), "no dtype is called 'float33'"),
        (lambda: Scale(0.0), "cannot be undone"),
        (lambda: Scale(float("nan")), "cannot be undone"),
        (lambda: Add(float("inf")), "cannot be undone"),
        (lambda: Each(((Split((1, 1)), Untie(3)),)), "untie 3 takes 3 tensors, but has 2"),
        (lambda: operation_from_document({"transpose": [0], "axes": [0]}), "stands under"),
    ],
)
def test_arguments_that_can_never_be_right_are_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(MappingError, match=words):
        make()


@pytest.mark.parametrize(
    "operation, shapes, words",
    [
        (Transpose((1, 0)), [(2,)], "it has 1 dimensions, not 2"),
        (Reshape(((2, 3), (6,))), [(3, 2)], r"its shape is \[3, 2\], not \[2, 3\]"),
        (Reshape(((-1,), (4, -1))), [(6,)], r"6 elements do not make \[4, -1\]"),
        (Rearrange("a b -> b a"), [(2,)], "it has 1 dimensions, not 2"),
        (Rearrange("(a b) -> a b", {"a": 4}), [(6,)], r"6 is not \(a b\) with a = 4"),
        (Rope("pairs", 4), [(6,)], "6 channels are not 4 heads"),
        (Rope("pairs", 2), [(6,)], "with 3 rotated channels"),
        (Rope("pairs", 2, axis=1), [(6,)], "there is no axis 1 of 1"),
        (Deinterleave(4), [(6,)], "axis 0 has size 6, not 4 equal parts"),
        (Interleave(2), [(6,), (4,)], r"part 1 has shape \[4\], not 6 groups of 1"),
        (GroupedInterleave((2, 1), 3), [(6,), (4,)], r"shape \[4\], not 3 groups of 1"),
        (GroupedDeinterleave((2, 1), 3), [(6,)], "has size 6, not 3 groups of 3"),
        (Concatenate((1, 2), 4), [(1,), (2,)], "there is no axis 4 of 1"),
        (Split((1, 2), -2), [(3,)], "there is no axis -2 of 1"),
        (Strip(4), [(3,)], "axis 0 has size 3, less than a pad of 4"),
        (Stack("i"), [(3,)], "no tensors for each 'i'"),
        (Pad(1, value=300), [(3,)], "300 is not a number of int8"),
        (Drop(1.5), [(3,)], "1.5 is not a number of int8"),
        (Drop(0, arange=0), [(129,)], "128 is not a number of int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    operation: Operation, shapes: list[tuple[int, ...]], words: str
) -> None:
    bundle = tuple(Slot.of(leaf(str(i), TensorSpec(s, "int8"))) for i, s in enumerate(shapes))
    with pytest.raises(MappingError, match=words):
        run([operation], bundle, Trace())


@given(
    dtype=st.sampled_from(("float16", "bfloat16", "float8_e4m3fn", "float32", "int16")),
    first=st.integers(-3000, 3000),
    size=st.integers(2, 3000),
)
def test_a_type_that_rounds_a_number_cannot_count_to_it(dtype: str, first: int, size: int) -> None:
    """Or positions beyond 2,048 in float16 would come in pairs."""
    wanted = np.arange(first, first + size, dtype=np.float32)
    with np.errstate(all="ignore"):
        exact = np.array_equal(wanted.astype(numpy_dtype(dtype)).astype(np.float32), wanted)
    with nullcontext() if exact else pytest.raises(ValueError, match=dtype):
        constant(TensorSpec((size,), dtype), first, arange=0)


def test_parts_of_different_types_are_not_joined() -> None:
    types = enumerate(("int8", "uint8"))
    bundle = tuple(Slot.of(leaf(str(i), TensorSpec((2,), dtype))) for i, dtype in types)
    with pytest.raises(MappingError, match="part 1 is uint8, but the first is int8"):
        run([Concatenate((2, 2))], bundle, Trace())


def test_an_operation_that_forgets_what_it_must_say_is_refused_where_its_class_is_made() -> None:
    with pytest.raises(TypeError, match="'forgetful' does not say: inverse, on"):

        class Forgetful(TensorOperation, frozen=True):
            name = "forgetful"

    with pytest.raises(MappingError, match="no operation"):
        operation_from_document({"forgetful": []})


def all_values(dtype: str) -> np.ndarray:
    """Every value of a type of at most 16 bits, NaN apart."""
    kind = numpy_dtype(dtype)
    few = {"bool": 2, "int2": 4, "int4": 16, "float4_e2m1fn": 16}.get(dtype)
    bits = np.arange(few or 1 << (8 * kind.itemsize), dtype=f"u{kind.itemsize}")
    values = bits.view(kind)
    return values[~np.isnan(values.astype(np.float32))]


SMALL = [dtype for dtype, kind in DTYPES.items() if kind.itemsize <= 2]


@pytest.mark.parametrize("before", SMALL)
def test_a_cast_is_exact_where_every_value_survives_it(before: str) -> None:
    values = all_values(before)
    for after in DTYPES:
        there = Arithmetic("cast", before, after)
        made = there(values)
        survives = there.inverse()(made).tobytes() == values.tobytes()
        # A negative number may come back from an unsigned one, but is not a value of it.
        equal = (made.astype(np.complex128) == values.astype(np.complex128)).all()
        assert is_exact_cast(before, after) == (survives and equal), after


def test_wide_casts_are_exact_where_digits_and_range_suffice() -> None:
    exact = {
        (before, after)
        for before in ("int32", "int64", "uint32", "float32", "float64", "complex64", "complex128")
        for after in DTYPES
        if is_exact_cast(before, after)
    }
    assert exact == {
        *((same, same) for same in ("int32", "int64", "uint32", "float32", "float64")),
        *((same, same) for same in ("complex64", "complex128")),
        *((before, after) for before in ("int32", "uint32") for after in ("int64", "float64")),
        *((before, "complex128") for before in ("int32", "uint32", "float64", "complex64")),
        ("uint32", "uint64"),
        ("float32", "float64"),
        ("float32", "complex64"),
        ("float32", "complex128"),
    }


def test_heads_of_one_attention_have_one_size() -> None:
    """A number of key-value heads that divides the rows, but is not theirs, gives other weights."""
    source = {
        f"layers.{layer}.self_attn.{name}.weight": TensorSpec((rows, 8), "float32")
        for layer in range(2)
        for name, rows in [("q_proj", 32), ("k_proj", 16)]
    }

    def rotated(kv_heads: int) -> LeafMapping:
        heads = {"q_proj": 4, "k_proj": kv_heads}
        name = "layers.{layer}.self_attn.%s.weight"
        return LeafMapping(
            [Rule(name % each, name % each, [Rope("pairs", n)]) for each, n in heads.items()]
        )

    assert len(rotated(2).resolve(source).targets) == 4
    with pytest.raises(MappingError) as caught:
        rotated(4).resolve(source)
    assert len(caught.value.problems) == 2
    assert "8 of 'layers.0.self_attn.q_proj.weight' and 4 of" in str(caught.value)
    partly = LeafMapping([Rule("{n...}.weight", "{n...}.weight", [Rope("pairs", 2, rotary=4)])])
    assert len(partly.resolve(source).targets) == 4
