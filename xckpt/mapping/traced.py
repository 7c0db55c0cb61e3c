"""Tensors on their way from source to target, and the bundles of them that operations work on.

A `Traced` tensor has a shape, a dtype, and strided copies that give the source leaf of each of its
elements; the target of those copies is the tensor itself. Every function here makes one traced
tensor from others by rewriting the target side of their copies. The only complicated one is
`reshaped`:

1. Old and new dimensions are cut into the smallest runs of equal product; each run on its own.
2. The old dimensions of a run become one: a flat index is affine in them, so every copy stays one.
3. That dimension is split from the right, by n at a time, into quotient and remainder. Of a copy's
   index ``o + sum(stride * a)``, the axes whose stride n divides belong to the quotient; the others
   to the remainder, if together they stay under n. If not, the longest of them is split: into two
   axes (an outer and one that counts up to n) where its stride divides n, with a head and a tail
   where it begins or ends in between; else piece by piece.

A rule with one source has a bundle of one `Slot`; a rule that takes query, key and value has three.
Where a rule's index is not in its target (layers that will be stacked), a slot holds a tensor for
each value of the index: operations act on each of them, until `Stack` makes them one.
`xckpt.mapping.trace` records what copies cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from xckpt.core.geometry.box import Box
from xckpt.core.targets.casting import counts_to, holds
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import CONSTANT, Arithmetic, Ints, StridedCopy, restrict


@dataclass(frozen=True, slots=True)
class Traced:
    """A tensor whose elements are known by their origin.

    Example:
        >>> tensor = transposed(leaf("w", TensorSpec((2, 3), "int8")), (1, 0))
        >>> tensor.shape, [copy.source for copy in tensor.copies]
        ((3, 2), ['w'])
    """

    shape: Ints
    dtype: str
    copies: tuple[StridedCopy, ...]

    @property
    def spec(self) -> TensorSpec:
        """Shape and element type."""
        return TensorSpec(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a bundle: a tensor for each value of its indices.

    Example:
        >>> w = TensorSpec((2,), "int8")
        >>> layers = Slot(("layer",), {(n,): leaf(f"w{n}", w) for n in range(2)})
        >>> halves = layers.map(lambda each: part(each, 0, 0, 1))
        >>> {key: tensor.shape for key, tensor in halves.tensors.items()}
        {(0,): (1,), (1,): (1,)}
    """

    indices: tuple[str, ...]
    """Indices that are still to be stacked; empty for a slot of one tensor."""
    tensors: dict[tuple[int, ...], Traced]
    """Values of the indices -> tensor; ``{(): tensor}`` where there are none."""

    @classmethod
    def of(cls, tensor: Traced) -> Slot:
        """A slot of one tensor."""
        return cls((), {(): tensor})

    def map(self, function: Callable[[Traced], Traced]) -> Slot:
        """The slot with each of its tensors replaced."""
        return Slot(self.indices, {key: function(t) for key, t in self.tensors.items()})


Bundle = tuple[Slot, ...]


def one_for_each(bundle: Sequence[Slot]) -> Sequence[tuple[tuple[int, ...], tuple[Traced, ...]]]:
    """For each value of the indices the tensors of all slots, which must have the same indices.

    Raises:
        ValueError: the slots have other indices, or other values of them.

    Example:
        >>> spec = TensorSpec((2,), "int8")
        >>> bundle = [Slot.of(leaf(name, spec)) for name in ("query", "key")]
        >>> [(key, len(tensors)) for key, tensors in one_for_each(bundle)]
        [((), 2)]
    """
    first = bundle[0]
    for i, slot in enumerate(bundle):
        if not slot.tensors:
            raise ValueError(f"its input {i} is optional and absent")
        if slot.indices != first.indices or slot.tensors.keys() != first.tensors.keys():
            raise ValueError(
                f"its inputs run over different indices: {first.indices} and {slot.indices}"
            )
    return [(key, tuple(slot.tensors[key] for slot in bundle)) for key in first.tensors]


def _units(rank: int) -> tuple[Ints, ...]:
    return tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))


def leaf(name: str, spec: TensorSpec) -> Traced:
    """A whole leaf, as it is.

    Example:
        >>> leaf("w", TensorSpec((2, 3), "int8")).copies[0].source_strides
        ((1, 0), (0, 1))
    """
    rank = len(spec.shape)
    return _filled(spec, StridedCopy(name, "", spec.shape, (0,) * rank, _units(rank), (), ()))


def constant(spec: TensorSpec, value: float, arange: int | None = None) -> Traced:
    """A tensor of one value; along axis ``arange``, if given, it grows by one a step.

    Raises:
        ValueError: the dtype does not hold all of the values.

    Example:
        >>> [copy.value for copy in constant(TensorSpec((2, 3), "int8"), 7).copies]
        [7]
    """
    last = value if arange is None else value + max(0, spec.shape[arange] - 1)
    for each in (value, last):
        if not holds(spec.dtype, each):
            raise ValueError(f"{each} is not a number of {spec.dtype}")
    if last > value and not (counts_to(spec.dtype, value + 1) and counts_to(spec.dtype, last)):
        raise ValueError(f"{spec.dtype} rounds numbers from {value} to {last}: it cannot count")
    offsets: Ints = () if arange is None else (0,)
    strides = tuple(() if arange is None else (int(d == arange),) for d in range(len(spec.shape)))
    return _filled(
        spec, StridedCopy(CONSTANT, "", spec.shape, offsets, strides, (), (), value=value)
    )


def _filled(spec: TensorSpec, copy: StridedCopy) -> Traced:
    """A tensor whose dimensions are the axes of one copy."""
    rank = len(spec.shape)
    copy = replace(copy, target_offsets=(0,) * rank, target_strides=_units(rank))
    return Traced(spec.shape, spec.dtype, (copy,) if spec.elements else ())


def transposed(tensor: Traced, axes: Sequence[int]) -> Traced:
    """The tensor with its dimensions in another order, as `numpy.transpose` has it.

    Example:
        >>> transposed(leaf("w", TensorSpec((2, 3), "int8")), (1, 0)).shape
        (3, 2)
    """
    copies = tuple(
        copy.with_target(lambda index: tuple(index[d] for d in axes)) for copy in tensor.copies
    )
    return Traced(tuple(tensor.shape[d] for d in axes), tensor.dtype, copies)


def concatenated(tensors: Sequence[Traced], axis: int) -> Traced:
    """Tensors one after the other along an axis; all else about them is equal.

    Example:
        >>> both = concatenated([leaf(n, TensorSpec((2,), "int8")) for n in "ab"], 0)
        >>> both.shape, [(copy.source, copy.target_offsets) for copy in both.copies]
        ((4,), [('a', (0,)), ('b', (2,))])
    """
    copies: list[StridedCopy] = []
    start = 0
    for tensor in tensors:
        copies += _shifted(tensor.copies, axis, start)
        start += tensor.shape[axis]
    first = tensors[0]
    shape = (*first.shape[:axis], start, *first.shape[axis + 1 :])
    return Traced(shape, first.dtype, tuple(copies))


def part(tensor: Traced, axis: int, start: int, stop: int) -> Traced:
    """``tensor[..., start:stop, ...]`` along an axis.

    Example:
        >>> [copy.source_box for copy in part(leaf("w", TensorSpec((9,), "int8")), 0, 4, 6).copies]
        [Box(offsets=(4,), sizes=(2,))]
    """
    sizes = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    offsets = tuple(start if d == axis else 0 for d in range(len(sizes)))
    if prod(sizes) == 0:
        return Traced(sizes, tensor.dtype, ())
    copies = restrict(tensor.copies, Box(offsets, sizes))
    return Traced(sizes, tensor.dtype, tuple(_shifted(copies, axis, -start)))


def computed(tensor: Traced, step: Arithmetic) -> Traced:
    """The tensor after one more step of arithmetic.

    Example:
        >>> cast = Arithmetic("cast", "float32", "float16")
        >>> computed(leaf("w", TensorSpec((2,), "float32")), cast).dtype
        'float16'
    """
    copies = tuple(replace(copy, arithmetic=(*copy.arithmetic, step)) for copy in tensor.copies)
    return Traced(tensor.shape, step.target, copies)


def aliased(tensor: Traced) -> Traced:
    """The tensor under one more name.

    Example:
        >>> aliased(leaf("w", TensorSpec((2,), "int8"))).copies[0].alias
        True
    """
    copies = tuple(replace(copy, alias=True) for copy in tensor.copies)
    return replace(tensor, copies=copies)


def _shifted(copies: Iterable[StridedCopy], axis: int, by: int) -> Iterator[StridedCopy]:
    for copy in copies:
        at = copy.target_offsets
        yield replace(copy, target_offsets=(*at[:axis], at[axis] + by, *at[axis + 1 :]))


def reshaped(tensor: Traced, shape: Ints) -> Traced:
    """The same elements in row-major order under another shape of as many elements.

    Example:
        >>> flat = reshaped(leaf("w", TensorSpec((4, 6), "int8")), (24,))
        >>> len(flat.copies), len(reshaped(flat, (2, 12)).copies)
        (1, 1)
    """
    if shape == tensor.shape:
        return tensor
    copies = list(tensor.copies)
    # From the right, so that the dimensions still to come keep their numbers.
    for old, new in reversed(_runs(tensor.shape, shape)) if copies else ():
        sizes = tensor.shape[old.start : old.stop]
        copies = [_merged(copy, old.start, sizes) for copy in copies]
        for size in reversed(shape[new.start + 1 : new.stop]):
            copies = [piece for copy in copies for piece in _divided(copy, old.start, size)]
        if len(new) == 0:
            copies = [_without(copy, old.start) for copy in copies]
    return Traced(shape, tensor.dtype, tuple(copy.simplified() for copy in copies))


def _runs(old: Ints, new: Ints) -> list[tuple[range, range]]:
    """The smallest runs of dimensions of equal product; neither shape has a zero."""
    runs: list[tuple[range, range]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (a := prod(old[start_i:i])) != (b := prod(new[start_j:j])):
            if a < b:
                i += 1
            else:
                j += 1
        runs.append((range(start_i, i), range(start_j, j)))
    return runs


def _merged(copy: StridedCopy, start: int, sizes: Ints) -> StridedCopy:
    """Target dimensions from ``start`` on, of these sizes, as one; a new one of size 1 for none."""
    if len(sizes) == 1:
        return copy
    stop = start + len(sizes)
    weights = [prod(sizes[i + 1 :]) for i in range(len(sizes))]

    def flat(index: Ints) -> Ints:
        along = sum(i * w for i, w in zip(index[start:stop], weights, strict=True))
        return (*index[:start], along, *index[stop:])

    return copy.with_target(flat)


def _without(copy: StridedCopy, dimension: int) -> StridedCopy:
    """A copy without a target dimension of size 1."""
    return copy.with_target(lambda index: (*index[:dimension], *index[dimension + 1 :]))


def _divided(copy: StridedCopy, d: int, by: int) -> Iterator[StridedCopy]:
    """A copy with target dimension d made two: quotient and remainder of its index."""
    offset = copy.target_offsets[d] % by
    inner = [
        (row[d], axis)
        for axis, (size, row) in enumerate(zip(copy.sizes, copy.target_strides, strict=True))
        if size > 1 and row[d] % by
    ]
    reach = [step * (copy.sizes[axis] - 1) for step, axis in inner]
    if offset + sum(reach) < by:
        yield _quotient_and_remainder(copy, d, by)
        return
    step, axis = max(inner)
    size = copy.sizes[axis]
    others = sum(reach) - step * (size - 1)
    if by % step == 0 and offset % step + others < step:
        yield from _divided_evenly(copy, d, by, axis)
        return
    # The values of the axis that stay under `by` with all that the other axes add; else one alone.
    fitting = max(1, (by - 1 - offset - others) // step + 1)
    yield from _divided(copy.cut(axis, 0, fitting), d, by)
    yield from _divided(copy.cut(axis, fitting, size), d, by)


def _divided_evenly(copy: StridedCopy, d: int, by: int, axis: int) -> Iterator[StridedCopy]:
    """`_divided`, where the stride of ``axis`` divides ``by`` and no other axis carries into it."""
    step, size = copy.target_strides[axis][d], copy.sizes[axis]
    turn = by // step
    head = -(copy.target_offsets[d] % by // step) % turn
    body = max(0, size - head) // turn * turn
    if head and size:
        yield from _divided(copy.cut(axis, 0, min(head, size)), d, by)
    if body:
        whole = _axis_split(copy.cut(axis, head, head + body), axis, turn)
        yield _quotient_and_remainder(whole, d, by)
    if head + body < size:
        yield from _divided(copy.cut(axis, head + body, size), d, by)


def _axis_split(copy: StridedCopy, axis: int, inner: int) -> StridedCopy:
    """A copy with one axis made two, the second of length ``inner``."""

    def rows(strides: tuple[Ints, ...]) -> tuple[Ints, ...]:
        row = strides[axis]
        return (*strides[:axis], tuple(s * inner for s in row), row, *strides[axis + 1 :])

    sizes = (*copy.sizes[:axis], copy.sizes[axis] // inner, inner, *copy.sizes[axis + 1 :])
    return replace(
        copy,
        sizes=sizes,
        source_strides=rows(copy.source_strides),
        target_strides=rows(copy.target_strides),
    )


def _quotient_and_remainder(copy: StridedCopy, d: int, by: int) -> StridedCopy:
    """`_divided` if only axes that step by multiples of ``by`` cross a multiple of it."""

    def pair(index: Ints) -> Ints:
        return (*index[:d], index[d] // by, index[d] % by, *index[d + 1 :])

    # Axes of one step never move; their strides must not be split into a carry.
    rows = (
        pair(row) if size > 1 else (0,) * (len(row) + 1)
        for size, row in zip(copy.sizes, copy.target_strides, strict=True)
    )
    return replace(copy, target_offsets=pair(copy.target_offsets), target_strides=tuple(rows))
