"""torch's ``.metadata``, the description of a DCP folder, read without unpickling it.

1. The file's bytes are bounded, then described by `xckpt.formats.torch_save.pickle_machine`, for
   which only the names in `NAMES` exist: those that torch 2.0 to 2.13 writes. None of them is
   imported.
2. The description is checked strictly against torch's schema and becomes a `DCPMetadata`: tensors
   with their chunks, entries of bytes, where each is stored, and the key path of each.

Every fault of every entry is found before any is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from xckpt.core.dtypes import DTYPES
from xckpt.core.geometry.box import Boxes, Shape
from xckpt.core.geometry.cover import cover_fault
from xckpt.core.manifest.rules import shape_fault
from xckpt.core.names import KeyPath
from xckpt.core.text.arguments import named
from xckpt.errors import ManifestError, PlanError, UnsafePickleError, UnsupportedLeafError
from xckpt.formats.dcp.keys import key_paths
from xckpt.formats.torch_save.archive import Where
from xckpt.formats.torch_save.pickle_machine import Maker, Record, Symbol, load
from xckpt.formats.torch_save.values import BASIC_NAMES, are_counts
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.paths import file_name_problem

MAX_BYTES: Final = 1 << 30
"""Longest ``.metadata`` that is read: about 7 million chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor: its chunk ``boxes[i]`` is stored at ``places[i]``."""

    name: str
    """torch's name of it (FQN)."""
    dtype: str
    """The format's name of the element type."""
    shape: Shape
    boxes: Boxes
    """Disjoint and not empty; together they cover the shape."""
    places: tuple[Where, ...]


@dataclass(frozen=True, slots=True)
class DCPMetadata:
    """What a DCP folder holds."""

    tensors: Mapping[str, StoredTensor]
    """FQN -> tensor."""
    objects: Mapping[str, Where]
    """FQN -> an entry of bytes, which `torch.save` wrote."""
    paths: Mapping[str, KeyPath]
    """FQN -> the key path in the tree that was saved; list indices are ints."""
    order: tuple[str, ...]
    """All FQNs, in the order in which they stand in the file."""

    @property
    def files(self) -> list[str]:
        """Names of the files in which all that is stored, each once."""
        places = [place for tensor in self.tensors.values() for place in tensor.places]
        return list(dict.fromkeys(place.file for place in (*places, *self.objects.values())))


def _layout(name: object) -> object:
    return name


def _path(*parts: object) -> object:
    return parts


def _member(owner: object, name: object) -> object:
    """A member of an enum, as Python 3.11.0 to 3.11.3 pickled it: by ``getattr``."""
    if not isinstance(owner, Symbol) or owner.name not in _ENUMS or not isinstance(name, str):
        raise UnsafePickleError("it reads an attribute by builtins.getattr")
    return Record(owner.name, (name,))


METADATA: Final = "torch.distributed.checkpoint.metadata"
"""The module of the classes that describe a checkpoint."""
FILESYSTEM: Final = "torch.distributed.checkpoint.filesystem"
"""The module of the class that says where an entry is stored."""
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_ENUMS: Final = (f"{METADATA}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING")

NAMES: Final[Mapping[str, Maker | None]] = {
    **BASIC_NAMES,
    "torch.serialization._get_layout": _layout,
    **{
        f"{METADATA}.{name}": Record
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
        )
    },
    f"{_SHARDED}.TensorProperties": Record,
    **dict.fromkeys(_ENUMS, Record),
    "builtins.getattr": _member,
    "__builtin__.getattr": _member,
    f"{FILESYSTEM}._StorageInfo": Record,
    # The folder that it was written to.
    **{
        f"{module}.{name}": _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""Names allowed in a ``.metadata`` -> the result of calling them."""

_KEY = tuple[str, Shape | None]


def parse(data: bytes, memory: Allowance | None = None) -> DCPMetadata:
    """The content of a ``.metadata``, checked.

    Args:
        data: the file's bytes.
        memory: what it may take; the estimate is twice what an honest pickle takes, which
            leaves room for what is made of it.

    Raises:
        UnsafePickleError: it names a class or function that torch's metadata do not have.
        ManifestError: it is truncated, damaged, too long, or not what torch writes.
        UnsupportedLeafError: tensors of a dtype that the format lacks, or entries that were
            transformed (compressed); all listed.
        PlanError: a tensor's chunks overlap or leave elements out; all such are listed.

    Example:
        >>> from xckpt.formats.dcp.sink import encode
        >>> place = Where("__0_0.distcp", offset=0, length=9)
        >>> stored = DCPMetadata({}, {"step": place}, {"step": ("step",)}, ("step",))
        >>> parse(encode(stored)).objects
        {'step': Where(file='__0_0.distcp', offset=0, length=9)}
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"it is {len(data):,} bytes long; at most {MAX_BYTES:,} are read")
    root = _fields(load(data, NAMES, memory=memory), "Metadata")
    described = root.get("state_dict_metadata")
    if not isinstance(described, dict) or not all(isinstance(name, str) for name in described):
        raise ManifestError("its state_dict_metadata is not a dict of names")
    return _Reader(root.get("storage_data"), root.get("planner_data")).read(described)


class _Reader:
    """Checks the entries against the schema, and gathers what is wrong with them."""

    def __init__(self, storage_data: object, planner_data: object) -> None:
        self.unsupported: list[str] = []
        self.uncovered: list[str] = []
        self.places = self._places(storage_data)
        self.planner_data = planner_data

    def read(self, described: Mapping[str, object]) -> DCPMetadata:
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, Where] = {}
        for name, entry in described.items():
            if isinstance(entry, Record) and entry.name.endswith(".BytesStorageMetadata"):
                objects[name] = self._place(name, None)
                continue
            tensor = self._tensor(name, _fields(entry, "TensorStorageMetadata", name))
            if tensor is not None:
                tensors[name] = tensor
        if self.unsupported:
            raise UnsupportedLeafError.listing("it holds what cannot be read", self.unsupported)
        if self.uncovered:
            raise PlanError.listing("the chunks do not make up whole tensors", self.uncovered)
        _check_apart(objects)
        given = key_paths(self.planner_data)
        paths = {name: given.get(name, (name,)) for name in described}
        return DCPMetadata(tensors, objects, paths, tuple(described))

    def _places(self, storage_data: object) -> dict[_KEY, Where]:
        if not isinstance(storage_data, dict):
            raise ManifestError(
                "its storage_data is not a dict; it was not written by torch's FileSystemWriter"
            )
        places: dict[_KEY, Where] = {}
        for index, info in storage_data.items():
            key = _fields(index, "MetadataIndex")
            name, offset = key.get("fqn"), key.get("offset")
            if not isinstance(name, str) or not (offset is None or are_counts(offset)):
                raise ManifestError("an index in its storage_data has no name")
            place = self._where(name, _fields(info, "_StorageInfo", name))
            if places.setdefault((name, offset), place) != place:
                raise ManifestError(f"{name}: stored twice, at {places[name, offset]} and {place}")
        return places

    def _where(self, name: str, info: Mapping[str, object]) -> Where:
        file, offset, length = (info.get(k) for k in ("relative_path", "offset", "length"))
        extent = (offset, length)
        if not isinstance(file, str) or not are_counts(extent):
            raise ManifestError(f"{name}: where it is stored is not a file and a range")
        if file_name_problem(file) or ":" in file:
            raise ManifestError(
                f"{name}: stored in {file[:80]!r}, which is not a file of the folder"
            )
        descriptors = info.get("transform_descriptors")
        if descriptors:
            listed = descriptors if isinstance(descriptors, list | tuple) else [descriptors]
            # Values that are not text are shown by type: anything may stand here, nested or
            # endless.
            names = ", ".join(d[:40] if isinstance(d, str) else _kind(d) for d in listed[:4])
            self.unsupported.append(
                f"{name}: stored through the extension {names}; load and save it with torch"
            )
        return Where(file, *extent)

    def _place(self, name: str, offset: Shape | None) -> Where:
        place = self.places.get((name, offset))
        if place is None:
            which = "it" if offset is None else f"its chunk at {offset}"
            raise ManifestError(f"{name}: its storage_data does not say where {which} is stored")
        return place

    def _tensor(self, name: str, entry: Mapping[str, object]) -> StoredTensor | None:
        shape, chunks = entry.get("size"), entry.get("chunks")
        if not are_counts(shape) or not isinstance(chunks, list):
            raise ManifestError(f"{name}: a tensor without a size or chunks")
        if shape_fault(shape, 1):
            raise ManifestError(f"{name}: an absurd shape, {_shown(shape)}")
        dtype = self._dtype(name, entry.get("properties"))
        pairs: dict[tuple[Shape, Shape], Where] = {}
        for chunk in chunks:
            fields = _fields(chunk, "ChunkStorageMetadata", name)
            offsets, sizes = fields.get("offsets"), fields.get("sizes")
            if not are_counts(offsets, len(shape)) or not are_counts(sizes, len(shape)):
                raise ManifestError(f"{name}: a chunk's offsets or sizes do not fit its shape")
            place = self._place(name, offsets)
            if 0 not in sizes:
                pairs[offsets, sizes] = place
        boxes = Boxes.of(pairs, rank=len(shape))
        self._check_cover(name, shape, boxes)
        if dtype is None:
            return None
        return StoredTensor(name, dtype, shape, boxes, tuple(pairs.values()))

    def _check_cover(self, name: str, shape: Shape, boxes: Boxes) -> None:
        fault = cover_fault(shape, boxes)
        if fault is None:
            return
        where = str(fault.box)
        chunks = [str(boxes[n]) for n in fault.holders]
        fault_text = {
            "gap": "is in no chunk",
            "outside": f"lies outside its shape {shape}",
            "overlap": f"is in several chunks: {' and '.join(chunks)}",
        }[fault.kind]
        self.uncovered.append(f"{name}: {where} {fault_text}")

    def _dtype(self, name: str, properties: object) -> str | None:
        if not isinstance(properties, Record) or not properties.name.endswith(".TensorProperties"):
            raise ManifestError(f"{name}: a tensor without properties")
        state = properties.state
        if not isinstance(state, tuple) or not state or not isinstance(state[0], Symbol):
            raise ManifestError(f"{name}: a tensor without a dtype")
        dtype = state[0].name.removeprefix("torch.")
        layout = next((part for part in state[1:] if isinstance(part, str)), "torch.strided")
        if layout != "torch.strided":
            self.unsupported.append(f"{name}: a tensor of layout {layout[:40]}")
        elif dtype not in DTYPES:
            self.unsupported.append(f"{name}: dtype {dtype}, which the format lacks")
        else:
            return dtype
        return None


def _check_apart(objects: Mapping[str, Where]) -> None:
    """Refuse entries of bytes that share some: few could be made into any number of values.

    Raises:
        ManifestError: there are such entries.
    """
    placed = sorted((at.file, at.offset, at.offset + at.length, n) for n, at in objects.items())
    for (file, _, end, name), (next_file, start, _, other) in pairwise(placed):
        if file == next_file and start < end:
            raise ManifestError(f"{other}: stored where {name} is, at byte {start:,} of {file}")


def _fields(value: object, kind: str, name: str = "") -> Mapping[str, object]:
    """The fields of a dataclass's record."""
    where = f"{name}: " if name else ""
    if not isinstance(value, Record) or value.name.rpartition(".")[2] != kind:
        raise ManifestError(f"{where}{named(_kind(value))} stands where {named(kind)} belongs")
    if not isinstance(value.state, dict):
        raise ManifestError(f"{where}a {kind} without fields")
    return value.state


def _kind(value: object) -> str:
    return value.name if isinstance(value, Record | Symbol) else type(value).__name__


def _shown(shape: Shape) -> str:
    return str(shape) if len(shape) <= 8 else f"of {len(shape)} dimensions"
