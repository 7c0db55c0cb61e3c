"""Writing arrays through a sink, in boxes of whole chunks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.slabs import blocks
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.formats.sink import Contents, TensorSink
from xckpt.mapping.spec import TensorSpec


def specs_of(arrays: Mapping[str, NDArray]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(a.shape, a.dtype.name) for name, a in arrays.items()}


def write_box(sink: TensorSink, name: str, box: ChunkStorageMetadata, array: NDArray) -> None:
    """Write what a box holds of an array."""
    ends = zip(box.offsets, box.sizes, strict=True)
    sink.write(name, box, np.asarray(array[tuple(slice(o, o + n) for o, n in ends)]))


def boxes_of(
    sink: TensorSink, arrays: Mapping[str, NDArray], chunks_each: int = 3
) -> list[tuple[str, ChunkStorageMetadata]]:
    """Boxes of about so many chunks each, which make up the arrays."""
    return [
        (name, box)
        for name, array in arrays.items()
        for box in blocks(
            Box.whole(array.shape), sink.chunks(name), chunks_each * prod(sink.chunks(name))
        )
    ]


def write(
    sink: TensorSink,
    arrays: Mapping[str, NDArray],
    values: Mapping[str, object] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """All of a sink's steps."""
    sink.prepare(Contents(specs_of(arrays), values or {}, metadata or {}))
    for name, box in boxes_of(sink, arrays):
        write_box(sink, name, box, arrays[name])
    sink.commit()
