"""What an item says of itself."""

from __future__ import annotations

from dataclasses import replace

from xckpt.core.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from xckpt.core.plan.items import TensorWriteData, WriteItem, WriteItemType


def test_tensor_storage_size_counts_the_bytes_of_the_chunk():
    """Not of the whole tensor, and 0 where the chunk is empty."""
    data = TensorWriteData(
        ChunkStorageMetadata((0, 4), (3, 4)), TensorProperties("bfloat16"), (3, 8)
    )
    assert (
        WriteItem(MetadataIndex("w", (0, 4)), WriteItemType.SHARD, data).tensor_storage_size() == 24
    )
    for sizes, count in (((0, 4), 0), ((3, 8), 48)):
        whole = replace(data, chunk=ChunkStorageMetadata((0, 0), sizes))
        item = WriteItem(MetadataIndex("w"), WriteItemType.TENSOR, whole)
        assert item.tensor_storage_size() == count
    scalar = TensorWriteData(ChunkStorageMetadata((), ()), TensorProperties("float64"), ())
    item = WriteItem(MetadataIndex("x", ()), WriteItemType.TENSOR, scalar)
    assert item.tensor_storage_size() == 8
    assert WriteItem(MetadataIndex("s"), WriteItemType.BYTE_IO).tensor_storage_size() is None
