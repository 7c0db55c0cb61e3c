"""How a load finds its reader and its planner, and fills a state in place.

1. Look once at what lies at the path. A checkpoint of ours and what nobody knows are for our own
   reader, which refuses the last; any other format is read through its `TensorSource`. At a URL the
   coordinator's read of the manifest is that look (`EitherReader`).
2. Without a mapping the planner is the caller's, or the default one. With a mapping it is one that
   plans against what the mapping makes of the checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from xckpt.core.metadata import Metadata
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.storage import StorageReader
from xckpt.engine.group import Group
from xckpt.engine.load import load_state
from xckpt.errors import XckptError
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping

__all__ = ["load_in_place", "reader_and_planner"]

OURS = "xckpt"


def reader_and_planner(
    path: str | os.PathLike[str],
    group: Group,
    *,
    strict: bool,
    cast: bool,
    planner: LoadPlanner | None,
    options: LoadOptions | None,
    mapping: LeafMapping | None,
    allow_lossy: bool,
) -> tuple[StorageReader, LoadPlanner]:
    """What reads a path and what plans the load; for the arguments see `xckpt.load`.

    Raises:
        ValueError: both a mapping and a planner are given.
    """
    format = _format_at(path)
    reader = _reader(path, format, options)
    if mapping is None:
        return reader, DefaultLoadPlanner(strict=strict, cast=cast) if planner is None else planner
    if planner is not None:
        raise ValueError("give a mapping or a planner; a MappedLoadPlanner can have both")
    from xckpt.convert.mapped_load import MappedLoadPlanner
    from xckpt.formats.detect import open_source

    return reader, MappedLoadPlanner(
        mapping,
        lambda: open_source(path, format),
        strict=strict,
        cast=cast,
        allow_lossy=allow_lossy,
        rank=group.rank,
        ranks=group.size,
        options=options,
    )


def _format_at(path: str | os.PathLike[str]) -> str | None:
    """The format of what lies at a path, as `xckpt.formats.detect` names it; ours if unknown,
    None of a URL, at which nobody has looked yet.
    """
    from xckpt.storage.location import Location

    with suppress(XckptError, OSError):
        folder = Location.parse(path).folder
        if folder is None:
            return None
        # A load of our own checkpoints is not to wait for the import of `xckpt.convert`.
        if folder.exists() and not (folder / "xckpt.json").exists():
            from xckpt.formats.detect import detect

            return detect(path)
    return OURS


def _reader(
    path: str | os.PathLike[str], format: str | None, options: LoadOptions | None
) -> StorageReader:
    if format in (OURS, None):
        from xckpt.formats.either import EitherReader
        from xckpt.storage.read_checkpoint import ZarrStorageReader

        ours = ZarrStorageReader(path, options=options)
        return ours if format == OURS else EitherReader(ours, lambda: _other(path, options))
    from xckpt.formats.detect import open_source
    from xckpt.formats.reader import SourceReader

    return SourceReader(lambda: open_source(path, format), str(path), options=options)


def _other(path: str | os.PathLike[str], options: LoadOptions | None) -> StorageReader | None:
    """The reader of what another library wrote; None if there is nothing that is known."""
    from xckpt.formats.detect import detect

    with suppress(XckptError):
        format = detect(path)
        if format != OURS:
            return _reader(path, format, options)
    return None


def load_in_place(
    state: object, reader: StorageReader, *, group: Group, planner: LoadPlanner
) -> Metadata:
    """Load into a state, in place whatever the planner is set to do elsewhere."""
    if state is None:
        raise TypeError("there is nothing to load into: give the state that is to be filled")
    tree: Mapping[str, object] = state  # type: ignore[assignment]  # our planners take any tree
    before, planner.in_place = planner.in_place, True
    try:
        metadata = load_state(tree, reader, group=group, planner=planner)
        planner.result()
    finally:
        planner.in_place = before
    return metadata
