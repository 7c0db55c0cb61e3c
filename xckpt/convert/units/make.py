"""Making a unit: read its sources once each, and copy them to their places.

1. `source_reads` says which boxes of the source tensors a unit reads: one box a tensor if its
   copies lie close together.
2. A box that one copy takes as it lies, or with its axes in another order, is read straight into
   the target's memory: the chunk just verified is still in the cache when it is transposed.
3. Any other box is read into memory of its own, and each copy takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.unit import SourceRead, TargetPart, source_reads
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.formats.source import TensorSource
from xckpt.mapping.copy_elements import copy_elements, view
from xckpt.mapping.resolve import ResolvedMapping
from xckpt.mapping.strided_copy import StridedCopy
from xckpt.storage.chunks.chunk import allocate

Array = NDArray[np.generic]


def make(
    resolved: ResolvedMapping, source: TensorSource, parts: Sequence[TargetPart]
) -> list[Array]:
    """The elements of some parts; each array is of its part's sizes. See `fill`.

    Example:
        >>> import xckpt
        >>> from xckpt.convert import Mapping, Rule
        >>> from xckpt.formats.xckpt import XckptSource
        >>> from xckpt.mapping.operations import Transpose
        >>> _ = xckpt.save("memory://to-make", {"w": np.arange(6).reshape(2, 3)})
        >>> source = XckptSource("memory://to-make")
        >>> resolved = Mapping([Rule("w", "v", [Transpose((1, 0))])]).resolve(source.specs)
        >>> make(resolved, source, [TargetPart("v", Box((2, 0), (1, 2)))])
        [array([[2, 5]])]
    """
    made = [
        allocate(part.box.sizes, numpy_dtype(resolved.targets[part.name].dtype), part.name)
        for part in parts
    ]
    fill(resolved, source, parts, made)
    return made


def fill(
    resolved: ResolvedMapping,
    source: TensorSource,
    parts: Sequence[TargetPart],
    made: Sequence[Array],
) -> None:
    """Fill arrays with the elements of some parts, read and copied.

    Args:
        resolved: the mapping.
        source: the open source.
        parts: boxes of targets.
        made: memory for each part, of its sizes and the target's dtype.

    Raises:
        CorruptCheckpointError: the source is not what was saved.
        MappingError: a step makes numbers overflow or wrap around.
        StorageError: the source cannot be read.
    """
    copies: list[tuple[int, StridedCopy]] = []
    for number, part in enumerate(parts):
        for copy in resolved.copies_into(part.name, part.box):
            if copy.is_constant:
                copy_elements(copy, None, made[number], target_origin=part.box.offsets)
            else:
                copies.append((number, copy))
    wanted: list[tuple[str, Box, Array]] = []
    rest: list[tuple[SourceRead, Array]] = []
    for read in source_reads(copies):
        memory = _place(read, parts, made)
        if memory is None:
            dtype = numpy_dtype(source.specs[read.name].dtype)
            memory = allocate(read.box.sizes, dtype, read.name)
            rest.append((read, memory))
        wanted.append((read.name, read.box, memory))
    source.read_all(wanted)
    for read, memory in rest:
        for number, copy in read.copies:
            copy_elements(
                copy,
                memory,
                made[number],
                source_origin=read.box.offsets,
                target_origin=parts[number].box.offsets,
            )


def _place(read: SourceRead, parts: Sequence[TargetPart], made: Sequence[Array]) -> Array | None:
    """Where in a part's memory the elements of a read lie as it reads them; None if nowhere."""
    if len(read.copies) != 1:
        return None
    [(number, copy)] = read.copies
    return direct_view(copy, read.box, made[number], parts[number].box.offsets)


def direct_view(copy: StridedCopy, box: Box, made: Array, origin: tuple[int, ...]) -> Array | None:
    """The target's memory in the order of the box that is read, if each element has its place.

    Args:
        copy: the only one that takes elements from the box.
        box: what is read.
        made: memory for a box of the target.
        origin: that box's first element in the target.

    Example:
        >>> turned = StridedCopy(
        ...     "w", "v", (2, 3), (0, 0), ((1, 0), (0, 1)), (0, 0), ((0, 1), (1, 0))
        ... )
        >>> direct_view(turned, Box((0, 0), (2, 3)), np.zeros((3, 2)), (0, 0)).shape
        (2, 3)
    """
    sizes = box.sizes
    if copy.arithmetic or copy.elements != prod(sizes):
        return None
    steps: dict[int, tuple[int, ...]] = {}
    for size, out, into in zip(copy.sizes, copy.source_strides, copy.target_strides, strict=True):
        if size == 1:
            continue
        along = [axis for axis, step in enumerate(out) if step]
        if len(along) != 1 or out[along[0]] != 1 or along[0] in steps:
            return None
        steps[along[0]] = into
    offsets = tuple(a - b for a, b in zip(copy.target_offsets, origin, strict=True))
    still = (0,) * made.ndim
    strides = tuple(steps.get(axis, still) for axis in range(len(sizes)))
    return view(made, offsets, strides, sizes)
