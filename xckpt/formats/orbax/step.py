"""From the caller's path to the folder with the tree; and the user metadata of its step.

1. `find_item` goes to the folder with ``_METADATA``: the path itself, the one tree of a step, or
   that of the one step of a `CheckpointManager`. If there are several, the error names them.
2. `user_metadata` gathers what Orbax keeps beside a tree: the custom metadata of the tree and of
   its step, and, if the caller gave the step, its items of JSON, the metrics among them.
3. Items of other kinds are not read. A warning names them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.run.foreign import JSON_FILES
from xckpt.core.text.printable import printable
from xckpt.errors import NotACheckpointError, naming
from xckpt.formats.orbax.tree import (
    CHECKPOINT,
    TREE,
    folders_in,
    items_in,
    parse_json,
    steps_in,
)
from xckpt.storage.foreign.documents import Allowance, read_json
from xckpt.storage.foreign.paths import AnyPath, FilePath

UNFINISHED: Final = ".orbax-checkpoint-tmp"
ITEMS: Final = "orbax.items"
"""The key of the user metadata that holds a step's items of JSON, by name."""

SHOWN: Final = 8


def find_item(path: AnyPath) -> AnyPath:
    """The folder with the tree that a path means.

    Raises:
        NotACheckpointError: there is none, or there are several; they are named.

    Example:
        >>> from pathlib import Path
        >>> Path("run/100/default").mkdir(parents=True)
        >>> Path("run/100/default", TREE).touch()
        >>> find_item(Path("run")).as_posix()
        'run/100/default'
    """
    if UNFINISHED in path.name:
        raise NotACheckpointError(f"{path}: Orbax has not finished writing it; load an older step")
    if not path.is_dir():
        raise NotACheckpointError(f"{path} is not a folder, so it is not a checkpoint of Orbax")
    if (path / TREE).is_file():
        return path
    items = items_in(path)
    if len(items) == 1:
        return items[0]
    if items:
        raise NotACheckpointError(
            f"{path} holds several items: {_named(items)}; give the path of one: {items[0]}"
        )
    steps = [each for each in steps_in(path) if UNFINISHED not in each.name]
    if len(steps) == 1:
        return find_item(steps[0])
    if steps:
        steps.sort(key=lambda each: (len(each.name), each.name))
        raise NotACheckpointError(
            f"{path} holds {len(steps)} steps: {_named(steps)}; give the path of one: {steps[-1]}"
        )
    raise NotACheckpointError(
        f"{path}: no {TREE} is in it, in an item below it, or in a step{_instead(path)}"
    )


def _named(folders: Sequence[FilePath]) -> str:
    more = f" and {len(folders) - SHOWN} more" if len(folders) > SHOWN else ""
    return ", ".join(each.name for each in folders[-SHOWN:]) + more


def _instead(path: FilePath) -> str:
    """What a folder without a tree holds."""
    if (path / "checkpoint").is_file():
        return " (it holds a msgpack file, as Orbax wrote checkpoints once; these are not read)"
    own = [each for each in folders_in(path) if (each / MANIFEST).is_file()]
    if own:
        return f" ({_named(own)}: checkpoints of xckpt; give the path of one of them: {own[0]})"
    names = [each.name for each in (path, *folders_in(path)) if json_file(each)]
    return f" (it holds JSON: {', '.join(names)}; read that file itself)" if names else ""


def user_metadata(
    path: FilePath, item: FilePath, custom: object, memory: Allowance
) -> Mapping[str, object]:
    """What is kept beside a tree.

    Args:
        path: what the caller gave.
        item: the folder of the tree.
        custom: the custom metadata of the tree itself.
        memory: what the documents may take together.

    Example:
        >>> from pathlib import Path
        >>> step = Path("step-of-run")
        >>> for item in ("default", "metrics"):
        ...     (step / item).mkdir(parents=True)
        >>> _ = (step / "metrics/metrics").write_text('{"loss": 0.5}')
        >>> user_metadata(step, step / "default", None, Allowance())
        {'orbax.items': {'metrics': {'loss': 0.5}}}
    """
    step = None if item == path else item.parent
    user: dict[str, object] = {}
    for folder in (item,) if step is None else (step, item):
        user |= _custom(folder, memory)
    user |= custom if isinstance(custom, dict) else {"custom_metadata": custom} if custom else {}
    if step is not None:
        beside = dict(_items(step, item, memory))
        if beside:
            user[ITEMS] = beside
    return user


def _custom(folder: FilePath, memory: Allowance) -> Mapping[str, object]:
    """The custom metadata of a folder's ``_CHECKPOINT_METADATA``."""
    path = folder / CHECKPOINT
    if not path.is_file():
        return {}
    with naming(path):
        document = parse_json(read_json(path, memory), dict[str, object])
    custom = document.get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def _items(step: FilePath, tree: FilePath, memory: Allowance) -> Iterator[tuple[str, object]]:
    """(name, content) of the items of JSON in a step."""
    others: list[str] = []
    for folder in folders_in(step):
        if folder == tree:
            continue
        path = json_file(folder)
        if path is None:
            others.append(folder.name)
            continue
        with naming(path):
            yield folder.name, parse_json(read_json(path, memory), object)
    if others:
        warnings.warn(
            f"{step}: {printable(', '.join(others))}: items that are neither a tree nor JSON; "
            "they are not read and are left out",
            stacklevel=2,
        )


def json_file(folder: FilePath) -> FilePath | None:
    """The file of an item of JSON; None if the folder is not such an item.

    Example:
        >>> from pathlib import Path
        >>> Path("metrics").mkdir()
        >>> Path("metrics/metrics").touch()
        >>> json_file(Path("metrics")).as_posix()
        'metrics/metrics'
    """
    return next((folder / name for name in JSON_FILES if (folder / name).is_file()), None)
