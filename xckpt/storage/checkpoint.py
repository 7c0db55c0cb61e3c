"""An open checkpoint: look at it, slice it, verify it, without loading it.

`Checkpoint` is a mapping from leaf name to `StoredArray` (`xckpt.storage.stored_array`) or Python
value, and can be asked for sub-trees (`xckpt.storage.stored_tree`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from math import prod
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.manifest.entries import BytesEntry, Manifest, ValueEntry, arrays
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.problem import Problem
from xckpt.core.text.arguments import check_function
from xckpt.core.text.shown import readable_bytes
from xckpt.core.values import Value, decode_content, decode_value
from xckpt.engine.limits import not_compiled
from xckpt.errors import LeafTooLargeError, XckptError
from xckpt.options import LoadOptions
from xckpt.progress import Progress
from xckpt.storage.array import DIGEST_BYTES
from xckpt.storage.budget import ProgressCounter
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.requests import FEWEST_CHUNKS, ChunkRequest, chunks_of
from xckpt.storage.chunks.window import ChunkWindow
from xckpt.storage.contents.unopened import or_unopened
from xckpt.storage.integrity import Integrity
from xckpt.storage.location import Location, check_process, storage_errors
from xckpt.storage.read_checkpoint import ZarrStorageReader
from xckpt.storage.refusals import kind_of, replaced
from xckpt.storage.stored_array import StoredArray
from xckpt.storage.stored_tree import Leaf, StoredTree

MOST_PROBLEMS = 10_000
"""Damaged chunks that `Checkpoint.verify` lists."""
NO_MORE = "the others were not looked at"
AT_A_TIME = 1 << 12
"""Chunks whose digests it fetches at a time."""

MOST_DIGESTS = 8
"""How many times ``memory_bytes`` the digests may take: with 256 MiB, those of 2**27 chunks."""


class _TooManyProblems(Exception):
    """Raised once `MOST_PROBLEMS` were found."""


class Checkpoint(StoredTree):
    """A committed checkpoint, open for reading: leaf name -> stored array or Python value.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://open", {"step": 7, "w": np.zeros(3)}, metadata={"run": "a"})
        >>> checkpoint = xckpt.open("memory://open")
        >>> list(checkpoint), checkpoint["step"], checkpoint.user_metadata
        (['step', 'w'], 7, {'run': 'a'})
        >>> checkpoint.verify()
        []
        >>> with xckpt.open("memory://open") as checkpoint:
        ...     checkpoint.array("w")[1:]
        array([0., 0.])
    """

    format: str = "xckpt"
    """The format in which the checkpoint was written; see `xckpt.load` for the others that are
    read."""

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        reader = ZarrStorageReader(path, options=options)
        metadata = reader.set_up_storage_reader(reader.read_metadata(), 1)
        super().__init__(self._leaf, metadata, str(reader.location))
        self.location: Location = reader.location
        self.options: LoadOptions = reader.options
        self.chunk_source: ChunkSource = reader.source
        """Reads and verifies single chunks."""
        self.manifest: Manifest = reader.source.manifest
        """The manifest as it is stored."""
        self.user_metadata: object = self.manifest.user
        """What the caller passed as ``metadata=`` when saving."""
        self._reader = reader
        self._entries = reader.entries

    def _leaf(self, name: str) -> Leaf:
        """The leaf of a name that there is."""
        if self.chunk_source.closed:
            raise ValueError(f"{self.location} is closed; open it again")
        entry = self._entries[name]
        if isinstance(entry, ValueEntry):
            return decode_value(entry.type, entry.value)
        if isinstance(entry, BytesEntry):
            self.location.access.start()
            content = self._reader.read_bytes(entry)
            return cast(Value, decode_content(entry.name, entry.type, content))
        return StoredArray(
            entry.name,
            entry.shape,
            entry.dtype,
            entry.sharding,
            entry.annotation,
            self.chunk_source,
            self.options,
        )

    def close(self) -> None:
        """Release the storage; nothing more can be read, through its arrays neither."""
        self.chunk_source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        options = replace(self.options, progress=None)
        stored = self.chunk_source.integrity.stored
        return _reopened, (str(self.location), stored, options)

    @not_compiled
    def verify(self, progress: Callable[[Progress], None] | None = None) -> list[Problem]:
        """Read everything and compare it with what was saved.

        Returns:
            A problem, which prints as a line, for each thing that is wrong; empty if the
            checkpoint is whole. Its ``kind`` is ``"chunk"`` (with leaf and box), ``"document"``
            (a zarr.json, or a pack with more than its chunks) or ``"digests"``. What may be whole
            has another: ``"unreadable"`` if the storage refused to have it read (no permission, an
            error of the disk), ``"memory"`` if this reader has too little. After `MOST_PROBLEMS`
            chunks no more are read, and likewise of documents.

        Raises:
            LeafTooLargeError: the manifest claims so many chunks that their digests take more than
                `MOST_DIGESTS` times ``memory_bytes``: a manifest of a few bytes can claim billions.
                However little memory there is, `FEWEST_CHUNKS` are allowed.
            CheckpointReplacedError: another checkpoint is there by now, or none.
            StorageError: the storage gave no answer in time, which says nothing about the
                checkpoint.
        """
        check_function("verify", "progress", "a function of an xckpt.Progress", progress)
        check_process()
        self._check_chunks()
        self.location.access.start()
        integrity = self.chunk_source.integrity
        integrity.ask_side_files()
        problems = integrity.altered_documents(MOST_PROBLEMS)
        if len(problems) >= MOST_PROBLEMS:
            text = f"{len(problems):,} zarr.json are altered or unreadable; {NO_MORE}"
            problems.append(Problem(kind=problems[-1].kind, text=text))
        kind = "digests"
        try:
            unusable = integrity.side_file_problem()
        except XckptError as error:
            self._refuse_silence(error)
            kind = kind_of(error, kind)
            unusable = str(error)
        if unusable:
            text = f"{unusable}; without it no chunk can be verified"
            problems.insert(0, Problem(kind=kind, text=text))
        else:
            problems += _longer_packs(integrity) + self._problems_of_chunks(progress)
        if problems:
            integrity.refuse_replaced()
        return problems

    def _problems_of_chunks(self, progress: Callable[[Progress], None] | None) -> list[Problem]:
        found = self._unverified_chunks(progress)
        if len(found) >= MOST_PROBLEMS:
            text = f"{len(found):,} chunks are damaged or unreadable; {NO_MORE}"
            return [*sorted(found), Problem(kind=found[-1].kind, text=text)]
        return sorted(found)

    def _unverified_chunks(self, progress: Callable[[Progress], None] | None) -> list[Problem]:
        found: list[Problem] = []

        def note(error: XckptError) -> None:
            self._refuse_silence(error)
            found.extend(_problems_of(error))
            if len(found) >= MOST_PROBLEMS:
                raise _TooManyProblems

        total = sum(prod(array.shape) * item_size(array.dtype) for array in arrays(self.manifest))
        destinations: list[NDArray[np.generic]] = []  # What is read is not kept.
        with (
            contextlib.suppress(_TooManyProblems),
            ChunkWindow(
                self.chunk_source,
                destinations.__getitem__,
                threads=self.options.threads,
                budget=self.options.memory_bytes,
                progress=ProgressCounter(total, progress),
                on_error=note,
            ) as window,
        ):
            chunks = chain.from_iterable(map(chunks_of, arrays(self.manifest)))
            requests = map(ChunkRequest, chunks)
            while not window.pool.failed and (some := list(islice(requests, AT_A_TIME))):
                new = {request.chunk.array.path: request.chunk.array for request in some}
                try:
                    self.chunk_source.integrity.prepare([*new.values()])
                except XckptError as error:
                    note(error)
                    continue
                window.submit_all(some)
        return found

    def _check_chunks(self) -> None:
        chunks, memory = count_chunks(self.manifest), self.options.memory_bytes
        if chunks * DIGEST_BYTES > MOST_DIGESTS * memory and chunks > FEWEST_CHUNKS:
            raise LeafTooLargeError(
                f"{self.location}: its manifest claims {chunks:,} chunks, whose digests "
                f"take {readable_bytes(chunks * DIGEST_BYTES)}, more than {MOST_DIGESTS} times "
                f"memory_bytes ({readable_bytes(memory)}); raise LoadOptions(memory_bytes=)"
            )

    def _refuse_silence(self, error: XckptError) -> None:
        """Go on only if the storage still answers."""
        if self.location.access.is_over:
            raise error


@or_unopened(Checkpoint)
def _reopened(path: str, stored: tuple[int, bytes], options: LoadOptions) -> Checkpoint:
    """A checkpoint that was pickled, opened again; ``stored`` tells its manifest.

    Where this process finds none, or another, its first use raises that.
    """
    checkpoint = Checkpoint(path, options=options)
    if checkpoint.chunk_source.integrity.stored != stored:
        raise replaced(path, "after the open checkpoint was pickled")
    return checkpoint


def _longer_packs(integrity: Integrity) -> list[Problem]:
    """A problem for each local pack that was made longer.

    Raises:
        StorageError: one cannot be read.
    """
    with storage_errors(integrity.root):
        longer = integrity.places.longer_packs(integrity.manifest)
    text = "altered: it is longer than the chunks in it"
    return [Problem(kind="document", text=text, line=f"{key}: {text}") for key in longer]


def _problems_of(error: XckptError) -> tuple[Problem, ...]:
    return error.problems or (Problem(kind=kind_of(error, ""), text=str(error)),)
