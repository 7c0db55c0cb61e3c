"""Where a run resumes: ``ckpt_path="last"`` asks for the newest checkpoint of a folder.

1. Where ``last.ckpt`` is damaged, others beside it are tried, the newest first.
2. Lightning finds one also if this process was killed in the midst of a save.
"""

# Lightning has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias, cast

from xckpt.api.open import open as open_checkpoint
from xckpt.api.places import exists
from xckpt.api.save import Path as AnyPath
from xckpt.core.run.bases import Bases
from xckpt.core.storage import url_parts
from xckpt.engine.groups import find_group
from xckpt.errors import XckptError
from xckpt.integrations.absent import absent
from xckpt.integrations.lightning.uncommitted import clear_away
from xckpt.integrations.newest import newest_good

try:
    from lightning.fabric.utilities.cloud_io import get_filesystem
except ImportError as error:
    get_filesystem = absent("lightning", error)

State: TypeAlias = dict[str, Any]


def resume(path: AnyPath, load: Callable[[str], State], bases: Bases) -> State:
    """Load a checkpoint; where the last one is damaged, the newest good one beside it.

    All ranks call it.

    Args:
        path: what Lightning asks for.
        load: called with a path.
        bases: of the saves that follow.

    Raises:
        XckptError: as `newest_good`.
    """
    found, state = newest_good(_resumable(path), lambda each: (each, load(each)))
    bases.restored(found)
    group = find_group()
    if group.rank == group.coordinator and url_parts(found) is None:
        with contextlib.suppress(OSError):
            clear_away(Path(path), Path(found))
    if found != os.fspath(path):
        _give_again(path, state)
    return state


def _give_again(path: AnyPath, state: State) -> None:
    """Have `ModelCheckpoint` save the last one where no good one is: else it is last-v1.ckpt.

    It takes a name that is there only if its state knows that as its own; a process that was killed
    in its first save of the last one has not saved such a state.
    """
    for each in state.get("callbacks", {}).values():
        there = isinstance(each, dict) and each.get("dirpath") == os.path.dirname(path)
        if there and not each.get("last_model_path", path):
            each["last_model_path"] = os.fspath(path)


def _resumable(path: AnyPath) -> Iterator[str]:
    """A checkpoint; and where it is the last one, those beside it, the newest first."""
    yield os.fspath(path)
    folder, name = os.path.split(os.fspath(path))
    if name.startswith("last"):
        names = map(os.path.basename, get_filesystem(folder).ls(folder, detail=False))
        beside = {os.path.join(folder, each) for each in names if each.endswith(".ckpt")}
        yield from sorted(beside - {os.fspath(path)}, key=_step, reverse=True)


def _step(path: str) -> tuple[int, str]:
    """The step of a checkpoint, and its path, which distinguishes those of one step."""
    try:
        return cast(int, open_checkpoint(path)["global_step"]), path
    except (XckptError, KeyError):
        return -1, path


def make_way(path: AnyPath, *, alone: bool, background: bool) -> None:
    """Before a save: if this process is killed until the commit, Lightning has a last checkpoint.

    Args:
        path: of the save.
        alone: whether one rank saves, as Lightning's own saves of one file.
        background: whether `ModelCheckpoint` goes on before the commit.
    """
    if alone and os.path.isfile(path) and exists(path):
        # Lightning's own, of torch.save, where the run began without xckpt. Under such a name it is
        # still found as the last one.
        name, suffix = os.path.splitext(path)
        names = chain([f"{name}-torch{suffix}"], (f"{name}-torch-{n}{suffix}" for n in count(2)))
        os.rename(path, next(each for each in names if not os.path.lexists(each)))
    if background and url_parts(os.fspath(path)) is None and not os.path.lexists(path):
        # `ModelCheckpoint` links last.ckpt to it before it is committed: behind a link to nothing
        # Lightning finds no last checkpoint. So it should, if there is none to fall back to.
        folder = Path(path).parent
        is_first = not any(map(exists, folder.glob("*.ckpt")))
        with contextlib.suppress(OSError):  # the save says what is wrong
            os.makedirs(folder if is_first else path, exist_ok=True)
