"""A folder of torch.distributed.checkpoint (DCP) as a sink; torch is not needed.

1. The plan divides the tree into entries as torch does (`xckpt.formats.dcp.keys`): a tensor, a
   value, or a tuple or list of values that is one object. It numbers them and cuts each tensor into
   chunks.
2. Each chunk becomes a file of its own, from any thread or process
   (`xckpt.formats.torch_save.write`). A tensor inside an object is one chunk, in a hidden file.
3. At the end the values and objects are written, and ``.metadata``, which names every file.
   torch pickles its own dataclasses; `encode` describes the same objects, and the description
   becomes a pickle, which `dcp.load` of torch 2.3 and newer reads.

`dcp.load` finds an entry under its keys joined with dots. torch's own rules hold for the tree: int
keys of dicts become strings, empty dicts vanish, and a namedtuple becomes a tuple.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.geometry.grid import cells
from xckpt.core.text.advice import OTHER_DTYPE, RENAME
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    TreeMismatchError,
    UnsupportedLeafError,
)
from xckpt.formats.dcp.keys import METADATA_FILE, StoredObject, stored_objects
from xckpt.formats.dcp.metadata import FILESYSTEM, METADATA, DCPMetadata, StoredTensor
from xckpt.formats.sink import Contents, TensorSink, other_files, value_problems
from xckpt.formats.source import Opaque, user_of
from xckpt.formats.torch_save.archive import Archive, Where
from xckpt.formats.torch_save.pickle_machine import Symbol
from xckpt.formats.torch_save.pickle_writer import Built, call, dump, instance
from xckpt.formats.torch_save.values import MappedTensor
from xckpt.formats.torch_save.write import SAVED_DTYPES, write_saved
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.location import storage_errors

CHUNK_BYTES: Final = 1 << 25
"""Target for a chunk, bytes: a file."""

_VERSION: Final = "1.0.0"
"""torch's own version of the schema."""
_STRIDED: Final = call("torch.serialization._get_layout", ("torch.strided",))
_CONTIGUOUS: Final = call(f"{METADATA}._MEM_FORMAT_ENCODING", (0,))


class DCPSink(TensorSink):
    """Writes a folder that `torch.distributed.checkpoint.load` reads.

    Args:
        path: the folder.
        overwrite: replace what is there, if it is such a folder.

    Example:
        >>> from xckpt.mapping.spec import TensorSpec
        >>> sink = DCPSink("for-dcp")
        >>> _ = sink.prepare(Contents({"model/w": TensorSpec((2, 2), "float32")}, {"step": 7}))
        >>> box = Box((0, 0), (2, 2))
        >>> sink.write("model/w", box, np.eye(2, dtype=np.float32))
        >>> sink.commit()
        >>> from xckpt.formats.dcp.source import DCPSource
        >>> source = DCPSource("for-dcp")
        >>> source.specs, source.values
        ({'model/w': TensorSpec(shape=(2, 2), dtype='float32')}, {'step': 7})
    """

    _entries: Mapping[str, StoredObject]
    """FQN -> entry."""
    _names: Mapping[str, str]
    """Leaf name -> mapping name."""
    _files: Mapping[str, str]
    """Mapping name of a tensor -> what its files' names begin with."""

    def _plan(self) -> object:
        """Find and number the entries, and cut the tensors; DCP cannot store texts."""
        contents = self._contents
        self._names = {contents.leaf_name(n): n for n in (*contents.specs, *contents.values)}
        self._entries = _entries(contents, self._names)
        files: dict[str, str] = {}
        chunks: dict[str, Shape] = {}
        for number, entry in enumerate(self._entries.values()):
            for part, leaf in enumerate(entry.leaves):
                name = self._names[leaf]
                if name not in contents.specs:
                    continue
                if entry.leaf is not None:
                    files[name] = f"__0_{number}"
                    chunks[name] = contents.chunk(name, CHUNK_BYTES)
                else:
                    files[name] = f".__0_{number}_part{part}"
                    chunks[name] = tuple(max(1, size) for size in contents.specs[name].shape)
        self._files, self._chunks = files, chunks
        return [list(self._entries), [[name, chunks[name], files[name]] for name in chunks]]

    def _lay_out(self) -> None:
        """Write nothing: values and metadata come last. Warn of what DCP has no place for."""
        if user_of(self._contents.metadata):
            warnings.warn(
                f"{self.path}: DCP has no place for user metadata; it is left out",
                stacklevel=2,
            )

    def _open(self) -> None:
        """Nothing is held open: each chunk is a file."""

    def _write(self, name: str, box: Box, data: NDArray[np.generic]) -> None:
        for chunk in self._cells(name, box):
            path = self.folder / self._file(name, chunk)
            part = np.asarray(data[chunk.slices(box.offsets)])
            with storage_errors(f"{path}: {name}"):
                write_saved(path, part)

    def sync(self, names: Iterable[str]) -> None:
        """Have the names of files survive a power cut; each file is durable already."""
        with storage_errors(self.path):
            sync_folder(self.folder)

    def _cells(self, name: str, box: Box) -> Boxes:
        """The chunks of a box that begins and ends with chunks."""
        if not box.elements:
            return Boxes.of((), rank=len(box.sizes))
        shape = self._contents.specs[name].shape
        return cells(box.offsets, box.ends, shape, self._chunks[name])[1]

    def _file(self, name: str, chunk: Box) -> str:
        place = "".join(f"_{offset}" for offset in chunk.offsets)
        return f"{self._files[name]}{place}.distcp"

    def commit(self) -> None:
        """Write the values and the metadata, sync and rename.

        Raises:
            CorruptCheckpointError: chunks were not written, or an opaque object is not what was
                saved; all are listed.
        """
        with storage_errors(self.folder):
            described = self._described()
            (self.folder / METADATA_FILE).write_bytes(encode(described))
            for path in self.folder.glob(".__0_*"):
                path.unlink()  # A part of an object, or the remains of a killed write.
        super().commit()

    def _described(self) -> DCPMetadata:
        """The content of ``.metadata``; the values are written on the way.

        Raises:
            CorruptCheckpointError: files are missing; all are listed.
        """
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, Where] = {}
        places = self._written()
        for number, (fqn, entry) in enumerate(self._entries.items()):
            name = "" if entry.leaf is None else self._names[entry.leaf]
            if name in places:
                spec = self._contents.specs[name]
                boxes = self._cells(name, Box.whole(spec.shape))
                tensors[fqn] = StoredTensor(fqn, spec.dtype, spec.shape, boxes, places[name])
            else:
                path = self.folder / f"__0_{number}.distcp"
                self._write_object(path, entry, places)
                objects[fqn] = self._where(path.name)
        paths = {fqn: entry.path for fqn, entry in self._entries.items()}
        return DCPMetadata(tensors, objects, paths, tuple(self._entries))

    def _written(self) -> dict[str, tuple[Where, ...]]:
        """Mapping name of each tensor -> where its chunks are."""
        files = {
            name: [self._file(name, chunk) for chunk in self._cells(name, Box.whole(spec.shape))]
            for name, spec in self._contents.specs.items()
        }
        missing = [
            f"{name}: {file}"
            for name, listed in files.items()
            for file in listed
            if not (self.folder / file).is_file()
        ]
        if missing:
            raise CorruptCheckpointError.listing(f"{self.folder}: files were not written", missing)
        return {name: tuple(map(self._where, listed)) for name, listed in files.items()}

    def _where(self, file: str) -> Where:
        """All of a file."""
        return Where(file, 0, (self.folder / file).stat().st_size)

    def _write_object(
        self, path: Path, entry: StoredObject, places: Mapping[str, tuple[Where, ...]]
    ) -> None:
        """Write the file of an entry that is not a tensor."""
        values = {leaf: self._value(self._names[leaf], places) for leaf in entry.leaves}
        value = entry.build(values)
        if isinstance(value, Opaque):
            path.write_bytes(value.content())
        else:
            write_saved(path, value)

    def _value(self, name: str, places: Mapping[str, tuple[Where, ...]]) -> object:
        """A leaf of an object; a tensor maps its file."""
        if name not in places:
            return self._contents.values[name]
        spec = self._contents.specs[name]
        if not places[name]:
            return np.empty(spec.shape, numpy_dtype(spec.dtype))
        part = Archive.open(self.folder, places[name][0]).value()
        assert isinstance(part, MappedTensor)
        return part.array()

    @staticmethod
    def _foreign(path: Path) -> str:
        if not (path / METADATA_FILE).is_file():
            return f"it is not a DCP folder: there is no {METADATA_FILE} in it"
        return other_files(path, lambda name: name == METADATA_FILE or name.endswith(".distcp"))


def _entries(contents: Contents, names: Mapping[str, str]) -> dict[str, StoredObject]:
    """FQN -> torch's entry.

    Raises:
        UnsupportedLeafError: leaves that torch cannot hold, or two of one FQN; all are listed.
    """
    problems = [
        f"{name}: torch cannot save dtype {spec.dtype}; {OTHER_DTYPE}"
        for name, spec in contents.specs.items()
        if spec.dtype not in SAVED_DTYPES
    ]
    values = contents.values
    problems += value_problems(
        {name: value for name, value in values.items() if not isinstance(value, Opaque)}
    )
    if "" in names or contents.containers.get("", "dict") != "dict":
        problems.append("the root is not a dict; torch saves dicts only")
    entries: dict[str, StoredObject] = {}
    try:
        entries = stored_objects(
            names, contents.containers, lambda leaf: names[leaf] in contents.specs, {}
        )
    except TreeMismatchError as error:
        raise UnsupportedLeafError.listing(
            f"torch joins keys with dots, and so gives two leaves one name; {RENAME}",
            error.problems,
        ) from error
    except ManifestError as error:
        problems.append(str(error))
    problems += [
        f"{fqn}: an opaque value inside a tuple, which torch pickles as a whole"
        for fqn, entry in entries.items()
        if entry.leaf is None
        and any(isinstance(values.get(names[leaf]), Opaque) for leaf in entry.leaves)
    ]
    if problems:
        raise UnsupportedLeafError.listing("DCP cannot carry this", problems)
    return entries


def encode(metadata: DCPMetadata) -> bytes:
    """The bytes of a ``.metadata`` with this content.

    Example:
        >>> from xckpt.formats.dcp.metadata import parse
        >>> step = DCPMetadata({}, {"step": Where("__0_0.distcp", 0, 9)}, {"step": ("step",)},
        ...                    ("step",))
        >>> parse(encode(step)) == step
        True
    """
    described: dict[object, object] = {}
    stored: dict[object, object] = {}
    for name in metadata.order:
        tensor = metadata.tensors.get(name)
        if tensor is None:
            described[name] = instance(f"{METADATA}.BytesStorageMetadata", {})
            stored[_index(name)] = _stored_at(metadata.objects[name])
            continue
        described[name] = _tensor(tensor)
        for number, (box, where) in enumerate(zip(tensor.boxes, tensor.places, strict=True)):
            stored[_index(name, box.offsets, number)] = _stored_at(where)
    state = {
        "state_dict_metadata": described,
        "planner_data": {name: tuple(metadata.paths[name]) for name in metadata.order},
        "storage_data": stored,
        "storage_meta": None,
        "version": _VERSION,
    }
    return dump(instance(f"{METADATA}.Metadata", state))


def _tensor(tensor: StoredTensor) -> Built:
    dtype = Symbol(f"torch.{tensor.dtype}")
    properties = (dtype, _STRIDED, False, _CONTIGUOUS, False)
    chunks = [
        instance(
            f"{METADATA}.ChunkStorageMetadata",
            {"offsets": _size(box.offsets), "sizes": _size(box.sizes)},
        )
        for box in tensor.boxes
    ]
    state = {
        "properties": instance(f"{METADATA}.TensorProperties", properties),
        "size": _size(tensor.shape),
        "chunks": chunks,
    }
    return instance(f"{METADATA}.TensorStorageMetadata", state)


def _size(sizes: tuple[int, ...]) -> Built:
    return call("torch.Size", (sizes,))


def _index(name: str, offset: tuple[int, ...] | None = None, number: int | None = None) -> Built:
    state: dict[str, object] = {"fqn": name, "index": number}
    if offset is not None:
        state["offset"] = _size(offset)
    return instance(f"{METADATA}.MetadataIndex", state)


def _stored_at(where: Where) -> Built:
    return instance(
        f"{FILESYSTEM}._StorageInfo",
        {"relative_path": where.file, "offset": where.offset, "length": where.length},
    )
