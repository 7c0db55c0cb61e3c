"""The steps of a run, as a page shows them: when, how large, which metrics, what keeps each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from xckpt.core.manifest.entries import arrays
from xckpt.core.run.record import StepRecord
from xckpt.core.run.rules import UNREADABLE, kept_by
from xckpt.core.text.printable import printable
from xckpt.core.text.times import utc_text
from xckpt.options import LoadOptions
from xckpt.storage.base.shared import shared_bytes, shared_files
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.location import Location
from xckpt.storage.run_steps import committed_steps, described
from xckpt.viewer.model import StepShown

_CHUNK = re.compile(r"(.*)/c(?:/\d+)*", re.DOTALL)
"""Path of an array, in that of a chunk's file."""


def steps_at(path: str) -> list[StepRecord]:
    """The committed steps of the root at a path; those that cannot be read say so as their format.

    Raises:
        StorageError: the storage refused.
    """
    root = Location.parse(path)
    found = described(root, committed_steps(root), LoadOptions().memory_bytes)
    unreadable = (replace(each, format=UNREADABLE) for each in found.unreadable)
    return sorted([*found.records, *unreadable], key=lambda record: record.number)


def is_run(format: str, steps: Callable[[], Sequence[StepRecord]]) -> bool:
    """Whether a folder that opens as another library's checkpoint is a run with steps of xckpt.

    A folder with one step of Orbax opens as that step.

    Args:
        format: of what it opens as.
        steps: lists the steps there.

    Example:
        >>> is_run("xckpt", list), is_run("orbax", lambda: [StepRecord(3, 60.0)])
        (False, True)
    """
    return format != "xckpt" and any(each.format == "xckpt" for each in steps())


def shared_at(path: str, records: Sequence[StepRecord]) -> tuple[dict[str, int], int]:
    """Folder name -> bytes of a step's local files that other checkpoints have too; and their sum.

    The sum counts a file once, however many of the steps have it.

    Raises:
        StorageError: the storage refused.
    """
    names = [record.name for record in records if record.format == "xckpt"]
    root = Location.parse(path)
    shared = shared_bytes([root.within(name) for name in names])
    return dict(zip(names, shared.of, strict=True)), shared.once


def run_shown(path: str, records: Sequence[StepRecord]) -> tuple[tuple[StepShown, ...], int]:
    """The steps of the run at a path, and the bytes that they share, each file counted once.

    Raises:
        StorageError: the storage refused.
    """
    shared, once = shared_at(path, records)
    return steps_shown(records, shared), once


def steps_shown(records: Sequence[StepRecord], shared: Mapping[str, int]) -> tuple[StepShown, ...]:
    """The steps of a run, by number.

    Args:
        records: by number.
        shared: folder name -> bytes that others have too; see `shared_at`.

    Example:
        >>> [step] = steps_shown([StepRecord(3, 60.0, {"loss": float("nan")}, 1024)], {})
        >>> step.name, step.time, step.metrics, step.kept_by
        ('step-00000003', '1970-01-01 00:01:00Z', {'loss': 'nan'}, ('newest',))
    """
    reasons = kept_by(records)
    return tuple(
        StepShown(
            record.number,
            printable(record.name),
            utc_text(record.time),
            record.bytes,
            shared.get(record.name, 0),
            {
                printable(name): value if isfinite(value) else str(value)
                for name, value in record.metrics.items()
            },
            tuple(map(printable, reasons[record.number])),
            record.format,
        )
        for record in records
    )


def shared_by_leaf(checkpoint: Checkpoint) -> dict[str, int]:
    """Leaf name -> bytes of its local files that other checkpoints have too."""
    if checkpoint.format != "xckpt":
        return {}
    manifest = checkpoint.manifest
    root = f"{manifest.root}/" if manifest.root else ""
    leaves: dict[str, str] | None = None
    found: dict[str, int] = {}
    for file in shared_files(checkpoint.location):
        if leaves is None:
            leaves = {f"{root}{array.path}": array.leaf for array in arrays(manifest)}
        chunk = _CHUNK.fullmatch(file.path)
        leaf = leaves.get(chunk[1]) if chunk else None
        if leaf is not None:
            found[leaf] = found.get(leaf, 0) + file.bytes
    return found
