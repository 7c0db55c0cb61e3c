"""Layouts: how one framework orders the elements that another has, by roles and shapes.

A *layout* is an exact way from a source tensor's elements to a target's: operations of the mapping
language, and the strides that they come down to, by which two layouts that move the same elements
the same way are one.

1. `layouts` lists the layouts that conventions know for two roles, the usual one first, and keeps
   those that the shapes allow.
2. From torch's ``weight`` to Flax's ``kernel`` the usual one is: two axes swapped; a convolution's
   (out, in, space...) as (space..., in, out); a row of heads split in two axes, or two merged.
   Everywhere else it is the same layout, axes of one element apart.
3. Where the shapes allow several, the usual one is a guess; `AxisLayout.sole` is then False.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from xckpt.core.geometry.box import Shape
from xckpt.mapping.infer.leaf_names import ModelLeaf

OperationTable = dict[str, object]
"""An operation as a mapping file spells it: ``{"transpose": [1, 0]}``."""


@dataclass(frozen=True)
class AxisLayout:
    """A way from a source's elements to a target's."""

    kind: str
    """Its name in reports."""
    operations: tuple[OperationTable, ...]
    """The operations that do it."""
    strides: tuple[int, ...]
    """Of each target axis, in elements of the source; 0 where the axis has one element."""
    usual: bool = True
    """Whether the roles call for it."""
    sole: bool = True
    """Whether the shapes allow no other."""


def layouts(source: ModelLeaf, target: ModelLeaf) -> list[AxisLayout]:
    """The layouts that fit, the usual one first; none if the shapes do not fit.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> weight = ModelLeaf.of("fc.weight", TensorSpec((2, 4), "float32"))
        >>> kernel = ModelLeaf.of("fc/kernel", TensorSpec((4, 2), "float32"))
        >>> [(layout.kind, layout.operations) for layout in layouts(weight, kernel)]
        [('transposed', ({'transpose': [1, 0]},))]
    """
    a, b = source.shape, target.shape
    if source.role != target.role or prod(a) != prod(b):
        return []
    if source.role != "weight":
        return _kept(a, b)
    match (source.flavour, target.flavour):
        case ("weight", "kernel"):
            return _distinct(_of_a_layer(a, b))
        case ("kernel", "weight"):
            return _distinct(_of_a_layer(b, a, back=True))
        case _:
            return _distinct([*_kept(a, b), *_swapped(a, b, usual=False)])


def _of_a_layer(weight: Shape, kernel: Shape, *, back: bool = False) -> list[AxisLayout]:
    """From torch's weight to Flax's kernel, or back."""
    a, b = (kernel, weight) if back else (weight, kernel)
    rank = len(weight)
    if rank == 2 and len(kernel) > 2:
        return [
            _heads(weight, kernel, inputs, back=back)
            for inputs in range(1, len(kernel))
            if (prod(kernel[inputs:]), prod(kernel[:inputs])) == weight
        ]
    if rank != len(kernel):
        return []
    if rank < 2:
        return _kept(a, b)
    axes = _inverse(_space_first(rank)) if back else _space_first(rank)
    found = _swapped(a, b) if rank == 2 else _permuted(a, b, axes, "convolution")
    if rank == 3:
        found += _permuted(a, b, (0, 2, 1), "batch of transposed", usual=False)
    return [*found, *_kept(a, b, usual=False)]


def _space_first(rank: int) -> Shape:
    """(out, in, space...) -> (space..., in, out)."""
    return (*range(2, rank), 1, 0)


def _inverse(axes: Shape) -> Shape:
    return tuple(sorted(range(len(axes)), key=lambda axis: axes[axis]))


def _contiguous(shape: Shape) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _signature(shape: Shape, strides: list[int]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _permuted(
    a: Shape, b: Shape, axes: Shape, kind: str, *, usual: bool = True
) -> list[AxisLayout]:
    if tuple(a[axis] for axis in axes) != b:
        return []
    strides = _contiguous(a)
    signature = _signature(b, [strides[axis] for axis in axes])
    return [AxisLayout(kind, ({"transpose": list(axes)},), signature, usual)]


def _swapped(a: Shape, b: Shape, *, usual: bool = True) -> list[AxisLayout]:
    return _permuted(a, b, (1, 0), "transposed", usual=usual) if len(a) == 2 else []


def _kept(a: Shape, b: Shape, *, usual: bool = True) -> list[AxisLayout]:
    """The same elements in the same order, where one shape only splits the other's axes."""
    signature = _signature(b, _contiguous(b))
    if a == b:
        return [AxisLayout("same", (), signature, usual)]
    fine, coarse = (a, b) if len(a) > len(b) else (b, a)
    groups = _grouped(fine, coarse)
    if groups is None or len(a) == len(b):
        return []
    whole, split, sizes = _notation(groups)
    pattern = f"{split} -> {whole}" if fine is a else f"{whole} -> {split}"
    return [AxisLayout("reshaped", (_rearrange(pattern, sizes),), signature, usual)]


def _notation(groups: Sequence[Shape]) -> tuple[str, str, dict[str, int]]:
    """The merged axes in einops' notation, the axes that they consist of, and the sizes of these.

    An axis that consists of one other needs no size.
    """
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    whole: list[str] = []
    split: list[str] = []
    sizes: dict[str, int] = {}
    for group in groups:
        axes = [("1" if size == 1 else next(letters)) for size in group]
        named = {axis: size for axis, size in zip(axes, group, strict=True) if axis != "1"}
        split += axes
        whole.append(_joined(list(named)) if named else "1")
        if len(named) > 1:
            sizes |= named
    return " ".join(whole), " ".join(split), sizes


def _grouped(fine: Shape, coarse: Shape) -> list[Shape] | None:
    """The axes of ``fine`` that make up each axis of ``coarse``; None if they do not."""
    groups: list[Shape] = []
    at = 0
    for number, size in enumerate(coarse):
        group: list[int] = []
        while at < len(fine) and (not group or prod(group) < size):
            group.append(fine[at])
            at += 1
        while at < len(fine) and fine[at] == 1 and len(fine) - at > len(coarse) - number - 1:
            group.append(fine[at])
            at += 1
        if prod(group) != size or not group:
            return None
        groups.append(tuple(group))
    return groups if at == len(fine) else None


def _heads(weight: Shape, kernel: Shape, inputs: int, *, back: bool = False) -> AxisLayout:
    """torch's (out, in) and a kernel whose first ``inputs`` axes are the inputs."""
    names = _axis_names(inputs, len(kernel) - inputs)
    ins, outs = names[:inputs], names[inputs:]
    merged = {name for side in (ins, outs) if len(side) > 1 for name in side}
    sizes = {name: size for name, size in zip(names, kernel, strict=True) if name in merged}
    torch_side, flax_side = f"{_joined(outs)} {_joined(ins)}", " ".join(names)
    if back:
        merge = _rearrange(f"{flax_side} -> {torch_side}", sizes)
        return AxisLayout("heads merged", (merge,), _signature(weight, [1, prod(kernel[inputs:])]))
    strides = [prod(kernel[axis + 1 : inputs]) for axis in range(inputs)]
    strides += [weight[1] * prod(kernel[axis + 1 :]) for axis in range(inputs, len(kernel))]
    split = _rearrange(f"{torch_side} -> {flax_side}", sizes)
    return AxisLayout("heads split", (split,), _signature(kernel, strides))


def _axis_names(inputs: int, outputs: int) -> list[str]:
    """Names for the axes of a kernel, as attention calls them where it has three."""
    match (inputs, outputs):
        case (1, 2):
            return ["width", "heads", "head_dim"]
        case (2, 1):
            return ["heads", "head_dim", "width"]
        case _:
            return [
                *(f"in{axis}" for axis in range(inputs)),
                *(f"out{axis}" for axis in range(outputs)),
            ]


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _rearrange(pattern: str, sizes: dict[str, int]) -> OperationTable:
    return {"rearrange": pattern, "sizes": sizes} if sizes else {"rearrange": pattern}


def _distinct(found: list[AxisLayout]) -> list[AxisLayout]:
    """Each way of moving elements once; `sole` set."""
    kept: dict[tuple[int, ...], AxisLayout] = {}
    for layout in found:
        kept.setdefault(layout.strides, layout)
    sole = len(kept) == 1
    return [replace(layout, sole=sole) for layout in kept.values()]
