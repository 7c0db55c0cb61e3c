"""The planners and what they exchange, under the names that torch's users know.

Example:
    >>> from xckpt.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    >>> rows = ChunkStorageMetadata((2, 0), (2, 8))
    >>> data = TensorWriteData(rows, TensorProperties("float32"), (4, 8))
    >>> written = WriteItem(MetadataIndex("w", (2, 0)), WriteItemType.SHARD, data)
    >>> step = WriteItem(MetadataIndex("step"), WriteItemType.BYTE_IO, kind="int")
    >>> [(item.index.fqn, item.box_bytes) for item in SavePlan([written, step]).items]
    [('w', 64), ('step', 0)]
    >>> wanted, stored = MetadataIndex("w", (2, 0)), MetadataIndex("w", (0, 0))
    >>> read = ReadItem(LoadItemType.TENSOR, wanted, (0, 0), stored, (2, 0), (2, 8))
    >>> LoadPlan([read], names=("w",)).items[0].storage_offsets
    (2, 0)
"""

from xckpt.core.geometry.grid import GridOptions
from xckpt.core.plan.items import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "GridOptions",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]
