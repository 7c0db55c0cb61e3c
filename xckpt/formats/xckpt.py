"""An xckpt checkpoint as a source of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import BytesEntry
from xckpt.core.metadata import Sharding, TensorStorageMetadata
from xckpt.formats.source import Opaque, TensorSource, metadata_texts
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.array import digest_bytes
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.chunks.read_chunks import read_boxes
from xckpt.storage.stored_array import StoredArray


class XckptSource(TensorSource):
    """The tensors of an xckpt checkpoint; a `TensorSource`.

    Args:
        path: where the checkpoint is; see `xckpt.save`.
        options: memory maps and threads.
        opaque: give objects that were serialised as `Opaque` ones; by default they are bytes.

    Raises:
        NotACheckpointError: no committed checkpoint is there.
        MappingError: two leaves have one mapping name.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://a-source", {"w": np.arange(6.0).reshape(2, 3), "step": 7})
        >>> source = XckptSource("memory://a-source")
        >>> source.specs, source.values
        ({'w': TensorSpec(shape=(2, 3), dtype='float64')}, {'step': 7})
        >>> row = np.empty((1, 3))
        >>> source.read("w", Box((1, 0), (1, 3)), row)
        >>> row
        array([[3., 4., 5.]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: LoadOptions | None = None,
        opaque: bool = False,
    ) -> None:
        self.checkpoint: Final = Checkpoint(path, options=options)
        """The open checkpoint."""
        self._opaque = {
            entry.name
            for entry in self.checkpoint.manifest.leaves
            if opaque and isinstance(entry, BytesEntry) and entry.type == "opaque"
        }
        self.leaf_names: Mapping[str, str] = by_mapping_name(self.checkpoint)
        """Mapping name -> leaf name."""
        described = self.checkpoint.metadata.state_dict_metadata
        self._tensors = {
            name: cast(StoredArray, self.checkpoint[leaf])
            for name, leaf in self.leaf_names.items()
            if isinstance(described[leaf], TensorStorageMetadata)
        }
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(tuple(stored.shape), stored.dtype_name)
            for name, stored in self._tensors.items()
        }
        self.containers: Mapping[str, str] = self.checkpoint.metadata.containers
        self.shardings: Mapping[str, Sharding] = {
            name: t.sharding for name, t in self._tensors.items() if t.sharding
        }
        self.annotations: Mapping[str, str] = {
            name: t.annotation for name, t in self._tensors.items() if t.annotation
        }
        self.metadata: Mapping[str, str] = metadata_texts(self.checkpoint.user_metadata)

    @cached_property  # An attribute of other sources: here long values would have to be read first.
    def values(self) -> Mapping[str, object]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name -> every leaf that is a Python value; long ones are read when this is asked for."""
        return {
            name: self._value(leaf)
            for name, leaf in self.leaf_names.items()
            if name not in self._tensors
        }

    def _value(self, leaf: str) -> object:
        if leaf not in self._opaque:
            return self.checkpoint[leaf]
        return Opaque(lambda: cast(bytes, self.checkpoint[leaf]))

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read so far."""
        return self.checkpoint.chunk_source.bytes_read

    def chunks(self, name: str) -> tuple[int, ...]:
        """The chunk shape; of a leaf in pieces that of its first."""
        stored = self._tensors[name]
        if not stored.pieces:
            return tuple(max(1, size) for size in stored.shape)
        return stored.pieces[0].chunk

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor, verified; see `TensorSource.read`."""
        self._tensors[name].read(box, into)

    def read_all(self, wanted: Iterable[tuple[str, Box, NDArray[np.generic]]]) -> None:
        """Read several boxes, verified, each chunk once; what lies in a pack in long ranges."""
        boxes = [(self._tensors[name].pieces, box, into) for name, box, into in wanted]
        self.checkpoint.location.access.start()
        read_boxes(self.checkpoint.chunk_source, boxes)

    def identity(self) -> bytes:
        """The digest of the manifest, which has the digest of all digests in it."""
        return digest_bytes(msgspec.json.encode(self.checkpoint.manifest))

    def close(self) -> None:
        """Nothing to do: no file stays open."""
