"""`open`: a checkpoint to look at, without loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xckpt.api.save import Path, check_path
from xckpt.options import LoadOptions, checked_options

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint


def open(path: Path, *, options: LoadOptions | None = None) -> Checkpoint:
    """Open a checkpoint to look at it or to read parts of it; see `Checkpoint`.

    Raises:
        NotACheckpointError: no committed checkpoint is at the path.
        ManifestError: the manifest cannot be trusted.
        TypeError: ``options`` are no `LoadOptions`.
    """
    check_path(path, "open(path)")
    options = checked_options(options, LoadOptions, "open")
    from xckpt.storage.checkpoint import Checkpoint

    return Checkpoint(path, options=options)
