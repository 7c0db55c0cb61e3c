"""A folder of torch.distributed.checkpoint (DCP) as a sink; torch writes its files.

1. `prepare` cuts each tensor into chunks, notes the layout, and writes the values.
2. Each chunk becomes a file of its own, from any thread or process
   (`xckpt.torch.dcp.folder_writer`).
3. `commit` writes ``.metadata``, which names every file, and renames the folder.

`dcp.load` finds a tensor under its keys joined with dots, as torch joins them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.formats.names import flat_names
from xckpt.convert.formats.orbax_sink import chunk_shape
from xckpt.convert.formats.paths import local_path, system_errors
from xckpt.convert.formats.staging import Staging
from xckpt.convert.names import keys_of
from xckpt.convert.tensors import TensorSpec
from xckpt.core.dtypes import item_size
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.core.values import value_kind
from xckpt.errors import NotACheckpointError, UnsupportedLeafError

if TYPE_CHECKING:
    from xckpt.torch.dcp.folder_writer import Described

__all__ = ["DCPSink"]

CHUNK_BYTES: Final = 1 << 25
"""Target for a chunk, bytes: a file."""
LAYOUT: Final = ".layout"
"""The file that holds the layout until the folder is whole."""

Shape = tuple[int, ...]


class DCPSink:
    """Writes a folder that `torch.distributed.checkpoint.load` reads.

    Args:
        path: the folder.
        overwrite: replace what is there, if it is such a folder.

    Example:
        >>> sink = DCPSink("for-dcp")
        >>> _ = sink.prepare({"model/w": TensorSpec((2, 2), "float32")}, {"step": 7}, {})
        >>> box = ChunkStorageMetadata((0, 0), (2, 2))
        >>> sink.write("model/w", box, np.eye(2, dtype=np.float32))
        >>> sink.commit()
        >>> from xckpt.convert.formats.dcp import DCPSource
        >>> source = DCPSource("for-dcp")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(2, 2), dtype='float32')}, {'step': 7})
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = local_path(path)
        self.overwrite = overwrite
        self._staging: Staging | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._values: dict[str, str] = {}
        self._names: Mapping[str, str] = {}
        self._numbers: dict[str, int] = {}

    def prepare(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, object],
        metadata: Mapping[str, str],
        *,
        attach: str = "",
    ) -> str:
        """Check everything and note the layout; see `TensorSink.prepare`.

        DCP has no place for ``metadata``.
        """
        _check(specs, values)
        self._names = flat_names((*specs, *values))
        self._specs = dict(specs)
        self._numbers = {name: number for number, name in enumerate((*specs, *values))}
        self._values = {name: f"__0_{self._numbers[name]}.distcp" for name in values}
        layout = json.dumps(
            [[[name, spec.shape, spec.dtype] for name, spec in specs.items()], list(values)]
        )
        if attach:
            self._staging = Staging.attach(self.path, attach)
            note = self._staging.folder / LAYOUT
            with system_errors(note):
                if not note.is_file() or note.read_text("utf-8") != layout:
                    raise NotACheckpointError(f"{note} was begun for other tensors")
            return attach
        replaceable = _problem_to_replace if self.overwrite else None
        self._staging = Staging.begin(self.path, replaceable)
        try:
            self._write_values(values)
            with system_errors(self._staging.folder):
                (self._staging.folder / LAYOUT).write_text(layout, "utf-8")
        except BaseException:
            self.abort()
            raise
        return self._staging.token

    def _write_values(self, values: Mapping[str, object]) -> None:
        from xckpt.torch.dcp.folder_writer import write_entry

        assert self._staging is not None
        for name, value in values.items():
            path = self._staging.folder / self._values[name]
            with system_errors(f"{path}: {name}"):
                write_entry(path, value)

    def chunks(self, name: str) -> Shape:
        """The shape of a chunk."""
        spec = self._specs[name]
        return chunk_shape(spec.shape, CHUNK_BYTES // item_size(spec.dtype))

    def write(self, name: str, box: ChunkStorageMetadata, data: NDArray[np.generic]) -> None:
        """Write a box of whole chunks; see `TensorSink.write`."""
        from xckpt.torch.dcp.folder_writer import write_entry

        assert self._staging is not None
        chunk = self.chunks(name)
        starts = zip(box.offsets, box.sizes, chunk, strict=True)
        for offsets in product(*(range(o, o + n, c) for o, n, c in starts)):
            low = [a - o for a, o in zip(offsets, box.offsets, strict=True)]
            part = np.asarray(data[tuple(slice(a, a + c) for a, c in zip(low, chunk, strict=True))])
            if part.dtype == np.bool_:
                part = np.asarray(part.view(np.uint8) != 0)  # Others than 0 and 1 may stand there.
            path = self._staging.folder / self._file(name, offsets)
            with system_errors(f"{path}: {name}"):
                write_entry(path, part)

    def _file(self, name: str, offsets: Shape) -> str:
        place = "".join(f"_{offset}" for offset in offsets)
        return f"__0_{self._numbers[name]}{place}.distcp"

    def commit(self) -> None:
        """Write the metadata, sync and rename.

        Raises:
            CorruptCheckpointError: chunks were not written; all are listed.
        """
        from xckpt.torch.dcp.folder_writer import write_metadata

        assert self._staging is not None
        folder = self._staging.folder
        with system_errors(folder):
            write_metadata(
                folder,
                {self._names[name]: self._described(name) for name in self._specs},
                {self._names[name]: file for name, file in self._values.items()},
                {flat: keys_of(name) for name, flat in self._names.items()},
            )
            for path in folder.glob(".__0_*"):
                path.unlink()  # A write that was killed has left it.
            (folder / LAYOUT).unlink(missing_ok=True)
        self._staging.publish(replace=self.overwrite)

    def _described(self, name: str) -> Described:
        from xckpt.torch.dcp.folder_writer import Described

        spec, chunk = self._specs[name], self.chunks(name)
        boxes: dict[Shape, tuple[Shape, str]] = {}
        for offsets in product(
            *(range(0, size, step) for size, step in zip(spec.shape, chunk, strict=True))
        ):
            ends = zip(offsets, chunk, spec.shape, strict=True)
            boxes[offsets] = tuple(min(c, n - o) for o, c, n in ends), self._file(name, offsets)
        return Described(spec.dtype, spec.shape, boxes)

    def abort(self) -> None:
        """Remove what was written."""
        if self._staging is not None:
            self._staging.abort()

    def close(self) -> None:
        """Nothing is held open."""


def _check(specs: Mapping[str, TensorSpec], values: Mapping[str, object]) -> None:
    from xckpt.torch.dcp.folder_writer import carries

    problems = [
        f"{name}: torch cannot save dtype {spec.dtype}"
        for name, spec in specs.items()
        if not carries(spec.dtype)
    ]
    problems += [
        f"{name}: a {type(value).__qualname__} is no value that can be written"
        for name, value in values.items()
        if value_kind(value) is None
    ]
    if problems:
        raise UnsupportedLeafError.listing("DCP cannot carry this", problems)


def _problem_to_replace(path: Path) -> str:
    """Why what is there is no DCP folder."""
    if not (path / ".metadata").is_file():
        return "it is no DCP folder, which has .metadata"
    foreign = sorted(
        each.name
        for each in path.iterdir()
        if each.name != ".metadata" and each.suffix != ".distcp"
    )
    return f"it holds other files too: {', '.join(foreign[:5])}" if foreign else ""
