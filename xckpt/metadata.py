"""What a checkpoint says about its tensors, under the names that torch's users know."""

from xckpt.core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "Sharding",
    "TensorProperties",
    "TensorStorageMetadata",
]
