"""Which files in the folder of an item or a step are Orbax's; the others are the user's.

1. Beside a tree or a step lie files of known names (`_ORBAX`).
2. In an item Orbax has a folder for each array, which ``_METADATA`` names and in which zarr's
   files are, or the database's.
3. In a step there is a folder for each item, which ``_CHECKPOINT_METADATA`` names, or by what is in
   it an item of JSON. A step without that file is one only by its name.
4. A checkpoint of xckpt or DCP that lies anywhere in these is not Orbax's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, cast

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.errors import ManifestError, NotACheckpointError
from xckpt.formats.dcp.keys import METADATA_FILE
from xckpt.formats.orbax.step import find_item, json_file
from xckpt.formats.orbax.tree import (
    ARRAY_METADATA,
    CHECKPOINT,
    STEP,
    TREE,
    folders_in,
    items_in,
    parse_json,
    parse_tree,
)
from xckpt.storage.foreign.documents import Allowance, read_json

_ORBAX: Final = re.compile(
    r"_[A-Za-z_]+|_strings\.json|manifest\.ocdbt|commit_success\.txt|(orbax\.)?checkpoint|"
    r"metadata|metrics"
)
"""Orbax's files in the folder of a step or an item."""
_ZARR: Final = re.compile(r"\.z(array|attrs|group)|zarr\.json|c|[0-9]+(\.[0-9]+)*")
"""Files of an array of zarr 2 or 3."""
_FOLDERS: Final = re.compile(rf"d|ocdbt\.process_.*|{ARRAY_METADATA}")
"""Its folders in an item, beside those of arrays."""


def orbax_files(place: Path) -> tuple[Path, ...]:
    """Orbax's files of an item or a step; those that make it one come first.

    Raises:
        NotACheckpointError: it is neither, or several.

    Example:
        >>> import numpy as np, xckpt
        >>> from xckpt.convert import convert
        >>> _ = xckpt.save("memory://orbax-files", {"w": np.zeros(3)})
        >>> _ = convert("memory://orbax-files", "with-notes", format="orbax")
        >>> _ = Path("with-notes", "notes.txt").write_text("mine")
        >>> [file.name for file in orbax_files(Path("with-notes"))][:2]
        ['_CHECKPOINT_METADATA', '_METADATA']
        >>> {*files_below(Path("with-notes"))} - {*orbax_files(Path("with-notes"))}
        {PosixPath('with-notes/notes.txt')}
    """
    item = find_item(place)
    if item != place and item not in items_in(place):
        raise NotACheckpointError(
            f"{place} is a folder of steps of Orbax; give the path of a step: {item.parent}"
        )
    arrays = set(_of_arrays(item))
    folders = {*_of_database(item), *(() if item == place else _of_items(place, item))}
    below = files_below(place)
    foreign = {file.parent for file in below if file.name in (MANIFEST, METADATA_FILE)}
    others = foreign - {place, item}
    marks = [place / CHECKPOINT, item / TREE]
    own = (
        file
        for file in below
        if (
            _ORBAX.fullmatch(file.name)
            if file.parent in (place, item)
            else not folders.isdisjoint(file.parents)
            or (_ZARR.fullmatch(file.name) and not arrays.isdisjoint(file.parents))
        )
        and others.isdisjoint(file.parents)
    )
    return tuple(sorted(own, key=lambda file: file not in marks))


def files_below(folder: Path) -> list[Path]:
    """The files below a folder, and the links."""
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _of_database(item: Path) -> list[Path]:
    return [folder for folder in folders_in(item) if _FOLDERS.fullmatch(folder.name)]


def _of_arrays(item: Path) -> Iterator[Path]:
    """The folders in an item that hold its arrays."""
    try:
        leaves = parse_tree(read_json(item / TREE, Allowance())).leaves
        named = {PurePosixPath(leaf.stored_name).parts[:1] for leaf in leaves}
    except ManifestError:
        named = None  # It is damaged: an array is known by its own description.
    for folder in folders_in(item):
        is_array = any((folder / name).is_file() for name in (".zarray", "zarr.json"))
        if is_array if named is None else (folder.name,) in named:
            yield folder


def _of_items(step: Path, item: Path) -> Iterator[Path]:
    """The folders of a step's items, without that of the tree.

    Raises:
        NotACheckpointError: nothing says that the folder is a step.
    """
    names: object = {}
    if (step / CHECKPOINT).is_file():
        text = read_json(step / CHECKPOINT, Allowance())
        names = parse_json(text, dict[str, object]).get("item_handlers")
    elif not STEP.fullmatch(step.name):
        raise NotACheckpointError(
            f"{step} is no step of Orbax, so what lies there beside {item.name} may be yours; "
            f"give the path of the checkpoint: {item}"
        )
    known = cast(Mapping[str, object], names if isinstance(names, dict) else {})
    for folder in folders_in(step):
        if folder != item and (folder.name in known or json_file(folder) is not None):
            yield folder
