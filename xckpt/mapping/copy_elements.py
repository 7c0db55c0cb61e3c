"""Carrying out strided copies on NumPy arrays.

1. `view` gives the elements that one side of a copy touches, as a view of the array.
2. `copy_elements` takes the source's view, or makes constants, through the arithmetic, and writes
   it to the target's view. Arithmetic goes piece by piece, because it computes in wider elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.transpose import bits_of, copy_bits
from xckpt.core.targets.casting import Spoiled
from xckpt.errors import MappingError
from xckpt.mapping.strided_copy import Arithmetic, Ints, StridedCopy, bounds

PIECE = 1 << 18
"""Elements that arithmetic takes at a time."""


def view(
    array: NDArray[Any], offsets: Ints, strides: tuple[Ints, ...], sizes: Ints
) -> NDArray[Any]:
    """The elements that one side of a copy touches, as a view of shape ``sizes``; nothing is
    copied.

    ``array`` may be a box of the leaf: pass offsets relative to the box.

    Raises:
        IndexError: the copy reaches outside ``array``.

    Example:
        >>> view(np.arange(6).reshape(2, 3), (0, 1), ((0, 1), (1, 0)), (2, 2))
        array([[1, 4],
               [2, 5]])
    """
    touched = bounds(sizes, offsets, strides)
    if not Box.whole(array.shape).holds(touched):
        raise IndexError(f"a copy touches {touched} of an array of shape {list(array.shape)}")
    steps = [
        sum(step * width for step, width in zip(row, array.strides, strict=True)) for row in strides
    ]
    # With an ellipsis even an array without dimensions gives a view, not a scalar.
    start = array[(*(slice(offset, None) for offset in offsets), ...)]
    # NumPy does not stride over all types of ml_dtypes; it does over their bits.
    elements = np.lib.stride_tricks.as_strided(bits_of(start), shape=sizes, strides=steps)
    return elements.view(array.dtype)


def copy_elements(
    copy: StridedCopy,
    source: NDArray[Any] | None,
    target: NDArray[Any],
    *,
    source_origin: Ints | None = None,
    target_origin: Ints | None = None,
) -> None:
    """Carry out one copy between arrays that hold the leaves, or boxes of them from an origin on.

    ``source`` is None for a constant.

    Raises:
        MappingError: a step of arithmetic makes numbers overflow or wrap around.

    Example:
        >>> target = np.zeros(2, "int32")
        >>> copy = StridedCopy("a", "b", (2,), (10,), ((3,),), (4,), ((1,),))
        >>> copy_elements(copy, np.arange(10, 14, dtype="int32"), target, source_origin=(10,),
        ...               target_origin=(4,))
        >>> target
        array([10, 13], dtype=int32)
    """
    for piece in _pieces(copy):
        offsets = _less(piece.target_offsets, target_origin)
        into = view(target, offsets, piece.target_strides, piece.sizes)
        if source is None:
            values = _constants(piece, target.dtype)
        else:
            offsets = _less(piece.source_offsets, source_origin)
            values = view(source, offsets, piece.source_strides, piece.sizes)
        for step in piece.arithmetic:
            values = _taken(step, values, piece)
        if values.dtype != into.dtype:
            raise TypeError(f"{copy.target!r}: {values.dtype} elements do not go into {into.dtype}")
        copy_bits(into, values)


def _taken(step: Arithmetic, values: NDArray[Any], piece: StridedCopy) -> NDArray[Any]:
    """The elements of a piece after one step.

    Raises:
        MappingError: numbers overflow or wrap around; names leaf, count and first index.
    """
    after = step(values)
    spoiled = Spoiled.of(values, after)
    if spoiled is not None:
        moved = np.array(spoiled.first, np.int64) @ np.array(piece.target_strides, np.int64)
        at = tuple((moved + piece.target_offsets).tolist())
        name = repr(piece.target) if piece.target else "the root"
        raise MappingError(
            f"{name}: by a {step.operation} {replace(spoiled, first=at)}; map it "
            "without that step, to a type that holds it, or clip the tensor before"
        )
    return after


def _pieces(copy: StridedCopy) -> Iterator[StridedCopy]:
    """A copy with arithmetic in pieces of bounded size."""
    if not copy.arithmetic or copy.elements <= PIECE:
        yield copy
        return
    axis = max(range(len(copy.sizes)), key=lambda axis: copy.sizes[axis])
    size = copy.sizes[axis]
    step = max(1, size * PIECE // copy.elements)
    for start in range(0, size, step):
        yield from _pieces(copy.cut(axis, start, min(size, start + step)))


def _less(offsets: Ints, origin: Ints | None) -> Ints:
    if origin is None:
        return offsets
    return tuple(o - start for o, start in zip(offsets, origin, strict=True))


def _constants(copy: StridedCopy, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The values that a copy from "" writes."""
    if copy.arithmetic:
        dtype = numpy_dtype(copy.arithmetic[0].source)
    value = np.asarray(copy.value if dtype.kind == "c" else copy.value.real)
    if not copy.source_offsets:
        return np.broadcast_to(value.astype(dtype), copy.sizes)
    index = np.array(copy.source_offsets[0])
    for (step,), size in zip(copy.source_strides, copy.sizes, strict=True):
        index = np.add.outer(index, step * np.arange(size))
    return (value + index).astype(dtype)
