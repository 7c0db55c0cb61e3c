"""xckpt carries a sharded training state from one framework's sharding into another's.

    import xckpt

    xckpt.save("ckpt", {"model": model.state_dict(), "step": step})    # torch, on every rank
    state = xckpt.load("ckpt", like)                                   # jax, on any mesh

In between lie plain zarr chunks that any zarr reader opens. See `save`, `save_async`, `load`,
`load_into`, `open`, the errors, and `CheckpointManager` for all the checkpoints of a run;
`save_state_dict` and `load_state_dict` take your own storages and planners.
"""

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("xckpt does not run on Windows itself; use it in WSL 2, on Linux or on macOS")

from xckpt.api.diff import diff
from xckpt.api.gc import gc
from xckpt.api.load import load, load_into
from xckpt.api.open import open
from xckpt.api.places import copy, delete, exists
from xckpt.api.save import names_limits, save, save_async
from xckpt.api.view import view
from xckpt.core.manifest.differences import Difference
from xckpt.core.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from xckpt.core.part.per_rank import PerRank
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import LoadReport
from xckpt.core.plan.save import SavePlanner
from xckpt.core.run.record import StepRecord
from xckpt.engine.adapters import BY_DEFAULT, loaded_adapters
from xckpt.engine.background import SaveFuture
from xckpt.engine.ranks.group import Group, LocalGroup
from xckpt.errors import (
    CheckpointExistsError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    LeafTooLargeError,
    ManifestError,
    MappingError,
    MemoryLimitError,
    NoGroupError,
    NotACheckpointError,
    PathError,
    PlanError,
    Problem,
    RankFailure,
    RanksFailedError,
    StorageError,
    TreeMismatchError,
    UnsafePickleError,
    UnsupportedLeafError,
    VersionError,
    XckptError,
)
from xckpt.options import LoadOptions, SaveOptions
from xckpt.progress import Metrics, Progress
from xckpt.state_dict import load_state_dict, save_state_dict

if TYPE_CHECKING:
    from xckpt import adapters as adapters
    from xckpt import convert as convert
    from xckpt import errors as errors
    from xckpt import metadata as metadata
    from xckpt import planner as planner
    from xckpt import policies as policies
    from xckpt import staging as staging
    from xckpt import storage as storage
    from xckpt.manager import CheckpointManager
    from xckpt.storage.checkpoint import Checkpoint
    from xckpt.storage.stored_array import StoredArray

__version__ = "0.1.0"

# The first save should not wait for these imports. An adapter that cannot be imported raises an
# error when it is needed.
with contextlib.suppress(Exception):
    loaded_adapters()
# A planner that is driven by hand knows the same frameworks.
SavePlanner.adapters = LoadPlanner.adapters = BY_DEFAULT

__all__ = [
    "Checkpoint",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointReplacedError",
    "ChunkStorageMetadata",
    "CorruptCheckpointError",
    "Difference",
    "Group",
    "LeafTooLargeError",
    "LoadOptions",
    "LoadReport",
    "LocalGroup",
    "ManifestError",
    "MappingError",
    "MemoryLimitError",
    "Metadata",
    "MetadataIndex",
    "Metrics",
    "NoGroupError",
    "NotACheckpointError",
    "PathError",
    "PerRank",
    "PlanError",
    "Problem",
    "Progress",
    "RankFailure",
    "RanksFailedError",
    "SaveFuture",
    "SaveOptions",
    "StepRecord",
    "StorageError",
    "StoredArray",
    "TensorProperties",
    "TreeMismatchError",
    "UnsafePickleError",
    "UnsupportedLeafError",
    "VersionError",
    "XckptError",
    "__version__",
    "copy",
    "delete",
    "diff",
    "exists",
    "gc",
    "load",
    "load_into",
    "load_state_dict",
    "open",
    "save",
    "save_async",
    "save_state_dict",
    "view",
]


_LATER = {
    "Checkpoint": "xckpt.storage.checkpoint",
    "CheckpointManager": "xckpt.manager",
    "StoredArray": "xckpt.storage.stored_array",
}
"""Names that come from slow imports -> the module that has each."""
_SUBMODULES = (
    "adapters",
    "convert",
    "errors",
    "metadata",
    "planner",
    "policies",
    "staging",
    "storage",
)


@names_limits
def __getattr__(name: str) -> object:
    """Load slow imports when they are first named: submodules, runs, types of a checkpoint.

    TensorStore is loaded with `storage` and with those types, and not before.
    """
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"xckpt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a user may name, for completion: also what is not loaded yet."""
    return sorted([*__all__, *_SUBMODULES])
