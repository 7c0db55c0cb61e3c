"""`xckpt ls ROOT`: the steps of a run, a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from xckpt.cli.columns import columns
from xckpt.core.run.record import StepRecord
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes


def steps_at(path: str) -> list[StepRecord]:
    """The committed steps of the root at a path; those that cannot be read have no time.

    Raises:
        StorageError: the storage refused.
    """
    from xckpt.storage.location import Location
    from xckpt.storage.run_steps import committed_steps, described

    root = Location.parse(path)
    found = described(root, committed_steps(root))
    unreadable = [StepRecord(number, name=name) for number, name in found.unreadable.items()]
    return sorted([*found.records, *unreadable], key=lambda record: record.number)


def step_lines(records: Sequence[StepRecord]) -> Iterator[str]:
    """The columns of a listing: folder, time (UTC), size, metrics.

    Example:
        >>> list(step_lines([StepRecord(3, 60.0, {"loss": 0.25}, 1024)]))
        ['step-00000003  1970-01-01 00:01:00Z  1.0 KiB  loss=0.25']
    """
    cells = (
        (
            printable(record.name),
            _time(record.time),
            readable_bytes(record.bytes),
            " ".join(f"{printable(name)}={value:.6g}" for name, value in record.metrics.items()),
        )
        for record in records
    )
    return columns(cells, right=[2])


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):  # a number that is no time
        return ""
