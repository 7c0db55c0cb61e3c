"""The reverse of `xckpt.formats.dcp.metadata`: ``.metadata`` as torch writes it, without torch.

torch pickles its own dataclasses. `encode` describes the same objects, and the description becomes
a pickle (`xckpt.formats.torch_save.pickle_writer`), which `dcp.load` of torch 2.3 and newer reads.
"""

from __future__ import annotations

from typing import Final

from xckpt.formats.dcp.metadata import FILESYSTEM, METADATA, DCPMetadata, StoredTensor
from xckpt.formats.torch_save.archive import Where
from xckpt.formats.torch_save.pickle_machine import Symbol
from xckpt.formats.torch_save.pickle_writer import Call, PickledObject, dump

_VERSION: Final = "1.0.0"
"""torch's own version of the schema."""
_STRIDED: Final = Call("torch.serialization._get_layout", ("torch.strided",))
_CONTIGUOUS: Final = Call(f"{METADATA}._MEM_FORMAT_ENCODING", (0,))


def encode(metadata: DCPMetadata) -> bytes:
    """The bytes of the ``.metadata`` that says all this.

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
            described[name] = PickledObject(f"{METADATA}.BytesStorageMetadata", {})
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
    return dump(PickledObject(f"{METADATA}.Metadata", state))


def _tensor(tensor: StoredTensor) -> PickledObject:
    dtype = Symbol(f"torch.{tensor.dtype}")
    properties = (dtype, _STRIDED, False, _CONTIGUOUS, False)
    chunks = [
        PickledObject(
            f"{METADATA}.ChunkStorageMetadata",
            {"offsets": _size(box.offsets), "sizes": _size(box.sizes)},
        )
        for box in tensor.boxes
    ]
    state = {
        "properties": PickledObject(f"{METADATA}.TensorProperties", properties),
        "size": _size(tensor.shape),
        "chunks": chunks,
    }
    return PickledObject(f"{METADATA}.TensorStorageMetadata", state)


def _size(sizes: tuple[int, ...]) -> Call:
    return Call("torch.Size", (sizes,))


def _index(
    name: str, offset: tuple[int, ...] | None = None, number: int | None = None
) -> PickledObject:
    state: dict[str, object] = {"fqn": name, "index": number}
    if offset is not None:
        state["offset"] = _size(offset)
    return PickledObject(f"{METADATA}.MetadataIndex", state)


def _stored_at(where: Where) -> PickledObject:
    return PickledObject(
        f"{FILESYSTEM}._StorageInfo",
        {"relative_path": where.file, "offset": where.offset, "length": where.length},
    )
