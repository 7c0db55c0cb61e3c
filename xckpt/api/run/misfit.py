"""Whether a step that does not fit a target is damaged, too.

A load compares leaves with the target before it reads a chunk. Where other ranks have saved the
newest step, their `xckpt.PerRank` leaves do not fit, and its damage would stay unseen, though an
older step is good and fits. So the step is verified, once its load has failed. That reads all of
it, and is of use only where an older step has other leaves: a wrong target is refused at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from xckpt.api.open import open
from xckpt.api.run.folder import RunFolder
from xckpt.api.save import Path
from xckpt.core.manifest.entries import TensorEntry
from xckpt.engine.ranks.group import operation
from xckpt.engine.steps import broadcast
from xckpt.errors import CorruptCheckpointError, XckptError
from xckpt.options import LoadOptions


def damage_of(
    folder: RunFolder, path: Path, older: Iterable[Path], options: LoadOptions | None
) -> CorruptCheckpointError | None:
    """The damage of a step that does not fit; None if it has none, or no older one may fit.

    Collective; the coordinator reads.

    Args:
        folder: the roots of the run.
        path: where the step is.
        older: where the older ones are.
        options: those of the load.
    """

    def looked() -> bytes:
        leaves = _leaves(path, options)
        known = (leaves, None)
        others = leaves is not None and any(_leaves(each, options) not in known for each in older)
        return msgspec.msgpack.encode(_problems(path, options) if others else [])

    with operation(folder.group, "restore of its CheckpointManager"):
        answer = broadcast(folder.group, "verify a step that does not fit the target", looked)
    problems = msgspec.msgpack.decode(answer, type=list[str])
    summary = f"{path} is damaged, and does not fit the target"
    return CorruptCheckpointError.listing(summary, problems) if problems else None


def _leaves(path: Path, options: LoadOptions | None) -> set[tuple[object, ...]] | None:
    """What a target has to fit of a step; None if it cannot be opened."""
    try:
        with open(path, options=options) as checkpoint:
            return {
                (leaf.name, *((leaf.shape, leaf.dtype) if isinstance(leaf, TensorEntry) else ()))
                for leaf in checkpoint.manifest.leaves
            }
    except XckptError:
        return None


def _problems(path: Path, options: LoadOptions | None) -> list[str]:
    """What is wrong with a step; nothing, if the storage refuses to say."""
    from xckpt.storage.refusals import error_of_reading

    try:
        with open(path, options=options) as checkpoint:
            problems = checkpoint.verify()
    except XckptError:
        return []
    return [] if error_of_reading(os.fspath(path), problems) else [str(each) for each in problems]
