"""What a checkpoint says about its tensors, under the names that torch's users know.

Example:
    >>> import numpy as np, xckpt
    >>> state = {"w": np.zeros((4, 2), np.float32), "step": 3}
    >>> metadata = xckpt.save("memory://of-metadata", state)
    >>> isinstance(metadata, Metadata), metadata["w"].size, metadata["w"].properties
    (True, (4, 2), TensorProperties(dtype='float32'))
    >>> metadata["step"]
    BytesStorageMetadata(kind='int')
    >>> [str(box) for box in metadata["w"].chunks], ChunkStorageMetadata((0, 0), (4, 2)).elements
    (['[0, 4) x [0, 2)'], 8)
"""

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
