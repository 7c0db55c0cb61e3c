"""How one framework lays out what another has, told from roles and shapes.

A *layout* is an exact way from a source tensor's elements to a target's: operations of the mapping
language, and the strides that they come down to, by which two layouts that move the same elements
the same way are one.

1. `layouts` lists the layouts that conventions know for two roles, the usual one first, and keeps
   those that the shapes allow.
2. From torch's ``weight`` to Flax's ``kernel`` the usual one is: two axes swapped; a convolution's
   (out, in, space...) as (space..., in, out); a row of heads split in two axes, or two merged.
   Everywhere else it is the same layout, axes of one element apart.
3. Where the shapes allow two, the usual one is a guess: `Layout.sole` says that it is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from xckpt.convert.leaf_names import Leaf

__all__ = ["Layout", "Operation", "layouts"]

Operation = dict[str, object]
"""An operation as a mapping file spells it: ``{"transpose": [1, 0]}``."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A way from a source's elements to a target's."""

    kind: str
    """What it is called where it is shown."""
    operations: tuple[Operation, ...]
    """What does it."""
    strides: tuple[int, ...]
    """Of each target axis, in elements of the source; 0 where the axis has one element."""
    usual: bool = True
    """Whether the roles call for it."""
    sole: bool = True
    """Whether the shapes allow no other."""


def layouts(source: Leaf, target: Leaf) -> list[Layout]:
    """The layouts that fit, the usual one first; none if the shapes do not fit.

    Example:
        >>> from xckpt.convert.tensors import TensorSpec
        >>> weight = Leaf.of("fc.weight", TensorSpec((2, 4), "float32"))
        >>> kernel = Leaf.of("fc/kernel", TensorSpec((4, 2), "float32"))
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
            return _distinct(_to_kernel(a, b))
        case ("kernel", "weight"):
            return _distinct(_to_weight(a, b))
        case _:
            return _distinct([*_kept(a, b), *_swapped(a, b, usual=False)])


def _to_kernel(a: Shape, b: Shape) -> list[Layout]:
    rank = len(a)
    if rank == len(b):
        if rank < 2:
            return _kept(a, b)
        found = _swapped(a, b) if rank == 2 else _permuted(a, b, _space_first(rank), "convolution")
        if rank == 3:
            found += _permuted(a, b, (0, 2, 1), "batch of transposed", usual=False)
        return [*found, *_kept(a, b, usual=False)]
    if rank == 2 and len(b) > 2:
        return [
            _heads(a, b, inputs)
            for inputs in range(1, len(b))
            if (prod(b[inputs:]), prod(b[:inputs])) == a
        ]
    return []


def _to_weight(a: Shape, b: Shape) -> list[Layout]:
    rank = len(b)
    if rank == len(a):
        if rank < 2:
            return _kept(a, b)
        back = tuple(_inverse(_space_first(rank)))
        found = _swapped(a, b) if rank == 2 else _permuted(a, b, back, "convolution")
        if rank == 3:
            found += _permuted(a, b, (0, 2, 1), "batch of transposed", usual=False)
        return [*found, *_kept(a, b, usual=False)]
    if rank == 2 and len(a) > 2:
        return [
            _heads(b, a, inputs, back=True)
            for inputs in range(1, len(a))
            if (prod(a[inputs:]), prod(a[:inputs])) == b
        ]
    return []


def _space_first(rank: int) -> Shape:
    """(out, in, space...) -> (space..., in, out)."""
    return (*range(2, rank), 1, 0)


def _inverse(axes: Shape) -> list[int]:
    return sorted(range(len(axes)), key=lambda axis: axes[axis])


def _contiguous(shape: Shape) -> list[int]:
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _signature(shape: Shape, strides: list[int]) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))


def _permuted(a: Shape, b: Shape, axes: Shape, kind: str, *, usual: bool = True) -> list[Layout]:
    if tuple(a[axis] for axis in axes) != b:
        return []
    strides = _contiguous(a)
    signature = _signature(b, [strides[axis] for axis in axes])
    return [Layout(kind, ({"transpose": list(axes)},), signature, usual)]


def _swapped(a: Shape, b: Shape, *, usual: bool = True) -> list[Layout]:
    return _permuted(a, b, (1, 0), "transposed", usual=usual) if len(a) == 2 else []


def _kept(a: Shape, b: Shape, *, usual: bool = True) -> list[Layout]:
    """The same elements in the same order, where one shape only splits the other's axes."""
    signature = _signature(b, _contiguous(b))
    if a == b:
        return [Layout("same", (), signature, usual)]
    fine, coarse = (a, b) if len(a) > len(b) else (b, a)
    groups = _grouped(fine, coarse)
    if groups is None or len(a) == len(b):
        return []
    names = iter("abcdefghijklmnopqrstuvwxyz")
    sizes: dict[str, int] = {}
    split, whole = [], []
    for group in groups:
        axes = [("1" if size == 1 else next(names)) for size in group]
        split += axes
        letters = [axis for axis in axes if axis != "1"]
        if len(letters) > 1:
            known = zip(axes, group, strict=True)
            sizes |= {axis: size for axis, size in known if axis != "1"}
        whole.append(_joined(letters) if letters else "1")
    one, other = " ".join(whole), " ".join(split)
    pattern = f"{other} -> {one}" if fine is a else f"{one} -> {other}"
    return [Layout("reshaped", (_rearrange(pattern, sizes),), signature, usual)]


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


def _heads(weight: Shape, kernel: Shape, inputs: int, *, back: bool = False) -> Layout:
    """torch's (out, in) and a kernel whose first ``inputs`` axes are the inputs."""
    names = [f"in{axis}" for axis in range(inputs)]
    names += [f"out{axis}" for axis in range(len(kernel) - inputs)]
    match (inputs, len(kernel) - inputs):
        case (1, 2):
            names = ["width", "heads", "head_dim"]
        case (2, 1):
            names = ["heads", "head_dim", "width"]
        case _:
            pass
    out, in_ = _joined(names[inputs:]), _joined(names[:inputs])
    torch_side, flax_side = f"{out} {in_}", " ".join(names)
    whole = {names[0]} if inputs == 1 else set()
    whole |= {names[-1]} if inputs == len(kernel) - 1 else set()
    sizes = {name: size for name, size in zip(names, kernel, strict=True) if name not in whole}
    if back:
        pattern, strides = f"{flax_side} -> {torch_side}", [1, prod(kernel[inputs:])]
        return Layout("heads merged", (_rearrange(pattern, sizes),), _signature(weight, strides))
    lengths = [prod(kernel[axis + 1 : inputs]) for axis in range(inputs)]
    lengths += [weight[1] * prod(kernel[axis + 1 :]) for axis in range(inputs, len(kernel))]
    pattern = f"{torch_side} -> {flax_side}"
    return Layout("heads split", (_rearrange(pattern, sizes),), _signature(kernel, lengths))


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _rearrange(pattern: str, sizes: dict[str, int]) -> Operation:
    return {"rearrange": pattern, "sizes": sizes} if sizes else {"rearrange": pattern}


def _distinct(found: list[Layout]) -> list[Layout]:
    """Each way of moving elements once; `sole` set."""
    kept: dict[tuple[int, ...], Layout] = {}
    for layout in found:
        kept.setdefault(layout.strides, layout)
    sole = len(kept) == 1
    return [
        Layout(each.kind, each.operations, each.strides, each.usual, sole) for each in kept.values()
    ]
