"""Another library's checkpoint, opened: a `Checkpoint` over a source of tensors.

1. `open_foreign` finds the format; objects that are neither tensors nor values are left out, and a
   warning names them.
2. `manifest_of` describes the source as a manifest would: so any checkpoint can be listed, drawn
   and compared in the same way.
3. A `SourceArray` reads from the source. `SourceCheckpoint.verify` reads everything; what that
   proves depends on the format's own checksums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.slabs import blocks
from xckpt.core.manifest.entries import Manifest, TensorEntry, ValueEntry, leaf_arrays
from xckpt.core.problem import Problem
from xckpt.core.text.arguments import check_function
from xckpt.core.values import decode_value, encode_value, value_kind
from xckpt.errors import CorruptCheckpointError, NotACheckpointError, XckptError
from xckpt.formats.detect import open_source
from xckpt.formats.reader import PART_BYTES, FormatsAt, SourceReader
from xckpt.formats.source import TensorSource, user_of
from xckpt.options import LoadOptions
from xckpt.progress import Progress
from xckpt.storage.budget import Pool, ProgressCounter
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.contents.unopened import or_unopened
from xckpt.storage.location import Location
from xckpt.storage.refusals import kind_of, replaced
from xckpt.storage.stored_array import StoredArray
from xckpt.storage.stored_tree import Leaf, StoredTree


def open_foreign(
    path: str | os.PathLike[str], *, options: LoadOptions | None = None
) -> SourceCheckpoint | None:
    """Open another library's checkpoint; None where there is none of a known format.

    Raises:
        XckptError: the format's own errors.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": np.arange(6, dtype=np.int16).reshape(2, 3)}, "opened.safetensors")
        >>> checkpoint = open_foreign("opened.safetensors")
        >>> assert checkpoint is not None
        >>> checkpoint.format, checkpoint["w"][1], checkpoint.verify()
        ('safetensors', array([3, 4, 5], dtype=int16), [])
    """
    there = FormatsAt(path, options)
    format = there.find()
    return None if format is None else _opened(there, format, options)


def _opened(there: FormatsAt, format: str, options: LoadOptions | None) -> SourceCheckpoint:
    source = open_source(there.path, format, options=options, skip_objects=True)
    return SourceCheckpoint(there.path, format, source, options)


def manifest_of(source: TensorSource) -> Manifest:
    """The manifest that a source would have.

    Example:
        >>> import xckpt
        >>> from xckpt.formats.xckpt import XckptSource
        >>> _ = xckpt.save("memory://described", {"w": np.zeros((2, 3)), "step": 7})
        >>> [leaf.name for leaf in manifest_of(XckptSource("memory://described")).leaves]
        ['w', 'step']
    """
    leaves = [_entry(source, name) for name in source.leaf_names]
    return Manifest(
        tuple(leaves), "", containers=dict(source.containers), user=user_of(source.metadata)
    )


def _entry(source: TensorSource, name: str) -> TensorEntry | ValueEntry:
    leaf, spec = source.leaf_names[name], source.specs.get(name)
    if spec is None:
        value = source.values[name]
        return ValueEntry(leaf, str(value_kind(value)), encode_value(value))
    chunk = source.chunks(name)
    if all(size == 1 for size in chunk):  # Any part is as good.
        chunk = spec.shape
    chunk = tuple(max(1, min(each)) for each in zip(chunk, spec.shape, strict=True))
    annotation = source.annotations.get(name, "")
    sharding = source.shardings.get(name)
    return TensorEntry(
        leaf, spec.dtype, spec.shape, chunk, sharding=sharding, annotation=annotation
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SourceArray(StoredArray):
    """A tensor of another library's checkpoint.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": np.arange(6).reshape(2, 3)}, "an-array.safetensors")
        >>> array = open_foreign("an-array.safetensors").array("w")
        >>> array.shape, array[1, :2].tolist()
        ((2, 3), [3, 4])
    """

    home: SourceCheckpoint
    """The checkpoint that it is in."""
    stored: Sequence[ZarrArray]
    """The grid of its chunks in the files, as far as a grid can express it."""
    read_box: Callable[[Box, NDArray[np.generic]], None]
    """Reads a box of it into memory."""

    @property
    def pieces(self) -> Sequence[ZarrArray]:
        """See `StoredArray.pieces`."""
        return self.stored

    def read(self, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box into memory; see `StoredArray.read`."""
        self._read(box, into)
        self.home.check_unchanged(self.name)

    def fill(self, box: Box, into: NDArray[np.generic]) -> None:
        """Read a box into memory by several threads; see `StoredArray.fill`."""
        most = max(1, PART_BYTES // into.dtype.itemsize)
        cuts = [*blocks(box, self.block(), most)]
        if len(cuts) < 2:
            self.read(box, into)
            return
        with Pool(threads=self._options.threads, budget=self._options.memory_bytes) as pool:
            for cut in cuts:
                pool.submit(partial(self._read, cut, into[(*cut.slices(box.offsets), ...)]))
        self.home.check_unchanged(self.name)

    def _read(self, box: Box, into: NDArray[np.generic]) -> None:
        self.home.begin()
        try:
            if box.elements:
                self.read_box(box, into)
        except CorruptCheckpointError:
            self.home.check_unchanged(self.name)  # its writer may have shortened it
            raise

    def __reduce__(self) -> tuple[object, ...]:
        return _reopened_array, (self.home, self.name)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        return str(self.home.location), self.home.source.identity().hex(), self.name


@or_unopened(StoredArray)
def _reopened_array(home: SourceCheckpoint, name: str) -> StoredArray:
    """A stored array that was pickled, in the checkpoint that is opened again."""
    return home.array(name)


class SourceCheckpoint(Checkpoint):
    """Another library's checkpoint, open for reading; see `Checkpoint`.

    Args:
        path: where it is.
        format: its format, for messages.
        source: reads it.
        options: threads and memory.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"w": np.arange(6).reshape(2, 3)}, "a-file.safetensors")
        >>> checkpoint = open_foreign("a-file.safetensors")
        >>> checkpoint.format, list(checkpoint), checkpoint.verify()
        ('safetensors', ['w'], [])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str,
        source: TensorSource,
        options: LoadOptions | None,
    ) -> None:
        reader = SourceReader(lambda: source, os.fspath(path), options=options)
        self.format: str = format
        self.path: Final = os.fspath(path)
        self.location: Location = Location.parse(path)
        self.options: LoadOptions = reader.options
        metadata = reader.set_up_storage_reader(reader.read_metadata(), 1)
        StoredTree.__init__(self, self._leaf, metadata, str(self.location))
        self.manifest: Manifest = manifest_of(source)
        self.user_metadata: object = self.manifest.user
        self.source = source
        self._state = b"" if self.location.bucket else source.state()
        self.closed: bool = False
        """Whether `close` was called."""
        self._entries = {leaf.name: leaf for leaf in self.manifest.leaves}
        self._names = {leaf: name for name, leaf in source.leaf_names.items()}

    @property  # What a checkpoint of xckpt has as an attribute raises here.
    def chunk_source(self) -> NoReturn:  # pyright: ignore[reportIncompatibleVariableOverride]
        """There is none.

        Raises:
            NotACheckpointError: always.
        """
        raise NotACheckpointError(
            f"{self.location} is a checkpoint of the format {self.format}, which has no digests of "
            f"chunks; convert it to an xckpt checkpoint first"
        )

    def __reduce__(self) -> tuple[object, ...]:
        options = replace(self.options, progress=None)
        return _reopened, (str(self.path), self.format, self.source.identity(), options)

    def _leaf(self, name: str) -> Leaf:
        self.check_open()
        entry = self._entries[name]
        if isinstance(entry, ValueEntry):
            return decode_value(entry.type, entry.value)
        assert isinstance(entry, TensorEntry)
        return SourceArray(
            name=name,
            shape=entry.shape,
            dtype_name=entry.dtype,
            stored=tuple(leaf_arrays(entry)),
            sharding=entry.sharding,
            annotation=entry.annotation,
            _source=cast(Any, None),  # It is read by `read_box`.
            _options=self.options,
            home=self,
            read_box=partial(self.source.read, self._names[name]),
        )

    def check_open(self) -> None:
        """Refuse to read once it is closed.

        Raises:
            ValueError: it is.
        """
        if self.closed:
            raise ValueError(f"{self.location} is closed; open it again")

    def check_unchanged(self, name: str | None = None) -> None:
        """Refuse what was read of local files that were written since they were opened.

        An object of a bucket that was replaced refuses the read itself.

        Args:
            name: the leaf that was read; None for all.

        Raises:
            CheckpointReplacedError: they were.
        """
        if self.closed or self.location.bucket:
            return
        tensor = None if name is None else self._names[name]
        written = self.source.is_written(self._state, tensor)
        if written and not self.closed:  # `close` changes what the source says
            raise replaced(self.path, "after it was opened")

    def begin(self) -> None:
        """A read begins: a bucket that gave no answer in the last one is asked again.

        Raises:
            ValueError: the checkpoint is closed.
        """
        self.check_open()
        self.location.access.start()

    def close(self) -> None:
        """Release the files; nothing can be read after that, not even through its arrays."""
        self.closed = True
        self.source.close()

    def verify(self, progress: Callable[[Progress], None] | None = None) -> list[Problem]:
        """Read everything, which checks the format's own checksums; many formats have none.

        Returns:
            A problem for each part that is damaged; its ``kind`` is ``"chunk"``. A part that may be
            whole has another kind: ``"unreadable"`` if the storage refused the read, ``"memory"``
            if this reader has too little memory.

        Raises:
            StorageError: a file was written meanwhile.
            CheckpointReplacedError: a local file was written since it was opened.
        """
        check_function("verify", "progress", "a function of an xckpt.Progress", progress)
        self.begin()
        self.check_unchanged()
        source, problems, state = self.source, list[Problem](), self.source.state()
        counter = ProgressCounter(sum(spec.nbytes for spec in source.specs.values()), progress)

        def read(name: str, box: Box, nbytes: int) -> None:
            try:
                source.check(name, box)
            except XckptError as error:
                leaf = source.leaf_names[name]
                problems.append(Problem(leaf, box, kind=kind_of(error, "chunk"), text=str(error)))
            counter.add(nbytes)

        threads = self.options.threads or source.threads
        with Pool(threads=threads, budget=self.options.memory_bytes) as pool:
            for name, spec in source.specs.items():
                item = item_size(spec.dtype)
                most = max(1, PART_BYTES // item)
                for box in blocks(Box.whole(spec.shape), source.chunks(name), most):
                    nbytes = box.elements * item
                    pool.submit(partial(read, name, box, nbytes), nbytes)
        source.check_unchanged(state, self.path)
        return sorted(problems)


@or_unopened(SourceCheckpoint)
def _reopened(path: str, format: str, identity: bytes, options: LoadOptions) -> SourceCheckpoint:
    """A checkpoint that was pickled, opened again.

    Where this process cannot, or another is there by now, its first use raises that.
    """
    checkpoint = _opened(FormatsAt(path, options), format, options)
    if checkpoint.source.identity() != identity:
        raise replaced(path, "after the open checkpoint was pickled")
    return checkpoint
