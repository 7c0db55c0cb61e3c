"""safetensors files as a sink: one file, or a folder of files with an index, as others write them.

1. The plan knows every shape, and so every byte's place (`lay_out`).
2. The layout is the files themselves, with their headers and as long as they will be.
3. Boxes are written straight to their places, from any thread or process.

A path that ends in ``.safetensors`` is one file; any other is a folder, which holds
``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on with
``model.safetensors.index.json`` where the tensors take more than `max_shard_bytes`. The header says
``{"format": "pt"}``, without which transformers takes no file; Python values go there too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.names import join_keys
from xckpt.core.text.advice import RENAME
from xckpt.core.text.printable import in_few
from xckpt.core.tree import unflatten
from xckpt.core.values import encode_value, value_kind
from xckpt.errors import ManifestError, NotACheckpointError, UnsupportedLeafError, XckptError
from xckpt.formats.file_sets import INDEX, find_files
from xckpt.formats.safetensors.header import Header, TensorSpan, check_tensors, lay_out
from xckpt.formats.safetensors.source import FORMAT, SUFFIX, VALUES
from xckpt.formats.sink import TensorSink, flat_names, other_files, other_names, value_problems
from xckpt.formats.strided_ranges import write_box
from xckpt.mapping.names import keys_of, mapping_name
from xckpt.storage.chunks.plain_files import sync
from xckpt.storage.foreign.files import OpenFile
from xckpt.storage.location import storage_errors

STEM: Final = "model"
MAX_SHARD_BYTES: Final = 5_000_000_000
"""The default of transformers."""

_OURS: Final = re.compile(r"[^/]*(\.safetensors|\.safetensors\.index\.json)")


class SafetensorsSink(TensorSink):
    """Writes safetensors.

    Args:
        path: a file that ends in ``.safetensors``, or a folder.
        overwrite: replace what is there, if it is a safetensors file, or a folder of one such
            checkpoint and nothing else.
        max_shard_bytes: a folder's tensors are split into files of at most this many bytes; a
            larger tensor has a file of its own.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> from xckpt.formats.sink import Contents
        >>> sink = SafetensorsSink("made.safetensors")
        >>> _ = sink.prepare(Contents({"w": TensorSpec((2, 2), "float32")}))
        >>> for row in (1, 0):
        ...     box = Box((row, 0), (1, 2))
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
        super().__init__(path, overwrite=overwrite)
        self.max_shard_bytes = max_shard_bytes
        self.single: Final = self.path.name.endswith(SUFFIX)
        self._planned: dict[str, tuple[bytes, Header]] = {}
        """Name of each file -> its first bytes, length and header."""
        self._places: dict[str, tuple[str, TensorSpan]] = {}
        self._files: dict[str, OpenFile] = {}

    def _plan(self) -> object:
        """Divide the tensors among files, and find every byte's place."""
        specs = self._contents.specs
        names = flat_names(specs)
        if problems := _clashes(names.values(), self._contents.values):
            raise UnsupportedLeafError.listing("safetensors cannot carry this", problems)
        texts = {**FORMAT, **self._contents.metadata, **_value_text(self._contents.values)}
        tensors = {names[name]: (spec.dtype, spec.shape) for name, spec in specs.items()}
        check_tensors(tensors)
        groups = [list(tensors)] if self.single else _split(tensors, self.max_shard_bytes)
        # Any box can be written.
        self._chunks = {name: (1,) * len(spec.shape) for name, spec in specs.items()}
        self._planned = {}
        for number, group in enumerate(groups, 1):
            series = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            laid_out = lay_out({name: tensors[name] for name in group}, texts)
            self._planned[f"{STEM}{series}{SUFFIX}"] = laid_out
        places = {
            flat: (file, place)
            for file, (_, header) in self._planned.items()
            for flat, place in header.places.items()
        }
        self._places = {name: places[flat] for name, flat in names.items()}
        return [[file, list(header.places)] for file, (_, header) in self._planned.items()]

    def _lay_out(self) -> None:
        with storage_errors(self.path):
            for file, (first, header) in self._planned.items():
                with (self.folder / file).open("xb") as out:
                    out.write(first)
                    out.truncate(header.size)
            if len(self._planned) > 1:
                text = json.dumps(self._index(), indent=2, ensure_ascii=False)
                (self.folder / f"{STEM}{SUFFIX}{INDEX}").write_text(text, "utf-8")

    def _open(self) -> None:
        for file in self._planned:
            path = self.folder / file
            with storage_errors(path):
                self._files[file] = OpenFile(path, write=True)
            self._opened.callback(self._files[file].close)

    def _index(self) -> dict[str, object]:
        """The index: which file each tensor is in."""
        headers = {file: header for file, (_, header) in self._planned.items()}
        names = {name: file for file, header in headers.items() for name in header.places}
        total = sum(place.nbytes for _, place in self._places.values())
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}

    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        holder, place = self._places[name]
        file = self._files[holder]
        with storage_errors(f"{file.path}: {name}"):
            write_box(file, place.start, place.shape, box.offsets, data)

    def sync(self, names: Iterable[str]) -> None:
        """See `TensorSink.sync`."""
        for holder in {self._places[name][0] for name in names}:
            with storage_errors(self.path):
                sync(self._files[holder].descriptor)

    @staticmethod
    def _foreign(path: Path) -> str:
        if path.is_file():
            return "" if path.name.endswith(SUFFIX) else f"it is not a {SUFFIX} file"
        if others := other_files(path, lambda name: _OURS.fullmatch(name) is not None):
            return others
        try:
            found = find_files(path, SUFFIX)
        except NotACheckpointError:
            return f"it holds several checkpoints: {in_few(sorted(os.listdir(path)))}"
        except XckptError:
            return ""  # One that is damaged.
        own = {each.name for each in (*found.paths, found.index_path) if each is not None}
        return other_names(name for name in os.listdir(path) if name not in own)


def _clashes(tensors: Iterable[str], values: Iterable[str]) -> list[str]:
    """What keeps a reader from a tree: a tensor's name is one key, while a value keeps its keys."""
    names = [mapping_name([name]) for name in tensors]
    problems = [
        f"{name}: a value that has the name of a tensor there; {RENAME}"
        for name in sorted({*names} & {*values})
    ]
    leaves = [join_keys(keys_of(name)) for name in (*names, *values)]
    if "" in leaves and len(leaves) > 1:
        return ["the root: an empty key beside others, which a reader takes for the whole tree"]
    try:
        unflatten(dict.fromkeys(leaves), {})
    except ManifestError as error:
        problems.append(f"{error}; {RENAME}")
    return problems


def _value_text(values: Mapping[str, object]) -> dict[str, str]:
    """The text that carries Python values.

    Raises:
        UnsupportedLeafError: values that the format does not carry; all are listed.
    """
    problems = value_problems(values)
    if problems:
        raise UnsupportedLeafError.listing("some values cannot be written", problems)
    if not values:
        return {}
    texts = {name: [value_kind(value), encode_value(value)] for name, value in values.items()}
    return {VALUES: json.dumps(texts, separators=(",", ":"))}


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
