"""A load through a mapping, and other libraries' checkpoints: imported where a load needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from xckpt.api.parts import PartialLoad
from xckpt.api.save import Path
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import Strictness
from xckpt.engine.ranks.group import Group
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.formats.reader import FormatsAt
    from xckpt.mapping.mapping import LeafMapping


def check_mapping(
    mapping: LeafMapping | None, planner: LoadPlanner | None, wanted: PartialLoad
) -> None:
    """Refuse what a mapping does not go with.

    Raises:
        ValueError: a planner, or a part of the checkpoint, is asked for too.
    """
    if mapping is not None and planner is not None:
        raise ValueError("give a mapping or a planner; a MappedLoadPlanner can have both")
    if mapping is not None and not wanted.everything:
        raise ValueError("at=, select= and framework= are not for mappings, which say as much")


def mapped_planner(
    mapping: LeafMapping,
    others: Callable[[], FormatsAt],
    strictness: Strictness,
    cast: bool,
    allow_lossy: bool,
    group: Group,
    options: LoadOptions | None,
) -> LoadPlanner:
    """The planner of a load through a mapping."""
    from xckpt.convert.mapped_load import MappedLoadPlanner

    return MappedLoadPlanner(
        mapping,
        lambda: others().open_source(),
        missing=strictness.missing,
        unexpected=strictness.unexpected,
        cast=cast,
        allow_lossy=allow_lossy,
        rank=group.rank,
        ranks=group.size,
        options=options,
    )


def formats_at(path: Path, options: LoadOptions | None) -> FormatsAt:
    """What may be at a path in place of a checkpoint of ours."""
    # Imported when there is no checkpoint of ours, or a mapping.
    from xckpt.formats.reader import FormatsAt

    return FormatsAt(path, options)
