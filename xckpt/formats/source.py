"""Where a conversion reads from: the protocol of a source, and the source over a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.manifest.entries import BytesEntry
from xckpt.core.metadata import JSONValue, Sharding, TensorStorageMetadata
from xckpt.formats.opaque import Opaque
from xckpt.mapping.names import by_mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.integrity import digest_bytes
from xckpt.storage.stored_array import StoredArray

__all__ = ["USER", "TensorSource", "XckptSource", "metadata_texts"]

USER = "xckpt.user"
"""The key of `TensorSource.metadata` that holds a checkpoint's user metadata as JSON."""


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that can be read by the box, wherever they are stored.

    Names are mapping names (`xckpt.mapping.names`).
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and dtype of every tensor."""
        ...

    @property
    def values(self) -> Mapping[str, object]:
        """Name -> every leaf that is a Python value."""
        ...

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the file says about itself, as text."""
        ...

    def chunks(self, name: str) -> tuple[int, ...]:
        """Elements of each dimension that are cheap to read together.

        Boxes that begin and end at multiples of these read no element in vain. The tensor's own
        shape where only the whole can be read; 1 in each dimension where any part is as good.
        """
        ...

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box of a tensor; called from several threads.

        Args:
            name: which tensor.
            box: which elements.
            into: writable memory of the box's sizes and the tensor's dtype, of any strides.

        Raises:
            CorruptCheckpointError: what is stored is not what was saved; names leaf and range.
            StorageError: the storage refused.
        """
        ...

    def identity(self) -> bytes:
        """A digest of what the source is: another where its contents may be others."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...


def metadata_texts(user: JSONValue) -> dict[str, str]:
    """User metadata as texts by name; as one text of JSON where they are anything else.

    Example:
        >>> metadata_texts({"by": "me"}), metadata_texts([1]), metadata_texts(None)
        ({'by': 'me'}, {'xckpt.user': '[1]'}, {})
    """
    if user is None:
        return {}
    if isinstance(user, dict) and all(isinstance(value, str) for value in user.values()):
        return cast(dict[str, str], user)
    return {USER: msgspec.json.encode(user).decode()}


class XckptSource:
    """The tensors of a checkpoint of ours; a `TensorSource`.

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
        self.checkpoint = Checkpoint(path, options=options)
        """The open checkpoint."""
        self._opaque = {
            entry.name
            for entry in self.checkpoint.manifest.leaves
            if opaque and isinstance(entry, BytesEntry) and entry.type == "opaque"
        }
        self.leaf_names = by_mapping_name(self.checkpoint)
        """Mapping name -> leaf name."""
        self._tensors = {
            name: cast(StoredArray, self.checkpoint[leaf])
            for name, leaf in self.leaf_names.items()
            if isinstance(self._described(leaf), TensorStorageMetadata)
        }

        self._specs = {
            name: TensorSpec(tuple(stored.shape), stored.dtype)
            for name, stored in self._tensors.items()
        }

    def _described(self, leaf: str) -> object:
        return self.checkpoint.metadata.state_dict_metadata[leaf]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name -> shape and dtype of every tensor."""
        return self._specs

    @property
    def values(self) -> Mapping[str, object]:
        """Name -> every leaf that is a Python value."""
        return self._values

    @cached_property
    def _values(self) -> Mapping[str, object]:
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
    def containers(self) -> Mapping[str, str]:
        """Name of each container of the saved tree that is no plain dict -> its kind."""
        return self.checkpoint.metadata.containers

    @cached_property
    def shardings(self) -> Mapping[str, Sharding]:
        """Name -> the sharding that wrote a tensor."""
        return {name: stored.sharding for name, stored in self._tensors.items() if stored.sharding}

    @cached_property
    def annotations(self) -> Mapping[str, str]:
        """Name -> what a tensor is beyond an array, such as ``"prng_key:threefry2x32"``."""
        return {
            name: stored.annotation for name, stored in self._tensors.items() if stored.annotation
        }

    @property
    def metadata(self) -> Mapping[str, str]:
        """The user's metadata: as they are if they are texts by name, else as JSON."""
        return metadata_texts(cast(JSONValue, self.checkpoint.user_metadata))

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

    def identity(self) -> bytes:
        """The digest of the manifest, which has the digest of all digests in it."""
        return digest_bytes(msgspec.json.encode(self.checkpoint.manifest))

    def close(self) -> None:
        """Nothing is held open beyond this object's life."""
