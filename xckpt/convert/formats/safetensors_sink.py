"""safetensors files as a sink: one file, or a folder of files with an index, as others write them.

1. `prepare` knows every shape, so it knows every byte's place: it writes the headers and makes the
   files as long as they will be (`safetensors_header.lay_out`).
2. Boxes are written straight to their places, from any thread or process.
3. `commit` syncs the files and renames the file or the folder.

A path that ends in ``.safetensors`` is one file; any other is a folder, which holds
``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with
``model.safetensors.index.json`` where the tensors take more than `max_shard_bytes`. The header says
``{"format": "pt"}``, without which transformers takes no file; Python values go there too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.formats.file_ranges import OpenFile, write_box
from xckpt.convert.formats.file_sets import INDEX
from xckpt.convert.formats.names import flat_names
from xckpt.convert.formats.paths import local_path, system_errors
from xckpt.convert.formats.safetensors import SUFFIX, VALUES
from xckpt.convert.formats.safetensors_header import Header, lay_out
from xckpt.convert.formats.staging import Staging
from xckpt.convert.tensors import TensorSpec
from xckpt.core.dtypes import item_size
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.core.values import encode_value, value_kind
from xckpt.errors import CheckpointExistsError, NotACheckpointError, UnsupportedLeafError

__all__ = ["SafetensorsSink"]

STEM: Final = "model"
MAX_SHARD_BYTES: Final = 5_000_000_000
"""What transformers takes by default."""
FORMAT: Final = {"format": "pt"}

_OURS: Final = re.compile(r"[^/]*(\.safetensors|\.safetensors\.index\.json)")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A file to be written."""

    name: str
    first: bytes
    """Length and header."""
    header: Header


class SafetensorsSink:
    """Writes safetensors.

    Args:
        path: a file that ends in ``.safetensors``, or a folder.
        overwrite: replace what is there, if it is a safetensors file or a folder of nothing else.
        max_shard_bytes: a folder's tensors are split into files of at most so many bytes; a larger
            tensor has a file of its own.

    Example:
        >>> sink = SafetensorsSink("made.safetensors")
        >>> _ = sink.prepare({"w": TensorSpec((2, 2), "float32")}, {}, {})
        >>> for row in (1, 0):
        ...     box = ChunkStorageMetadata((row, 0), (1, 2))
        ...     sink.write("w", box, np.full((1, 2), row, np.float32))
        >>> sink.commit()
        >>> from safetensors.numpy import load_file
        >>> load_file("made.safetensors")["w"].tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.path = local_path(path)
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self.single = self.path.name.endswith(SUFFIX)
        self._staging: Staging | None = None
        self._names: Mapping[str, str] = {}
        self._planned: dict[str, _Planned] = {}
        self._files: dict[str, OpenFile] = {}

    def prepare(
        self,
        specs: Mapping[str, TensorSpec],
        values: Mapping[str, object],
        metadata: Mapping[str, str],
        *,
        attach: str = "",
    ) -> str:
        """Check everything, write headers, and make room; see `TensorSink.prepare`."""
        self._names = flat_names(specs)
        files = self._plan(specs, {**FORMAT, **metadata, **_value_text(values)})
        self._planned = {name: file for file in files for name in file.header.places}
        if attach:
            self._staging = Staging.attach(self.path, attach, single=self.single)
            self._open(files)
            return attach
        if self.single and self.path.is_dir():
            raise CheckpointExistsError(f"{self.path} is a folder; a file was to be written there")
        replaceable = _problem_to_replace if self.overwrite else None
        self._staging = Staging.begin(self.path, replaceable, single=self.single)
        try:
            with system_errors(self.path):
                for file in files:
                    _make(self._staging.folder / file.name, file)
                if len(files) > 1:
                    text = json.dumps(_index(files), indent=2, ensure_ascii=False)
                    (self._staging.folder / f"{STEM}{SUFFIX}{INDEX}").write_text(text, "utf-8")
            self._open(files)
        except BaseException:
            self.abort()
            raise
        return self._staging.token

    def _plan(self, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> list[_Planned]:
        tensors = {self._names[name]: (spec.dtype, spec.shape) for name, spec in specs.items()}
        _check_dtypes(tensors, metadata)
        groups = [list(tensors)] if self.single else _split(tensors, self.max_shard_bytes)
        planned: list[_Planned] = []
        for number, group in enumerate(groups, 1):
            first, header = lay_out({name: tensors[name] for name in group}, metadata)
            name = f"{STEM}-{number:05d}-of-{len(groups):05d}{SUFFIX}"
            if len(groups) == 1:
                name = self.path.name if self.single else f"{STEM}{SUFFIX}"
            planned.append(_Planned(name, first, header))
        return planned

    def _open(self, files: list[_Planned]) -> None:
        assert self._staging is not None
        for file in files:
            path = self._staging.folder / file.name
            with system_errors(path):
                if not path.is_file():
                    raise NotACheckpointError(f"{path}: no such file was begun")
                opened = self._files[file.name] = OpenFile(path, write=True)
                same = os.pread(opened.descriptor, len(file.first), 0) == file.first
                if not same or os.fstat(opened.descriptor).st_size != file.header.size:
                    raise NotACheckpointError(f"{path} was begun for other tensors")

    def chunks(self, name: str) -> tuple[int, ...]:
        """1 in each dimension: any box can be written."""
        return (1,) * len(self._planned[self._names[name]].header.places[self._names[name]].shape)

    def write(self, name: str, box: ChunkStorageMetadata, data: NDArray[np.generic]) -> None:
        """Write a box to its place; see `TensorSink.write`."""
        flat = self._names[name]
        planned = self._planned[flat]
        place = planned.header.places[flat]
        if data.dtype == np.bool_:
            data = np.asarray(data.view(np.uint8) != 0)  # Memory may hold other bytes than 0 and 1.
        file = self._files[planned.name]
        with system_errors(f"{file.path}: {name}"):
            write_box(file, place.start, place.shape, box.offsets, data)

    def commit(self) -> None:
        """Sync and rename."""
        assert self._staging is not None
        self.close()
        self._staging.publish(replace=self.overwrite)

    def abort(self) -> None:
        """Remove what was written."""
        self.close()
        if self._staging is not None:
            self._staging.abort()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}


def _value_text(values: Mapping[str, object]) -> dict[str, str]:
    """The text that carries Python values.

    Raises:
        UnsupportedLeafError: values that are none of the format's; all are listed.
    """
    problems = [
        f"{name}: a {type(value).__qualname__} is no value that can be written"
        for name, value in values.items()
        if value_kind(value) is None
    ]
    if problems:
        raise UnsupportedLeafError.listing("some values cannot be written", problems)
    if not values:
        return {}
    told = {name: [value_kind(value), encode_value(value)] for name, value in values.items()}
    return {VALUES: json.dumps(told, separators=(",", ":"))}


def _check_dtypes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> None:
    """Have every problem of every tensor found before they are split into files."""
    lay_out({name: (dtype, (0,)) for name, (dtype, _) in tensors.items()}, metadata)


def _split(tensors: Mapping[str, tuple[str, tuple[int, ...]]], most: int) -> list[list[str]]:
    """The names of each file, in the tensors' order."""
    groups: list[list[str]] = [[]]
    taken = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * item_size(dtype)
        if groups[-1] and taken + size > most:
            groups.append([])
            taken = 0
        groups[-1].append(name)
        taken += size
    return groups


def _index(files: list[_Planned]) -> dict[str, object]:
    names = {name: file.name for file in files for name in file.header.places}
    total = sum(place.nbytes for file in files for place in file.header.places.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}


def _make(path: Path, file: _Planned) -> None:
    """A file with its header, and as long as it will be."""
    with path.open("xb") as out:
        out.write(file.first)
        out.truncate(file.header.size)


def _problem_to_replace(path: Path) -> str:
    """Why what is there is no output of ours, or would take other files along."""
    if path.is_file():
        return "" if path.name.endswith(SUFFIX) else f"it is no {SUFFIX} file"
    foreign = sorted(each.name for each in path.iterdir() if not _OURS.fullmatch(each.name))
    if foreign:
        return f"it holds other files too: {', '.join(foreign[:5])}"
    return ""
