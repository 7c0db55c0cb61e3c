"""Ray Train: workers save to the run's storage at once, and report what is there; no upload.

1. `report` saves a state, all workers together, into the run's folder or bucket; then it reports
   the checkpoint, so that Ray's results, rules (`num_to_keep`) and retries know it.
2. `restore_into` fills a state from the checkpoint that was reported last.
"""

# Ray has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

from xckpt.api.load import load_into
from xckpt.api.save import save
from xckpt.integrations.absent import absent
from xckpt.options import LoadOptions, SaveOptions

try:
    from ray import train
    from ray.train import Checkpoint, CheckpointUploadMode
except ImportError as error:
    train = Checkpoint = CheckpointUploadMode = absent("ray[train]", error)

__all__ = ["report", "restore_into", "url_of"]

SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Arrow's name of a file system -> what comes before its paths."""


def report(
    metrics: dict[str, Any], state: object, name: str, *, options: SaveOptions | None = None
) -> None:
    """Save a state and report it with its metrics; every worker calls it, in the training loop.

    Args:
        metrics: see ``ray.train.report``.
        state: see `xckpt.save`.
        name: of the checkpoint's folder in the run's, such as ``"step-100"``.
        options: see `xckpt.save`.

    Raises:
        ValueError: the run's storage is none that xckpt opens.
        XckptError: as `xckpt.save`; nothing is reported.
    """
    storage = train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name(name)
    checkpoint = Checkpoint(path, filesystem=storage.storage_filesystem)
    # A worker that was started again saves the step again.
    save(url_of(checkpoint), state, overwrite=True, options=options)
    train.report(
        metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def restore_into(state: object, *, options: LoadOptions | None = None) -> bool:
    """Fill a state from the checkpoint that was reported last; whether there is one.

    Args:
        state: see `xckpt.load_into`; on any number of workers.
        options: see `xckpt.load_into`.

    Raises:
        XckptError: as `xckpt.load_into`.
    """
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return False
    load_into(url_of(checkpoint), state, options=options)
    return True


def url_of(checkpoint: Any) -> str:
    """Where a checkpoint of Ray is, as xckpt takes it.

    Raises:
        ValueError: it is in a file system that xckpt does not open.

    Example:
        >>> from ray.train import Checkpoint
        >>> url_of(Checkpoint("/data/run/step-100"))
        '/data/run/step-100'
    """
    kind = checkpoint.filesystem.type_name
    if kind not in SCHEMES:
        raise ValueError(
            f"{checkpoint.path} is in a file system of the kind {kind!r}: xckpt opens "
            f"local folders, s3:// and gs://"
        )
    return f"{SCHEMES[kind]}{checkpoint.path}"
