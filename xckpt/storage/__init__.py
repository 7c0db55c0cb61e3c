"""Storage: the only package of xckpt that imports tensorstore.

Read in this order: `location` (where), `arrays` (one zarr array), `commit` (how a save becomes
visible), `writer`, `reader`, `checkpoint` (an open checkpoint). `StorageWriter` and `StorageReader`
are what a storage of another kind has to be.
"""

from xckpt.core.storage import StorageReader, StorageWriter
from xckpt.storage.read_checkpoint import ZarrStorageReader
from xckpt.storage.write_checkpoint import ZarrStorageWriter

__all__ = ["StorageReader", "StorageWriter", "ZarrStorageReader", "ZarrStorageWriter"]
