"""`open`: a checkpoint to look at, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint


def open(path: Path, *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts of it; see `Checkpoint`.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
    """
    check_path(path, "open(path)")
    from xckpt.storage.checkpoint import Checkpoint

    return Checkpoint(path, options=options)
