"""Layouts: how two frameworks order the same elements, by roles and shapes.

1. `layouts` tries the orders that conventions know for two roles, the usual one first, and keeps
   those that the shapes allow.
2. From torch's ``weight`` to Flax's ``kernel`` the usual one is: two axes swapped; a convolution's
   (out, in, space...) as (space..., in, out); a row of heads split in two axes, or two merged.
   For all other roles it is the same order; one shape may split the other's axes.
3. Two orders of the axes are one layout if they differ in axes of one element alone.
4. Where the shapes allow several layouts, the usual one is a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from string import ascii_lowercase

from xckpt.core.geometry.box import Shape
from xckpt.mapping.infer.leaves import LeafGroup, ModelLeaf
from xckpt.mapping.operations import Operation, Rearrange, Transpose

AxisOrder = tuple[str, Sequence[int]]
"""Name of a layout, and for each target axis the source's."""

HEAD_AXES = {
    (1, 2): ("width", "heads", "head_dim"),
    (2, 1): ("heads", "head_dim", "width"),
}
"""Input and output axes of an attention's kernel -> what these axes are called."""


@dataclass(frozen=True)
class AxisLayout:
    """A way from a source's elements to a target's.

    Example:
        >>> AxisLayout("transposed", (Transpose((1, 0)),)).usual
        True
    """

    kind: str
    """Its name in reports."""
    operations: tuple[Operation, ...] = ()
    """The operations that do it."""
    usual: bool = True
    """Whether the roles call for it."""


def layouts(source: ModelLeaf, target: ModelLeaf) -> list[AxisLayout]:
    """The layouts that fit, the usual one first; none if roles, dtypes or shapes do not fit.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> weight = ModelLeaf.of("fc.weight", TensorSpec((2, 4), "float32"))
        >>> kernel = ModelLeaf.of("fc/kernel", TensorSpec((4, 2), "float32"))
        >>> [(layout.kind, layout.operations) for layout in layouts(weight, kernel)]
        [('transposed', (Transpose(axes=(1, 0)),))]
    """
    a, b = source.shape, target.shape
    dtypes = _dtype_class(source.spec.dtype), _dtype_class(target.spec.dtype)
    if source.role != target.role or dtypes[0] != dtypes[1] or prod(a) != prod(b):
        return []
    flavours = source.flavour, target.flavour
    from_torch = flavours == ("weight", "kernel")
    of_a_layer = from_torch or flavours == ("kernel", "weight")
    if len(a) != len(b):
        return _heads(a, b, from_torch=from_torch) if of_a_layer else _reshaped(a, b)
    same = ("same", range(len(a)))
    if of_a_layer and len(a) > 1:
        return _permuted(a, b, [*_of_a_layer(len(a), from_torch=from_torch), same])
    if source.role != "weight" or len(a) < 2:
        return _permuted(a, b, [same])
    if len(a) == 2:
        return _permuted(a, b, [same, ("transposed", (1, 0))])
    # MLX keeps torch's names, and has (out, space..., in).
    last, first = (0, *range(2, len(a)), 1), (0, len(a) - 1, *range(1, len(a) - 1))
    return _permuted(a, b, [same, ("channels last", last), ("channels first", first)])


def fits(source: LeafGroup, target: LeafGroup) -> dict[int | None, list[AxisLayout]]:
    """The layouts of two groups, by the axis of a stack; empty if none fits.

    Without a stack that axis is None.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> weight = ModelLeaf.of("fc.weight", TensorSpec((2, 4), "int8"))
        >>> kernel = ModelLeaf.of("fc/kernel", TensorSpec((4, 2), "int8"))
        >>> groups = (LeafGroup(leaf.key, (leaf,)) for leaf in (weight, kernel))
        >>> {axis: [each.kind for each in layouts] for axis, layouts in fits(*groups).items()}
        {None: ['transposed']}
    """
    one, other = source.leaves[0], target.leaves[0]
    options: dict[int | None, list[AxisLayout]] = {}
    if source.position is not None:
        for axis in _axes(other, len(source.leaves)):
            options[axis] = layouts(one, other.without_axis(axis))
    elif target.position is not None:
        for axis in _axes(one, len(target.leaves)):
            options[axis] = layouts(one.without_axis(axis), other)
    else:
        options[None] = layouts(one, other)
    return {axis: fitting for axis, fitting in options.items() if fitting}


def _axes(leaf: ModelLeaf, size: int) -> list[int]:
    return [axis for axis, each in enumerate(leaf.shape) if each == size]


def _dtype_class(dtype: str) -> str:
    """One word for the dtypes that a cast may bring together."""
    return "float" if "float" in dtype else dtype


def _of_a_layer(rank: int, *, from_torch: bool) -> list[AxisOrder]:
    """The orders that turn torch's weight into Flax's kernel, or back."""
    if rank == 2:
        return [("transposed", (1, 0))]
    # (out, in, space...) -> (space..., in, out)
    axes = (*range(2, rank), 1, 0) if from_torch else (rank - 1, rank - 2, *range(rank - 2))
    if rank > 3:
        return [("convolution", axes)]
    bilinear = (1, 2, 0) if from_torch else (2, 0, 1)
    return [("convolution", axes), ("batch of transposed", (0, 2, 1)), ("bilinear", bilinear)]


def _permuted(a: Shape, b: Shape, orders: Iterable[AxisOrder]) -> list[AxisLayout]:
    """The orders that turn one shape into the other, each way of moving elements once."""
    fitting: dict[tuple[int, ...], AxisLayout] = {}
    for number, (kind, axes) in enumerate(orders):
        if tuple(a[axis] for axis in axes) == b:
            operations = () if kind == "same" else (Transpose(tuple(axes)),)
            moved = tuple(axis for axis in axes if a[axis] != 1)
            fitting.setdefault(moved, AxisLayout(kind, operations, usual=number == 0))
    return list(fitting.values())


def _reshaped(a: Shape, b: Shape) -> list[AxisLayout]:
    """The same elements in the same order, where one shape only splits the other's axes."""
    fine, coarse = (a, b) if len(a) > len(b) else (b, a)
    groups = _grouped(fine, coarse)
    if groups is None:
        return []
    letters = iter(ascii_lowercase)
    merged: list[str] = []
    split: list[str] = []
    sizes: dict[str, int] = {}
    for group in groups:
        axes = ["1" if size == 1 else next(letters) for size in group]
        named = {axis: size for axis, size in zip(axes, group, strict=True) if axis != "1"}
        split += axes
        merged.append(_joined(list(named) or ["1"]))
        # An axis that consists of one other needs no size.
        sizes |= named if len(named) > 1 else {}
    merging = Rearrange(f"{' '.join(split)} -> {' '.join(merged)}", sizes)
    return [AxisLayout("reshaped", (merging if fine is a else merging.inverse(),))]


def _grouped(fine: Shape, coarse: Shape) -> list[Shape] | None:
    """The axes of ``fine`` that make up each axis of ``coarse``; None if they do not."""
    groups: list[Shape] = []
    at = 0
    for number, size in enumerate(coarse, 1):
        start = at
        while at < len(fine) and (at == start or prod(fine[start:at]) < size):
            at += 1
        while at < len(fine) and fine[at] == 1 and len(fine) - at > len(coarse) - number:
            at += 1
        if prod(fine[start:at]) != size or at == start:
            return None
        groups.append(fine[start:at])
    return groups if at == len(fine) else None


def _heads(a: Shape, b: Shape, *, from_torch: bool) -> list[AxisLayout]:
    """From torch's (out, in) to a kernel whose first axes are the inputs, or back."""
    weight, kernel = (a, b) if from_torch else (b, a)
    for count in range(1, len(kernel)):
        if (prod(kernel[count:]), prod(kernel[:count])) == weight:
            split = _split(kernel, count)
            if from_torch:
                return [AxisLayout("heads split", (split,))]
            return [AxisLayout("heads merged", (split.inverse(),))]
    return []


def _split(kernel: Shape, count: int) -> Rearrange:
    """The operation that splits (out, in) into a kernel's axes, ``count`` of them inputs."""
    names = HEAD_AXES.get((count, len(kernel) - count)) or (
        *(f"in{axis}" for axis in range(count)),
        *(f"out{axis}" for axis in range(len(kernel) - count)),
    )
    sizes = dict(zip(names, kernel, strict=True))
    ins, outs = names[:count], names[count:]
    stated = {name: sizes[name] for side in (ins, outs) if len(side) > 1 for name in side}
    return Rearrange(f"{_joined(outs)} {_joined(ins)} -> {' '.join(names)}", stated)


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"
