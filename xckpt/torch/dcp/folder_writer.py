"""Writing a DCP folder entry by entry, in any order, from any process; the metadata at the end.

Each entry, a box of a tensor or a value, is a file of its own, as `torch.save` writes it: it
appears under its name when it is whole, and may be written again. `write_metadata` then has torch
itself write ``.metadata``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import checkpoint as dcp

# There is no public name for it: the type of what a FileSystemWriter reports of an entry.
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from xckpt.errors import CorruptCheckpointError
from xckpt.torch.buffers import from_numpy, torch_dtype

__all__ = ["Described", "carries", "write_entry", "write_metadata"]

NAMES_ONLY = ("int2", "int4")
"""dtypes that torch has, but no tensor of which it can save."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of the folder."""

    dtype: str
    """The format's name of the element type."""
    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], tuple[tuple[int, ...], str]]
    """Offsets of each box -> its sizes, and its file."""


def carries(dtype: str) -> bool:
    """Whether torch can save tensors of a dtype.

    Example:
        >>> carries("bfloat16"), carries("float8_e3m4"), carries("int4")
        (True, False, False)
    """
    return torch_dtype(dtype) is not None and dtype not in NAMES_ONLY


def write_entry(path: Path, entry: NDArray[np.generic] | object) -> None:
    """Write a box, as an array, or a Python value to its file.

    Raises:
        OSError: the file cannot be written.
    """
    if isinstance(entry, np.ndarray):
        # torch.save writes all of a tensor's storage: it must be the box and nothing more.
        entry = from_numpy(np.array(entry, order="C"))
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with staged.open("wb") as file:
            torch.save(entry, file)
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def write_metadata(
    folder: Path,
    tensors: Mapping[str, Described],
    values: Mapping[str, str],
    paths: Mapping[str, Sequence[str]],
) -> None:
    """Write ``.metadata`` for entries that are all written.

    Args:
        folder: where they are.
        tensors: FQN -> tensor.
        values: FQN -> file of a value.
        paths: FQN -> keys in the tree, by which torch rebuilds it.

    Raises:
        CorruptCheckpointError: files are missing; all are listed.
        OSError: the file cannot be written.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    entries: list[tuple[MetadataIndex, str]] = []
    for name, tensor in tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, (sizes, _) in tensor.boxes.items()
        ]
        dtype = torch_dtype(tensor.dtype)
        assert dtype is not None
        properties = TensorProperties(dtype=dtype)
        described[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        entries += [
            (MetadataIndex(name, torch.Size(offsets), number), file)
            for number, (offsets, (_, file)) in enumerate(tensor.boxes.items())
        ]
    for name, file in values.items():
        described[name] = BytesStorageMetadata()
        entries.append((MetadataIndex(name), file))
    missing = [f"{index.fqn}: {file}" for index, file in entries if not (folder / file).is_file()]
    if missing:
        raise CorruptCheckpointError.listing(f"{folder}: files were not written", missing)
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    metadata = Metadata(described, planner_data={name: tuple(paths[name]) for name in described})
    writer.finish(metadata, [[_result(folder, index, file) for index, file in entries]])


def _result(folder: Path, index: MetadataIndex, file: str) -> WriteResult:
    size = (folder / file).stat().st_size
    return WriteResult(index, size, _StorageInfo(file, 0, size))
