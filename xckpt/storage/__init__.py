"""Storage: the only package of xckpt that imports tensorstore.

Read in this order: `location` (where), `array` (one zarr array), `commit` (how a save becomes
visible), `write_checkpoint`, `chunks` (reading chunks), `read_checkpoint`, `checkpoint` (an open
checkpoint). A storage of another kind implements `StorageWriter` and `StorageReader`.
"""

from xckpt.core.storage import StorageReader, StorageWriter
from xckpt.engine.limits import check_loaded

check_loaded()

# After it, because they load TensorStore.
from xckpt.storage.read_checkpoint import ZarrStorageReader  # noqa: E402
from xckpt.storage.write_checkpoint import ZarrStorageWriter  # noqa: E402

__all__ = ["StorageReader", "StorageWriter", "ZarrStorageReader", "ZarrStorageWriter"]
