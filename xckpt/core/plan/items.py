"""Items and plans: what ranks agree on before bytes move.

To its user a plan is a sequence of items, one a box, as in torch's protocol. Inside, the items of a
save are columns (`xckpt.core.plan.columns`), and `xckpt.engine.wire` carries plans between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.metadata import MetadataIndex, Sharding, TensorProperties


class WriteItemType(Enum):
    """What a write item holds."""

    TENSOR = auto()
    """A tensor that every rank has as one whole."""
    SHARD = auto()
    """A box of a sharded tensor."""
    BYTE_IO = auto()
    """Bytes: a Python value, or what a serialiser returned."""


class LoadItemType(Enum):
    """What a read item asks for."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True, slots=True)
class TensorWriteData:
    """The tensor part of a write item."""

    chunk: Box
    """The box to write."""
    properties: TensorProperties
    size: tuple[int, ...]
    """Global shape of the tensor, elements."""
    sharding: Sharding | None = None
    """How the tensor was sharded, for the manifest."""
    annotation: str = ""
    """What the leaf is to its framework beyond an array, such as ``"prng_key:threefry2x32"``."""


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One box of one leaf to be written."""

    index: MetadataIndex
    type: WriteItemType
    tensor_data: TensorWriteData | None = None
    """None for bytes."""
    kind: str = ""
    """The Python type's name of a BYTE_IO item."""

    def tensor_storage_size(self) -> int | None:
        """Bytes that the item's box takes in storage; None for a value.

        Example:
            >>> box = Box((0, 0), (2, 8))
            >>> data = TensorWriteData(box, TensorProperties("float32"), (4, 8))
            >>> item = WriteItem(MetadataIndex("w", (0, 0)), WriteItemType.SHARD, data)
            >>> item.tensor_storage_size()
            64
        """
        if self.tensor_data is None:
            return None
        return self.tensor_data.chunk.elements * item_size(self.tensor_data.properties.dtype)


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One box to be copied from a stored array into one of this rank's buffers."""

    type: LoadItemType
    dest_index: MetadataIndex
    """The leaf, the wanted box's offset and its number among this rank's boxes of the leaf."""
    dest_offsets: tuple[int, ...]
    """Where the copy starts in the wanted box, elements."""
    storage_index: MetadataIndex
    """The leaf, the stored array's offset in the tensor and its number."""
    storage_offsets: tuple[int, ...]
    """Where the copy starts in the stored array, elements."""
    lengths: tuple[int, ...]
    """How much is copied per dimension, elements."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What a rank can write; after the global step, what it has to write."""

    items: Sequence[WriteItem]
    storage_data: object = None
    """The storage's own, such as where it writes; MessagePack-able."""
    planner_data: object = None
    """A planner's own, merged by its `create_global_plan`; MessagePack-able."""
    containers: Mapping[str, str] = field(default_factory=dict[str, str])
    """The tree's containers; see `xckpt.core.tree`."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a rank wants to read."""

    items: Sequence[ReadItem]
    storage_data: object = None
    planner_data: object = None
    names: tuple[str, ...] = ()
    """Every leaf that the rank asks for, those without elements included."""
    problems: tuple[str, ...] = ()
    """Why this rank cannot do the load; the coordinator reports them."""
