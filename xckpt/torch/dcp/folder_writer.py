"""The values and the metadata of a DCP folder whose entries are files of their own.

torch itself writes both: ``.metadata`` is a pickle of torch's own classes. Tensors are written by
`xckpt.formats.torch_save.write`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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
from xckpt.torch.buffers import torch_dtype

__all__ = ["Described", "write_metadata", "write_value"]


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor of the folder."""

    dtype: str
    """The format's name of the element type."""
    shape: tuple[int, ...]
    boxes: Mapping[tuple[int, ...], tuple[tuple[int, ...], str]]
    """Offsets of each box -> its sizes, and its file."""


def write_value(path: Path, value: object) -> None:
    """Write a Python value to its file.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        torch.save(value, file)


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
