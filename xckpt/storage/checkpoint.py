"""An open checkpoint: look at it, slice it, verify it, without loading it.

`Checkpoint` is a mapping from leaf name to `StoredArray` (`xckpt.storage.stored_array`) or Python
value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.manifest.entries import BytesEntry, TensorEntry, ValueEntry, arrays
from xckpt.core.metadata import Metadata
from xckpt.core.near_names import no_such_name
from xckpt.core.problem import Problem
from xckpt.core.text.shown import ShownLeaf, outline, total, tree_html
from xckpt.core.tree import unflatten
from xckpt.core.values import Value, decode_content, decode_value
from xckpt.errors import StorageError, XckptError
from xckpt.options import LoadOptions, Progress
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.chunk import chunks_of
from xckpt.storage.chunks.window import ChunkRequest, ChunkWindow
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

    format = "xckpt"
    """What the checkpoint was written as; see `xckpt.load` for others that are read."""

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        reader = ZarrStorageReader(path, options=options)
        self.metadata: Metadata = reader.set_up_storage_reader(reader.read_metadata(), 1)
        """What the checkpoint says about its leaves."""
        self.location = reader.location
        self.options = reader.options
        self.chunk_source = reader.source
        """Reads and verifies single chunks."""
        self.manifest = reader.source.manifest
        """The manifest as it is stored."""
        self.user_metadata: object = self.manifest.user
        """What the caller passed as ``metadata=`` when saving."""
        self._reader = reader
        self._entries = {leaf.name: leaf for leaf in self.manifest.leaves}

    @property
    def tree(self) -> object:
        """The saved containers, with a stored array or value for each leaf."""
        return unflatten(dict(self.items()), self.metadata.containers)

    def __getitem__(self, name: str) -> StoredArray | Value:
        entry = self._entries.get(name)
        if entry is None:
            raise KeyError(no_such_name(name, self._entries, str(self.location)))
        if isinstance(entry, ValueEntry):
            return decode_value(entry.type, entry.value)
        if isinstance(entry, BytesEntry):
            return decode_content(entry.name, entry.type, self._reader.read_bytes(entry))
        return StoredArray(
            entry.name,
            entry.shape,
            entry.dtype,
            self.chunk_source.arrays.get(name, ()),
            entry.sharding,
            entry.annotation,
            self.chunk_source,
            self.options,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[object, ...]:
        options = replace(self.options, progress=None)
        return _reopened, (str(self.location), self.manifest.digests, options)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.location}: {total(self._shown())}>"

    def __str__(self) -> str:
        return "\n  ".join([repr(self), *outline(self._shown())])

    def _repr_html_(self) -> str:
        return tree_html(str(self.location), self._shown())

    def _shown(self) -> list[ShownLeaf]:
        return [_shown(leaf) for leaf in self.manifest.leaves]

    def verify(self, progress: Callable[[Progress], None] | None = None) -> list[Problem]:
        """Read everything and compare it with what was saved.

        Returns:
            A problem, which prints as a line, for each thing that is wrong; empty if the
            checkpoint is whole. Its ``kind`` is ``"chunk"`` (with leaf and box), ``"document"``
            (a zarr.json) or ``"digests"``.
        """
        integrity = self.chunk_source.integrity
        problems = integrity.altered_documents()
        try:
            digests = integrity.digest_file_problem()
        except XckptError as error:
            digests = str(error)
        if digests:
            text = f"{digests}; without it no chunk can be verified"
            return [Problem(kind="digests", text=text), *problems]
        damaged: list[Problem] = []
        stored = list(arrays(self.manifest))
        total = sum(prod(array.shape) * item_size(array.dtype) for array in stored)
        destinations: list[NDArray[np.generic]] = []  # Nothing is kept of what is read.
        with ChunkWindow(
            self.chunk_source,
            destinations.__getitem__,
            threads=self.options.threads,
            budget=self.options.memory_bytes,
            progress=ProgressCounter(total, progress),
            on_error=lambda error: damaged.extend(_problems_of(error)),
        ) as window:
            for array in stored:
                try:
                    integrity.prepare([array])
                except XckptError as error:
                    damaged.extend(_problems_of(error))
                    continue
                for chunk in chunks_of(array):
                    window.submit(ChunkRequest(chunk))
        return problems + sorted(damaged)


def _reopened(path: str, digests: str, options: LoadOptions) -> Checkpoint:
    """A checkpoint that was pickled, opened again.

    Raises:
        NotACheckpointError: this process finds no checkpoint there.
        StorageError: another checkpoint is there by now.
    """
    checkpoint = Checkpoint(path, options=options)
    if checkpoint.manifest.digests != digests:
        raise StorageError(f"{path} was replaced after the open checkpoint was pickled")
    return checkpoint


def _shown(leaf: TensorEntry | ValueEntry | BytesEntry) -> ShownLeaf:
    if isinstance(leaf, TensorEntry):
        nbytes = prod(leaf.shape) * item_size(leaf.dtype)
        return ShownLeaf(leaf.name, f"{leaf.dtype} {leaf.shape}", nbytes)
    if isinstance(leaf, BytesEntry):
        return ShownLeaf(leaf.name, leaf.type, leaf.size)
    return ShownLeaf(leaf.name, f"{leaf.type} {decode_value(leaf.type, leaf.value)!r}", 0)


def _problems_of(error: XckptError) -> tuple[Problem, ...]:
    return error.problems or (Problem.of(str(error)),)
