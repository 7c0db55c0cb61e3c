"""A folder of torch.distributed.checkpoint (DCP) as a sink.

1. The plan numbers the entries and cuts each tensor into chunks.
2. Each value and each chunk becomes a file of its own, from any thread or process
   (`xckpt.formats.torch_save.write`).
3. At the end ``.metadata`` names every file (`xckpt.formats.dcp.encode`).

torch is not needed.

`dcp.load` finds a tensor under its keys joined with dots, as torch joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.geometry.grid import cells
from xckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from xckpt.formats.dcp.encode import encode
from xckpt.formats.dcp.metadata import DCPMetadata, StoredTensor, Where
from xckpt.formats.flat_names import flat_names
from xckpt.formats.staged_sink import StagedSink, chunk_of, other_files, value_problems
from xckpt.formats.torch_save.write import SAVED_DTYPES, write_saved
from xckpt.mapping.names import keys_of
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.errors import storage_errors

__all__ = ["DCPSink"]

CHUNK_BYTES: Final = 1 << 25
"""Target for a chunk, bytes: a file."""
METADATA: Final = ".metadata"

Shape = tuple[int, ...]


class DCPSink(StagedSink):
    """Writes a folder that `torch.distributed.checkpoint.load` reads.

    Args:
        path: the folder.
        overwrite: replace what is there, if it is such a folder.

    Example:
        >>> sink = DCPSink("for-dcp")
        >>> _ = sink.prepare({"model/w": TensorSpec((2, 2), "float32")}, {"step": 7}, {})
        >>> box = Box((0, 0), (2, 2))
        >>> sink.write("model/w", box, np.eye(2, dtype=np.float32))
        >>> sink.commit()
        >>> from xckpt.formats.dcp.source import DCPSource
        >>> source = DCPSource("for-dcp")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(2, 2), dtype='float32')}, {'step': 7})
    """

    _names: Mapping[str, str]
    _numbers: Mapping[str, int]
    _chunks: Mapping[str, Shape]

    def _plan(self, metadata: Mapping[str, str]) -> object:
        """Number the entries and cut the tensors; DCP has no place for ``metadata``."""
        _check(self._specs, self._values)
        entries = (*self._specs, *self._values)
        self._names = flat_names(entries)
        self._numbers = {name: number for number, name in enumerate(entries)}
        self._chunks = {name: chunk_of(spec, CHUNK_BYTES) for name, spec in self._specs.items()}
        return list(self._chunks.values())

    def _lay_out(self) -> None:
        """Write the values."""
        for name, value in self._values.items():
            path = self.folder / self._file(name)
            with storage_errors(f"{path}: {name}"):
                write_saved(path, value)

    def _open(self) -> None:
        """Nothing is held open: each chunk is a file."""

    def chunks(self, name: str) -> Shape:
        """The shape of a chunk: a file."""
        return self._chunks[name]

    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        for chunk in self._cells(name, box):
            path = self.folder / self._file(name, chunk.offsets)
            part = np.asarray(data[chunk.slices(box.offsets)])
            with storage_errors(f"{path}: {name}"):
                write_saved(path, part)

    def _cells(self, name: str, box: Box) -> Boxes:
        """The chunks of a box that begins and ends with chunks."""
        if not box.elements:
            return Boxes.of((), rank=len(box.sizes))
        return cells(box.offsets, box.ends, self._specs[name].shape, self._chunks[name])[1]

    def _file(self, name: str, offsets: Shape = ()) -> str:
        place = "".join(f"_{offset}" for offset in offsets)
        return f"__0_{self._numbers[name]}{place}.distcp"

    def commit(self) -> None:
        """Write the metadata, sync and rename.

        Raises:
            CorruptCheckpointError: chunks were not written; all are listed.
        """
        with storage_errors(self.folder):
            (self.folder / METADATA).write_bytes(encode(self._described()))
            for path in self.folder.glob(".__0_*"):
                path.unlink()  # A write that was killed has left it.
        super().commit()

    def _described(self) -> DCPMetadata:
        """What ``.metadata`` says.

        Raises:
            CorruptCheckpointError: files are missing; all are listed.
        """
        missing: list[str] = []

        def where(name: str, file: str) -> Where:
            path = self.folder / file
            if not path.is_file():
                missing.append(f"{name}: {file}")
                return Where(file, 0, 0)
            return Where(file, 0, path.stat().st_size)

        tensors: dict[str, StoredTensor] = {}
        for name, spec in self._specs.items():
            flat = self._names[name]
            chunks = self._cells(name, Box.whole(spec.shape))
            places = tuple(where(flat, self._file(name, chunk.offsets)) for chunk in chunks)
            tensors[flat] = StoredTensor(flat, spec.dtype, spec.shape, chunks, places)
        objects = {
            self._names[name]: where(self._names[name], self._file(name)) for name in self._values
        }
        if missing:
            raise CorruptCheckpointError.listing(f"{self.folder}: files were not written", missing)
        paths = {flat: keys_of(name) for name, flat in self._names.items()}
        return DCPMetadata(tensors, objects, paths, tuple(self._names.values()))

    def _close(self) -> None:
        """Nothing is held open."""

    @staticmethod
    def _foreign(path: Path) -> str:
        if not (path / METADATA).is_file():
            return f"it is no DCP folder, which has {METADATA}"
        return other_files(path, lambda name: name == METADATA or name.endswith(".distcp"))


def _check(specs: Mapping[str, TensorSpec], values: Mapping[str, object]) -> None:
    problems = [
        f"{name}: torch cannot save dtype {spec.dtype}"
        for name, spec in specs.items()
        if spec.dtype not in SAVED_DTYPES
    ]
    problems += value_problems(values)
    if problems:
        raise UnsupportedLeafError.listing("DCP cannot carry this", problems)
