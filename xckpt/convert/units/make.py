"""Making a unit: read its sources once each, and copy them to where they belong.

1. `source_reads` says which boxes of the source tensors a unit reads: one box a tensor if its
   copies lie close together.
2. A box that one copy takes as it lies, or with its axes in another order, is read straight into
   the target's memory: the chunk just verified is still in the cache when it is transposed.
3. Any other box is read into memory of its own, and each copy takes its part. Arithmetic goes piece
   by piece, because it computes in wider elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.reads import source_reads
from xckpt.convert.units.unit import Resolved, TargetPart
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.formats.source import TensorSource
from xckpt.mapping.copy_elements import copy_elements, view
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy
from xckpt.storage.chunks.chunk import allocate

Array = NDArray[np.generic]

PIECE = 1 << 18
"""Elements that arithmetic takes at a time."""


def make(resolved: Resolved, source: TensorSource, parts: Sequence[TargetPart]) -> list[Array]:
    """The elements of some parts, read and copied; each array is of its part's sizes.

    Raises:
        CorruptCheckpointError: the source is not what was saved.
        StorageError: the source cannot be read.
    """
    made = [
        allocate(part.box.sizes, numpy_dtype(resolved.targets[part.name].dtype), part.name)
        for part in parts
    ]
    copies = [
        (number, copy)
        for number, part in enumerate(parts)
        for copy in resolved.copies_into(part.name, part.box)
    ]
    _carry_out(source, copies, made, [part.box for part in parts])
    return made


def make_box(
    source: TensorSource,
    spec: TensorSpec,
    copies: Sequence[StridedCopy],
    box: Box,
) -> Array:
    """A box of a tensor that copies make up.

    Args:
        source: where they read.
        spec: the whole tensor's shape and dtype.
        copies: those into the box, offsets relative to the whole tensor.
        box: which elements.
    """
    made = allocate(box.sizes, numpy_dtype(spec.dtype), copies[0].target if copies else "")
    _carry_out(source, [(0, copy) for copy in copies], [made], [box])
    return made


def _carry_out(
    source: TensorSource,
    copies: Sequence[tuple[int, StridedCopy]],
    made: Sequence[Array],
    boxes: Sequence[Box],
) -> None:
    for number, copy in copies:
        if not copy.source:
            run_copy(copy, None, made[number], None, boxes[number].offsets)
    for reading in source_reads(copies):
        number, copy = reading.copies[0]
        place = None
        if len(reading.copies) == 1:
            place = direct_view(copy, reading.box, made[number], boxes[number].offsets)
        if place is not None:
            source.read(reading.name, reading.box, place)
            continue
        dtype = numpy_dtype(source.specs[reading.name].dtype)
        held = allocate(reading.box.sizes, dtype, reading.name)
        source.read(reading.name, reading.box, held)
        for number, copy in reading.copies:
            run_copy(copy, held, made[number], reading.box.offsets, boxes[number].offsets)


def direct_view(copy: StridedCopy, box: Box, made: Array, origin: tuple[int, ...]) -> Array | None:
    """The target's memory in the order of the box that is read, if each element has its place.

    Args:
        copy: the only one that takes elements from the box.
        box: what is read.
        made: memory for a box of the target.
        origin: that box's first element in the target.
    """
    sizes = box.sizes
    if copy.arithmetic or copy.elements != prod(sizes):
        return None
    steps: list[tuple[int, ...]] = [(0,) * made.ndim] * len(sizes)
    taken: set[int] = set()
    for size, out, into in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        if size == 1:
            continue
        along = [axis for axis, step in enumerate(out) if step]
        if len(along) != 1 or out[along[0]] != 1 or along[0] in taken:
            return None
        taken.add(along[0])
        steps[along[0]] = into
    offsets = tuple(a - b for a, b in zip(copy.target_offsets, origin, strict=True))
    return view(made, offsets, tuple(steps), sizes)


def run_copy(
    copy: StridedCopy,
    source: Array | None,
    target: Array,
    source_origin: tuple[int, ...] | None,
    target_origin: tuple[int, ...],
) -> None:
    """Carry out one copy between boxes that begin at these origins, in memory that is bounded.

    ``source`` is None for a constant.
    """
    for piece in _pieces(copy):
        copy_elements(
            piece, source, target, source_origin=source_origin, target_origin=target_origin
        )


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
