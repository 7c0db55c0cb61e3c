"""An open checkpoint: look at it, slice it, verify it, without loading it.

`Checkpoint` is a mapping from leaf name to `StoredArray` or Python value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from math import prod

from xckpt.core.dtypes import item_size
from xckpt.core.manifest.entries import (
    BytesEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    ZarrArray,
    arrays,
)
from xckpt.core.metadata import Metadata
from xckpt.core.tree import unflatten
from xckpt.core.values import Value, decode_content, decode_value
from xckpt.errors import XckptError
from xckpt.options import LoadOptions, Progress
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.chunk import ChunkSource, chunks_of
from xckpt.storage.chunks.requests import ChunkRequest
from xckpt.storage.chunks.window import ChunkWindow, Views
from xckpt.storage.read_checkpoint import ZarrStorageReader
from xckpt.storage.stored_array import StoredArray


class Checkpoint(Mapping[str, StoredArray | Value]):
    """A committed checkpoint, open for reading: leaf name -> stored array or Python value.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://open", {"step": 7, "w": np.zeros(3)}, metadata={"run": "a"})
        >>> checkpoint = xckpt.open("memory://open")
        >>> list(checkpoint), checkpoint["step"], checkpoint.user_metadata
        (['step', 'w'], 7, {'run': 'a'})
        >>> checkpoint.verify()
        []
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        reader = ZarrStorageReader(path, options=options)
        self.metadata: Metadata = reader.set_up_storage_reader(reader.read_metadata(), 1)
        """What the checkpoint says about its leaves."""
        assert reader.source is not None
        self.location = reader.location
        self.options = reader.options
        self._reader = reader
        self._source: ChunkSource = reader.source
        self._entries = {leaf.name: leaf for leaf in self.manifest.leaves}

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is stored."""
        return self._source.manifest

    @property
    def chunk_source(self) -> ChunkSource:
        """Reads and verifies single chunks."""
        return self._source

    @property
    def user_metadata(self) -> object:
        """What the caller passed as ``metadata=`` when saving."""
        return self.manifest.user

    @cached_property
    def _arrays(self) -> dict[str, list[ZarrArray]]:
        by_leaf: dict[str, list[ZarrArray]] = {}
        for array in arrays(self.manifest):
            by_leaf.setdefault(array.leaf, []).append(array)
        return by_leaf

    @property
    def tree(self) -> object:
        """The saved containers, with a stored array or value for each leaf."""
        return unflatten(dict(self.items()), self.metadata.containers)

    def __getitem__(self, name: str) -> StoredArray | Value:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(f"{name!r} is no leaf of {self.location}")
        if isinstance(entry, ValueEntry):
            return decode_value(entry.type, entry.value)
        if isinstance(entry, BytesEntry):
            return self._value_of(entry)
        return self._stored(entry)

    def _stored(self, entry: TensorEntry) -> StoredArray:
        pieces = tuple(self._arrays.get(entry.name, ()))
        return StoredArray(
            entry.name,
            entry.shape,
            entry.dtype,
            pieces,
            entry.sharding,
            entry.annotation,
            self._source,
        )

    def _value_of(self, entry: BytesEntry) -> Value:
        with self._source.integrity.noticing_replacement():
            content = self._reader.read_bytes(entry)
        return decode_content(entry.name, entry.type, content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.location}: {len(self)} leaves>"

    def verify(self, progress: Callable[[Progress], None] | None = None) -> list[str]:
        """Read everything and compare it with what was saved.

        Returns:
            A line for each thing that is wrong; empty if the checkpoint is whole.
        """
        integrity = self._source.integrity
        problems = integrity.altered_documents()
        try:
            digests = integrity.digest_file_problem()
        except XckptError as error:
            digests = str(error)
        if digests:
            return [f"{digests}; without it no chunk can be verified", *problems]
        damaged: list[str] = []
        stored = list(arrays(self.manifest))
        total = sum(prod(array.shape) * item_size(array.dtype) for array in stored)
        with ChunkWindow(
            self._source,
            Views(),
            threads=self.options.threads,
            budget=self.options.memory_bytes,
            progress=ProgressCounter(total, progress),
            on_error=lambda error: damaged.append(str(error)),
        ) as window:
            for array in stored:
                try:
                    integrity.prepare([array])
                except XckptError as error:
                    damaged.append(str(error))
                    continue
                for chunk in chunks_of(array):
                    window.submit(ChunkRequest(chunk))
        return problems + sorted(damaged)
