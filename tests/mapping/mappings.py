"""Random mappings with what they make: operations drawn one by one, NumPy as their oracle.

A `Case` holds a mapping, source arrays, and the target arrays that NumPy's reshape, transpose,
concatenate, stack and slicing give for the same operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from xckpt.convert import Mapping
from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.mapping.copy_elements import copy_elements
from xckpt.mapping.operations import (
    Concatenate,
    Deinterleave,
    Each,
    GroupedDeinterleave,
    GroupedInterleave,
    Interleave,
    Operation,
    Pad,
    Rearrange,
    Reshape,
    Rope,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
MOST_ELEMENTS = 400

# Types whose bytes are not all values of theirs: NumPy may normalise them.
FEW_BITS = {"bool": 2, "int2": 4, "int4": 16, "float4_e2m1fn": 16}


@dataclass
class Case:
    """A mapping and both sides of it."""

    mapping: Mapping
    source: Arrays
    target: Arrays

    @property
    def source_specs(self) -> dict[str, TensorSpec]:
        return specs_of(self.source)

    @property
    def target_specs(self) -> dict[str, TensorSpec]:
        return specs_of(self.target)


def specs_of(arrays: Arrays) -> dict[str, TensorSpec]:
    return {name: TensorSpec(a.shape, a.dtype.name) for name, a in arrays.items()}


def execute(copies: tuple[StridedCopy, ...], source: Arrays, target: Array, origin: Any) -> None:
    """Carry out copies into a box of a leaf that begins at an origin."""
    for copy in copies:
        read = None if copy.is_constant else source[copy.source]
        copy_elements(copy, read, target, target_origin=origin)


def made_by(mapping: Mapping, source: Arrays, wanted: dict[str, TensorSpec]) -> Arrays:
    """All target leaves, every byte of which begins as something else."""
    resolved = mapping.resolve(specs_of(source), wanted)
    made: Arrays = {}
    for name, spec in resolved.targets.items():
        made[name] = np.empty(spec.shape, numpy_dtype(spec.dtype))
        made[name].reshape(-1).view(np.uint8)[...] = 0xA5
        execute(resolved.copies[name], source, made[name], None)
    return made


def same_bits(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


def random_bits(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Any bits that an element type can hold: NaN payloads, infinities and subnormals too."""
    kind = numpy_dtype(dtype)
    count = math.prod(shape) * kind.itemsize
    bits = random.integers(0, FEW_BITS.get(dtype, 256), count, dtype=np.uint8)
    return bits.view(kind).reshape(shape)


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@dataclass
class Bundle:
    """What operations are drawn on: slots of arrays by index, and the operations so far."""

    draw: Any
    slots: list[dict[tuple[int, ...], Array]]
    unstacked: str = ""
    operations: list[Operation] = field(default_factory=list)

    def add(self, operation: Operation, function: Callable[[Array], Array]) -> None:
        """An operation on every array, and its oracle."""
        self.operations.append(operation)
        self.slots = [{key: function(a) for key, a in slot.items()} for slot in self.slots]

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.slots[0].values())).shape

    @property
    def same_shape(self) -> bool:
        return len({a.shape for slot in self.slots for a in slot.values()}) == 1


def transpose(b: Bundle) -> None:
    if len({len(a.shape) for slot in b.slots for a in slot.values()}) == 1:
        axes = tuple(b.draw(st.permutations(range(len(b.shape)))))
        b.add(Transpose(axes), lambda a: a.transpose(axes))


def factors(draw: Any, size: int) -> list[int]:
    """A number as a product of up to three."""
    if size == 0:
        return [0]
    found: list[int] = []
    for _ in range(draw(st.integers(0, 2))):
        divisor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        found.append(divisor)
        size //= divisor
    return [*found, size]


def reshape(b: Bundle) -> None:
    if b.same_shape:
        after = tuple(factors(b.draw, math.prod(b.shape)))
        b.add(Reshape((b.shape, after)), lambda a: a.reshape(after))


def rearrange(b: Bundle) -> None:
    if not b.same_shape:
        return
    groups = [factors(b.draw, size) for size in b.shape]
    names = iter("abcdefghijklmnopqrst")
    named = [[(next(names), size) for size in group] for group in groups]
    flat = [pair for group in named for pair in group]
    order = b.draw(st.permutations(flat))
    cuts = sorted(b.draw(st.sets(st.integers(0, len(order)), max_size=3)))
    after = [order[i:j] for i, j in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    expression = " -> ".join(
        " ".join(f"({' '.join(name for name, _ in group)})" for group in side)
        for side in (named, after)
    )
    sizes = {name: size for name, size in flat if size}
    final = tuple(math.prod(size for _, size in group) for group in after)
    b.add(
        Rearrange(expression, sizes),
        lambda a: (
            a.reshape([size for _, size in flat])
            .transpose([flat.index(pair) for pair in order])
            .reshape(final)
        ),
    )


def chosen_axis(b: Bundle) -> int | None:
    rank = len(b.shape)
    return b.draw(st.integers(0, rank - 1)) if rank else None


def split(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None or len(b.slots) > 1 or not b.same_shape:
        return
    size = b.shape[axis]
    cuts = sorted(b.draw(st.sets(st.integers(0, size), max_size=2)))
    sizes = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True))
    b.operations.append(Split(sizes, axis))
    b.slots = [
        {key: np.take(a, range(stop - n, stop), axis) for key, a in b.slots[0].items()}
        for stop, n in zip([*cuts, size], sizes, strict=True)
    ]


def concatenate(b: Bundle) -> None:
    axis = chosen_axis(b)
    shapes = [next(iter(slot.values())).shape for slot in b.slots]
    if axis is None or any(len(s) != len(shapes[0]) for s in shapes):
        return
    if len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) > 1:
        return
    b.operations.append(Concatenate(tuple(s[axis] for s in shapes), axis))
    b.slots = [{key: np.concatenate([s[key] for s in b.slots], axis=axis) for key in b.slots[0]}]


def interleave(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None or not b.same_shape:
        return
    shape = b.shape
    if len(b.slots) > 1:
        parts = len(b.slots)
        b.operations.append(Interleave(parts, axis))
        final = (*shape[:axis], shape[axis] * parts, *shape[axis + 1 :])
        b.slots = [
            {
                key: np.stack([s[key] for s in b.slots], axis + 1).reshape(final)
                for key in b.slots[0]
            }
        ]
        return
    parts = b.draw(st.sampled_from([n for n in range(1, 5) if shape[axis] % n == 0]))
    b.operations.append(Deinterleave(parts, axis))
    rows = range(shape[axis])
    b.slots = [
        {key: np.take(a, rows[i::parts], axis) for key, a in b.slots[0].items()}
        for i in range(parts)
    ]


def grouped(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None or not b.same_shape:
        return
    shape = b.shape
    if not shape[axis]:
        return
    divisors = [n for n in range(1, shape[axis] + 1) if shape[axis] % n == 0]
    groups = b.draw(st.sampled_from(divisors))
    each = shape[axis] // groups
    if len(b.slots) > 1:
        b.operations.append(GroupedInterleave((each,) * len(b.slots), groups, axis))
        split_shape = (*shape[:axis], groups, each, *shape[axis + 1 :])
        final = (*shape[:axis], shape[axis] * len(b.slots), *shape[axis + 1 :])
        b.slots = [
            {
                key: np.concatenate(
                    [s[key].reshape(split_shape) for s in b.slots], axis + 1
                ).reshape(final)
                for key in b.slots[0]
            }
        ]
        return
    cut = b.draw(st.integers(0, each))
    sizes = (cut, each - cut)
    b.operations.append(GroupedDeinterleave(sizes, groups, axis))
    rows = np.arange(shape[axis]).reshape(groups, each)
    b.slots = [
        {key: np.take(a, part.ravel(), axis) for key, a in b.slots[0].items()}
        for part in (rows[:, :cut], rows[:, cut:])
    ]


def rope(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None or not b.same_shape:
        return
    size = b.shape[axis]
    if not size:
        return
    heads = b.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    channels = size // heads
    if channels < 2:
        return
    rotary = 2 * b.draw(st.integers(1, channels // 2))
    to = b.draw(st.sampled_from(["halves", "pairs"]))
    half = rotary // 2
    pairs = [c for i in range(half) for c in (i, half + i)]
    # Channel i of the result is channel order[i] of the input.
    halves = [*range(0, rotary, 2), *range(1, rotary, 2)]
    order = [*(halves if to == "halves" else pairs), *range(rotary, channels)]
    rows = [head * channels + c for head in range(heads) for c in order]
    b.add(Rope(to, heads, axis, rotary), lambda a: np.take(a, rows, axis))


def pad(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None:
        return
    dtype = next(iter(b.slots[0].values())).dtype
    if any(axis >= len(a.shape) for slot in b.slots for a in slot.values()):
        return
    size = b.draw(st.integers(0, 3))
    value = b.draw(st.sampled_from([0, 1] if dtype != "float8_e8m0fnu" else [1]))  # it lacks 0

    def padded(a: Array) -> Array:
        shape = (*a.shape[:axis], size, *a.shape[axis + 1 :])
        return np.concatenate([a, np.full(shape, value).astype(dtype)], axis=axis)

    b.add(Pad(size, axis, value), padded)


def tie(b: Bundle) -> None:
    if len(b.slots) == 1 and not b.unstacked:
        count = b.draw(st.integers(1, 3))
        b.operations.append(Tie(count))
        b.slots = b.slots * count


def each(b: Bundle) -> None:
    """Other operations for each slot."""
    branches: list[tuple[Operation, ...]] = []
    slots: list[dict[tuple[int, ...], Array]] = []
    for slot in b.slots:
        inner = Bundle(b.draw, [slot], b.unstacked)
        for _ in range(b.draw(st.integers(0, 2))):
            b.draw(st.sampled_from([transpose, rearrange, split, rope, concatenate]))(inner)
        branches.append(tuple(inner.operations))
        slots += inner.slots
    b.operations.append(Each(tuple(branches)))
    b.slots = slots


def unstack(b: Bundle) -> None:
    axis = chosen_axis(b)
    if axis is None or b.unstacked or any(len(slot) > 1 for slot in b.slots):
        return
    if len({s[()].shape[axis : axis + 1] for s in b.slots}) > 1 or not b.shape[axis]:
        return
    b.unstacked = "u"
    b.operations.append(Unstack("u", axis))
    b.slots = [{(i,): np.take(s[()], i, axis) for i in range(s[()].shape[axis])} for s in b.slots]


OPERATIONS = [
    transpose, reshape, rearrange, split, concatenate, interleave, grouped, rope, pad, tie, each,
    unstack,
]  # fmt: skip


@st.composite
def rules(
    draw: st.DrawFn, number: int, dtype: str, random: np.random.Generator
) -> tuple[Rule, Arrays, Arrays]:
    """One rule with its source and target arrays."""
    count = draw(st.integers(1, 3))
    stacked = draw(st.integers(0, 3)) if draw(st.booleans()) else 0
    equal = draw(st.booleans())
    first = draw(shapes)
    slots: list[dict[tuple[int, ...], Array]] = []
    for _ in range(count):
        shape = first if equal else draw(shapes)
        keys = [(i,) for i in range(stacked)] if stacked else [()]
        slots.append({key: random_bits(random, shape, dtype) for key in keys})
    index = "{i}" if stacked else ""
    source = {
        f"s{number}.{k}.{'.'.join(map(str, key))}": a
        for k, slot in enumerate(slots)
        for key, a in slot.items()
    }
    bundle = Bundle(draw, slots)
    stack_at = draw(st.integers(0, 3)) if stacked else -1
    for step in range(draw(st.integers(0, 5))):
        if step == stack_at:
            stack(bundle)
        operation = draw(st.sampled_from(OPERATIONS))
        if operation is unstack and stacked and step < stack_at:
            continue
        operation(bundle)
        if sum(a.size for slot in bundle.slots for a in slot.values()) > MOST_ELEMENTS:
            break
    if stacked and not any(isinstance(o, Stack) for o in bundle.operations):
        stack(bundle)
    out = "{u}" if bundle.unstacked else ""
    target = {
        f"t{number}.{k}.{'.'.join(map(str, key))}": a
        for k, slot in enumerate(bundle.slots)
        for key, a in slot.items()
    }
    rule = Rule(
        [f"s{number}.{k}.{index}" for k in range(count)],
        [f"t{number}.{k}.{out}" for k in range(len(bundle.slots))],
        bundle.operations,
    )
    return rule, source, target


def stack(b: Bundle) -> None:
    """Stack the source's index, if the arrays of a slot have one shape."""
    ranks = {len(a.shape) for slot in b.slots for a in slot.values()}
    axis = b.draw(st.integers(0, min(ranks)))
    b.operations.append(Stack("i", axis))
    b.slots = [
        {key[1:]: np.stack([slot[k] for k in sorted(slot)], axis) for key in [min(slot)]}
        for slot in b.slots
    ]


@st.composite
def cases(draw: st.DrawFn, most_rules: int = 2, dtypes: Iterable[str] = DTYPES) -> Case:
    """A mapping of a few rules, for one element type."""
    dtype = draw(st.sampled_from(sorted(dtypes)))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    found: list[Rule] = []
    source: Arrays = {}
    target: Arrays = {}
    for number in range(draw(st.integers(1, most_rules))):
        rule, read, made = draw(rules(number, dtype, random))
        found.append(rule)
        source |= read
        target |= made
    return Case(Mapping(found), source, target)
