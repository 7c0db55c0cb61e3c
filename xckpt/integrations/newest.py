"""What hooks have in common: how they find the newest good checkpoint.

1. `newest_good` tries checkpoints, the newest first. Damaged ones are passed over with a warning
   that says which and why, as `xckpt.CheckpointManager.restore` does.
2. Where a trainer loads a checkpoint in parts, `newest_whole` verifies it before the first part.
3. `is_ours` tells checkpoints of xckpt from those that the trainer itself has saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import msgspec

from xckpt.api.open import open as open_checkpoint
from xckpt.api.run.restore import Candidate, Damaged, first_good, passed_over
from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.engine.groups import find_group
from xckpt.engine.ranks.group import operation
from xckpt.engine.steps import broadcast
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.refusals import error_of_reading

T = TypeVar("T")


def newest_good(paths: Iterable[str], load: Callable[[str], T]) -> T:
    """What is loaded from the first of several checkpoints that is not damaged.

    All ranks have to give the same paths, and a load that fails on one has to fail on all.

    Args:
        paths: the newest first; an older one is asked for once the one before is damaged.
        load: called with a path.

    Raises:
        XckptError: what ``load`` raised, if that is not damage, or there is one path.
        CorruptCheckpointError: all are damaged.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://newest/1", {"w": np.ones(2)})
        >>> newest_good(["memory://newest/1"], xckpt.load)
        {'w': array([1., 1.])}
    """
    damaged: Damaged = {}
    candidates = (Candidate(path, name=path) for path in paths)
    found = first_good(candidates, lambda path: load(os.fspath(path)), damaged, stacklevel=4)
    if found is not None:
        return found[1]
    if len(damaged) == 1:
        raise next(iter(damaged.values()))
    summary = "no checkpoint is good, so nothing was restored"
    raise CorruptCheckpointError.listing(summary, passed_over(damaged))


def check_whole(path: str) -> str:
    """The path of a checkpoint, once all of it was read and verified.

    Raises:
        CorruptCheckpointError: it is damaged.
        StorageError, LeafTooLargeError: parts cannot be read, and nothing else is damaged.
        XckptError: as `xckpt.open`.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://whole", {"w": np.ones(2)})
        >>> check_whole("memory://whole")
        'memory://whole'
    """
    problems = open_checkpoint(path).verify()
    if problems:
        damaged = CorruptCheckpointError.listing(f"{path}: damaged", problems)
        raise error_of_reading(path, problems) or damaged
    return path


def newest_whole(paths: Callable[[], Sequence[str]], check: Callable[[str], str]) -> str | None:
    """The newest checkpoint that is not damaged, found on one rank for all; None if there is none.

    Args:
        paths: lists them, the newest first.
        check: such as `check_whole`.

    Raises:
        XckptError: as `newest_good`, on every rank.

    Example:
        >>> newest_whole(lambda: [], check_whole) is None
        True
    """

    def found() -> str | None:
        there = paths()
        return newest_good(there, check) if there else None

    return said_by_one("find the newest good checkpoint", found, str | None)


def said_by_one(what: str, ask: Callable[[], object], kind: Any) -> Any:
    """What one process says, for all of them; every process calls it.

    Args:
        what: the purpose, for messages.
        ask: called on one process; what it raises, all raise.
        kind: the type of its answer.

    Example:
        >>> said_by_one("count", lambda: {1: "one"}, dict[int, str])
        {1: 'one'}
    """
    group = find_group()
    with operation(group):
        said = broadcast(group, what, lambda: msgspec.msgpack.encode(ask()))
    return msgspec.msgpack.decode(said, type=kind)


def is_ours(checkpoint: object) -> TypeGuard[str]:
    """Whether a trainer's checkpoint is one of xckpt, in a local folder; one rank looks for all.

    Every process calls it. A host that does not see the folder learns so from the load.

    Example:
        >>> is_ours("checkpoint-of-the-trainer"), is_ours(True)
        (False, False)
    """
    if not isinstance(checkpoint, str | os.PathLike):
        return False
    return said_by_one("look for a checkpoint", Path(checkpoint, MANIFEST).exists, bool)
