"""xckpt carries a sharded training state from one framework's sharding into another's.

    import xckpt

    xckpt.save("ckpt", {"model": model.state_dict(), "step": step})    # torch, on every rank
    state = xckpt.load("ckpt", like)                                   # jax, on any mesh

In between lie plain zarr chunks that any zarr reader opens. See `save`, `load`, `load_into`, `open`
and the errors.
"""

from typing import TYPE_CHECKING

from xckpt.api import load, load_into, open, save
from xckpt.core.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from xckpt.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    PlanError,
    RankFailure,
    RanksFailedError,
    StorageError,
    TreeMismatchError,
    UnsupportedLeafError,
    VersionError,
    XckptError,
)
from xckpt.options import LoadOptions, Progress, SaveOptions

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint, StoredArray

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "ChunkStorageMetadata",
    "CorruptCheckpointError",
    "LoadOptions",
    "ManifestError",
    "Metadata",
    "MetadataIndex",
    "NotACheckpointError",
    "PlanError",
    "Progress",
    "RankFailure",
    "RanksFailedError",
    "SaveOptions",
    "StorageError",
    "StoredArray",
    "TensorProperties",
    "TreeMismatchError",
    "UnsupportedLeafError",
    "VersionError",
    "XckptError",
    "__version__",
    "load",
    "load_into",
    "open",
    "save",
]


def __getattr__(name: str) -> object:
    """Load the types of an open checkpoint, and TensorStore with them, when somebody names them."""
    if name in ("Checkpoint", "StoredArray"):
        from xckpt.storage import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
