"""safetensors files as a source: one file, or several with ``model.safetensors.index.json``.

1. `file_sets` says which files a path means.
2. Each file's header is read and checked (`parse_header`), then compared with the index. All faults
   of all files are one error, before a byte of any tensor is read.
3. A box is read with as few calls as its rows allow (`FileTensor`); nothing is mapped.

The format has no checksums: only the consistency of headers and files is verified.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size, numpy_dtype
from xckpt.core.geometry.box import Box
from xckpt.core.manifest.memory import COPIES, json_bytes
from xckpt.core.names import join_keys
from xckpt.core.values import decode_value
from xckpt.errors import (
    ManifestError,
    StorageError,
    UnsupportedLeafError,
    naming,
)
from xckpt.formats.file_sets import find_files, owners_of
from xckpt.formats.safetensors.header import (
    Header,
    TensorSpan,
    header_length,
    parse_header,
    stated_size,
)
from xckpt.formats.source import TensorSource
from xckpt.formats.strided_ranges import FileTensor, cheap_together, row_major
from xckpt.mapping.names import keys_of, mapping_name
from xckpt.mapping.spec import TensorSpec
from xckpt.options import LoadOptions
from xckpt.storage.foreign.concurrency import map_named, reading_threads
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import RangeFile, open_file
from xckpt.storage.foreign.paths import FilePath, entries_in, existing_path
from xckpt.storage.foreign.versions import version
from xckpt.storage.location import storage_errors

SUFFIX: Final = ".safetensors"
PLACE_BYTES: Final = 320
"""Bytes of memory of a tensor's place in a file, beside its name."""
FORMAT: Final = {"format": "pt"}
"""The text of ``__metadata__`` that files for torch have; it says nothing about the model."""
SHARDS: Final = "DCP_SHARDING_INFO"
"""The text of ``__metadata__`` in which torch says where the parts that a rank has saved begin."""
_BEYOND: Final = re.compile(r'"saved_offsets": \[[^\]]*[1-9]')
_SHARD: Final = re.compile(r"(shard-\d+)-model-.*")
VALUES: Final = "xckpt.values"
"""The text of ``__metadata__`` that holds Python values: JSON, mapping name -> [type, text]."""


class SafetensorsSource(TensorSource):
    """A checkpoint in safetensors files, as a source of tensors.

    A tensor's name is one key; see `xckpt.formats.sink.flat_names`.

    Args:
        path: a file, a folder, or an index.
        options: its ``memory_bytes`` is what the index and the headers may take together.

    Raises:
        NotACheckpointError: nothing is there, or several files that do not belong together.
        ManifestError: a header or the index is damaged, or they contradict each other.
        CorruptCheckpointError: files are missing.
        UnsupportedLeafError: tensors of a dtype that the format lacks.
        StorageError: a file cannot be read.

    Example:
        >>> from safetensors.numpy import save_file
        >>> save_file({"a.b": np.arange(6, dtype=np.int32).reshape(2, 3)}, "small.safetensors")
        >>> source = SafetensorsSource("small.safetensors")
        >>> source.specs
        {'a.b': TensorSpec(shape=(2, 3), dtype='int32')}
        >>> into = np.zeros((2, 1), np.int32)
        >>> source.read("a.b", Box((0, 1), (2, 1)), into)
        >>> into.tolist()
        [[1], [4]]
    """

    def __init__(self, path: str | os.PathLike[str], *, options: LoadOptions | None = None) -> None:
        memory = Allowance.of(options)
        self.path: Final = existing_path(path)
        self.threads: int | None = reading_threads(self.path)
        files = find_files(self.path, SUFFIX, memory)
        named = [(file.name, file) for file in files.paths]
        opened = map_named(self.path, partial(_open, memory=memory), named)
        for file, header, _ in opened:
            _refuse_part(file.path, header.metadata.get(SHARDS))
        # The files' headers, sizes and times of change.
        self._identity = hashlib.sha256(b"".join(state for _, _, state in opened)).digest()
        contents = {file.path: header.places for file, header, _ in opened}
        self._files = {file.path: file for file, _, _ in opened}
        self._places = {
            mapping_name([name]): (self._files[path], contents[path][name])
            for name, path in owners_of(files, contents).items()
        }
        # If several files have a text of the same key, the first one counts.
        texts = dict(
            each
            for _, header, _ in reversed(opened)
            for each in header.metadata.items()
            if each not in FORMAT.items()
        )
        self.values: Mapping[str, object] = _values(self.path, texts.pop(VALUES, None))
        """Python values that xckpt has put there, by mapping name."""
        self.metadata: Mapping[str, str] = texts
        """The other texts that the files carry."""
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(place.shape, place.dtype) for name, (_, place) in self._places.items()
        }
        self.leaf_names: Mapping[str, str] = {
            name: join_keys(keys_of(name)) for name in (*self.specs, *self.values)
        }

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any part is as good; in a bucket what one request brings."""
        file, place = self._places[name]
        strides = row_major(place.shape)
        return cheap_together(place.shape, strides, item_size(place.dtype), file.free_bytes)

    def read(self, name: str, box: Box, into: NDArray[np.generic]) -> None:
        """Fill ``into``, of the box's sizes, with the elements of a box; thread-safe.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            StorageError: it cannot be read.
        """
        file, place = self._places[name]
        with storage_errors(f"{file.path}: {name}"):
            _tensor(file, place).read(box.offsets, into)

    def version(self) -> bytes:
        """A value that changes if a file may have been rewritten; see `TensorSource.version`."""
        return b"".join(map(version, self._files.values()))

    def state(self) -> bytes:
        """A value that changes if a file is written; see `TensorSource.state`."""
        return b"".join(file.state() for file in [*self._files.values()])  # `close` clears it

    def close(self) -> None:
        """Let go of the files: each is closed once no thread reads it any more."""
        self._files.clear()
        self._places.clear()


def _open(path: FilePath, memory: Allowance) -> tuple[RangeFile, Header, bytes]:
    """A file, its header, and its state, which changes with it.

    Raises:
        ManifestError: the header is damaged.
        UnsupportedLeafError: tensors of a dtype that the format lacks.
        StorageError: it is not a plain file, or cannot be read.
    """
    with storage_errors(path):
        if not path.is_file():
            raise StorageError(f"{path} is not a plain file")
        file = open_file(path)
        length = header_length(file.head(8), file.most_bytes)
        what = f"the header of {length:,} bytes"
        with memory.passing() as needed:
            needed.take(COPIES * length, what)
            [text] = file.fetch([(8, 8 + length)])
            needed.take(json_bytes(text) - COPIES * length, what, COPIES * length)
            header = parse_header(text, file.size(lambda: stated_size(text)))
        memory.take(length + PLACE_BYTES * len(header.places), what)
        state = f"{path.name} ".encode() + file.state() + hashlib.sha256(text).digest()
        return file, header, state


def _refuse_part(path: FilePath, offsets: str | None) -> None:
    """Refuse a file that holds what one rank has saved of tensors; the first one's begin at 0.

    Raises:
        UnsupportedLeafError: it is one of several such files.
    """
    shard = _SHARD.fullmatch(path.name)
    if offsets is None or not (shard or _BEYOND.search(offsets)):
        return
    beside = (_SHARD.fullmatch(each.name) for each in entries_in(path.parent, SUFFIX))
    others = {each[1] for each in beside if each and shard and each[1] != shard[1]}
    if others or _BEYOND.search(offsets):
        raise UnsupportedLeafError(
            f"{path}: it holds one rank's parts of tensors, as torch's HuggingFaceStorageWriter "
            "saves them; load all with its HuggingFaceStorageReader, or save with "
            "enable_consolidation=True"
        )


def _tensor(file: RangeFile, place: TensorSpan) -> FileTensor:
    dtype = numpy_dtype(place.dtype)
    return FileTensor(file, place.start, dtype, place.shape, row_major(place.shape))


def _values(path: FilePath, text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    with naming(f"{path}: the values under {VALUES}"):
        try:
            decoded = json.loads(text)
            return {name: decode_value(kind, value) for name, (kind, value) in decoded.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError("damaged") from error
