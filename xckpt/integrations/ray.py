"""Ray Train: workers save to the run's storage directly, and report the checkpoint; no upload.

1. `report` saves a state, all workers together, into the run's folder or bucket; then it reports
   the checkpoint, so that Ray's results, rules (`num_to_keep`) and retries know it.
2. `restore_into` fills a state from the checkpoint that was reported last; if that is damaged, from
   the one before, as long as Ray's rules have kept one.
"""

# Ray has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count
from typing import Any

from xckpt.api.load import load_into
from xckpt.api.save import save
from xckpt.integrations.absent import absent
from xckpt.integrations.bases import bases_of
from xckpt.integrations.newest import newest_good
from xckpt.options import LoadOptions, SaveOptions

try:
    from ray import train
    from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode
except ImportError as error:
    train = Checkpoint = absent("ray[train]", error)
    CheckpointConsistencyMode = CheckpointUploadMode = train

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
        name: of the checkpoint's folder in the run's folder, such as ``"step-100"``; if that was
            reported already, because the run went back behind it, ``-2`` or more is added.
        options: see `xckpt.save`.

    Raises:
        ValueError: xckpt cannot open the run's storage.
        XckptError: as `xckpt.save`; nothing is reported.
    """
    storage = train.get_context().get_storage()
    # Ray deletes by path: a step that is done again, behind a damaged one, has another.
    known = {url_of(each.checkpoint) for each in _reported()}
    names = chain([name], (f"{name}-{again}" for again in count(2)))
    paths = (storage.build_checkpoint_path_from_name(each) for each in names)
    found = (Checkpoint(path, filesystem=storage.storage_filesystem) for path in paths)
    checkpoint = next(each for each in found if url_of(each) not in known)
    # A worker that was started again before it had reported saves the step again.
    base = bases_of(storage).next(url_of(checkpoint))
    save(url_of(checkpoint), state, overwrite=True, base=base, options=options)
    train.report(
        metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD
    )


def restore_into(state: object, *, options: LoadOptions | None = None) -> bool:
    """Fill a state from the newest good checkpoint that was reported; whether there is any.

    Every worker calls it. A damaged one is passed over with a warning, and the one before is taken.

    Args:
        state: see `xckpt.load_into`; on any number of workers.
        options: see `xckpt.load_into`.

    Raises:
        CorruptCheckpointError: all are damaged.
        XckptError: as `xckpt.load_into`.
    """
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return False

    def loaded(path: str) -> str:
        load_into(path, state, options=options)
        return path

    restored = newest_good(_newest_first(checkpoint), loaded)
    bases_of(train.get_context().get_storage()).restored(restored)
    return True


def _reported() -> list[Any]:
    """What Ray knows of the checkpoints that were reported, the oldest first."""
    return train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)


def _newest_first(newest: Any) -> Iterator[str]:
    """The places of the checkpoints that Ray knows; Ray is asked for older ones if needed."""
    yield url_of(newest)
    earlier = (url_of(each.checkpoint) for each in reversed(_reported()))
    yield from (path for path in earlier if path != url_of(newest))


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
