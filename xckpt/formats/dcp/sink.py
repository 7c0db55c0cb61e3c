"""A folder of torch.distributed.checkpoint (DCP) as a sink.

1. The plan numbers the entries and cuts each tensor into chunks.
2. Each value and each chunk becomes a file of its own, from any thread or process
   (`xckpt.formats.torch_save.write`). To write chunks, no worker imports torch, which takes
   seconds.
3. At the end torch writes ``.metadata``, which names every file (`xckpt.torch.dcp.folder_writer`).

`dcp.load` finds a tensor under its keys joined with dots, as torch joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box
from xckpt.errors import UnsupportedLeafError
from xckpt.formats.flat_names import flat_names
from xckpt.formats.staged_sink import StagedSink, chunk_of, other_files, value_problems
from xckpt.formats.torch_save.write import SAVED_DTYPES, write_array
from xckpt.mapping.names import keys_of
from xckpt.mapping.spec import TensorSpec
from xckpt.storage.errors import storage_errors

if TYPE_CHECKING:
    from xckpt.torch.dcp.folder_writer import Described

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
        """Ask torch, which writes the end, whether it has the dtypes; write the values."""
        from xckpt.torch.buffers import torch_dtype
        from xckpt.torch.dcp.folder_writer import write_value

        newer = [
            f"{name}: this torch has no {spec.dtype}, a newer one has"
            for name, spec in self._specs.items()
            if torch_dtype(spec.dtype) is None
        ]
        if newer:
            raise UnsupportedLeafError.listing("DCP cannot carry this", newer)
        for name, value in self._values.items():
            path = self.folder / self._file(name)
            with storage_errors(f"{path}: {name}"):
                write_value(path, value)

    def _open(self) -> None:
        """Nothing is held open: each chunk is a file."""

    def chunks(self, name: str) -> Shape:
        """The shape of a chunk: a file."""
        return self._chunks[name]

    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        chunk = self._chunks[name]
        starts = zip(box.offsets, box.sizes, chunk, strict=True)
        for offsets in product(*(range(o, o + n, c) for o, n, c in starts)):
            low = [a - o for a, o in zip(offsets, box.offsets, strict=True)]
            part = np.asarray(data[tuple(slice(a, a + c) for a, c in zip(low, chunk, strict=True))])
            path = self.folder / self._file(name, offsets)
            with storage_errors(f"{path}: {name}"):
                write_array(path, part)

    def _file(self, name: str, offsets: Shape = ()) -> str:
        place = "".join(f"_{offset}" for offset in offsets)
        return f"__0_{self._numbers[name]}{place}.distcp"

    def commit(self) -> None:
        """Write the metadata, sync and rename.

        Raises:
            CorruptCheckpointError: chunks were not written; all are listed.
        """
        from xckpt.torch.dcp.folder_writer import write_metadata

        with storage_errors(self.folder):
            write_metadata(
                self.folder,
                {self._names[name]: self._described(name) for name in self._specs},
                {self._names[name]: self._file(name) for name in self._values},
                {flat: keys_of(name) for name, flat in self._names.items()},
            )
            for path in self.folder.glob(".__0_*"):
                path.unlink()  # A write that was killed has left it.
        super().commit()

    def _described(self, name: str) -> Described:
        from xckpt.torch.dcp.folder_writer import Described

        spec, chunk = self._specs[name], self._chunks[name]
        boxes: dict[Shape, tuple[Shape, str]] = {}
        for offsets in product(
            *(range(0, size, step) for size, step in zip(spec.shape, chunk, strict=True))
        ):
            ends = zip(offsets, chunk, spec.shape, strict=True)
            boxes[offsets] = tuple(min(c, n - o) for o, c, n in ends), self._file(name, offsets)
        return Described(spec.dtype, spec.shape, boxes)

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
