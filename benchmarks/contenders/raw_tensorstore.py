"""TensorStore alone: zarr3 arrays, little-endian bytes, no digest, no manifest.

1. ``chunk_shape`` cuts a tensor along its leading dimensions into chunks of about 8 MiB, or
   leaves it whole.
2. A save opens every array, writes it from the caller's memory, and waits for the commits.
3. A load reads into memory that exists, by ``pread`` or through a memory map.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from benchmarks.contender import Contender, Load, State

CHUNK_BYTES = 8 << 20


def chunk_shape(shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Return a chunk of at most ``limit`` bytes that is contiguous in a C-ordered tensor.

    A divisor of the dimension that is cut is preferred where it fills half of the limit: edge
    chunks are stored padded and cost a read before each write.

    >>> chunk_shape((50257, 1024), 4, 8 << 20), chunk_shape((8, 1024, 1024), 4, 8 << 20)
    ((1733, 1024), (2, 1024, 1024))
    """
    size = itemsize * int(np.prod(shape, dtype=np.int64))
    chunk = list(shape)
    for dim, extent in enumerate(shape):
        if size <= limit:
            break
        row = size // extent
        most = max(1, limit // row)
        divisor = max(n for n in range(1, most + 1) if extent % n == 0)
        chunk[dim] = divisor if 2 * divisor > most else most
        size = chunk[dim] * row
    return tuple(chunk)


def _spec(directory: Path, name: str, shape: tuple[int, ...], limit: int | None) -> dict[str, Any]:
    chunk = shape if limit is None else chunk_shape(shape, 4, limit)
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{directory / name}/"},
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "shape": list(shape),
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        },
    }


def _contender(name: str, limit: int | None) -> Contender:
    def save(directory: Path, state: State) -> None:
        context = ts.Context()
        stores = [
            ts.open(_spec(directory, leaf, array.shape, limit), create=True, context=context)
            for leaf, array in state.items()
        ]
        writes = [
            store.result().write(array, can_reference_source_data_indefinitely=True)
            for store, array in zip(stores, state.values(), strict=True)
        ]
        for write in writes:
            write.commit.result()

    def load_in(mode: dict[str, Any]) -> Load:
        def load(directory: Path, target: State) -> State:
            context = ts.Context(mode)
            stores = [
                ts.open(_spec(directory, leaf, array.shape, limit), open=True, context=context)
                for leaf, array in target.items()
            ]
            reads = [
                ts.array(array, copy=False, write=True).write(store.result())
                for store, array in zip(stores, target.values(), strict=True)
            ]
            for read in reads:
                read.result()
            return target

        label = "into memory, mapped" if mode else "into memory"
        return Load(label, False, load)

    loads = (load_in({"file_io_mode": {"mode": "memmap"}}), load_in({}))
    return Contender(name, "numpy", save, loads)


LEADING_CHUNKS = _contender("TensorStore, 8 MiB chunks", CHUNK_BYTES)
WHOLE_CHUNKS = _contender("TensorStore, a chunk a tensor", None)
