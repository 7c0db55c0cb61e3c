"""`xckpt ls ROOT`: the steps of a run, a line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xckpt.cli.render.columns import columns
from xckpt.core.run.record import StepRecord
from xckpt.core.run.rules import kept_by
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes
from xckpt.core.text.times import utc_text


def step_lines(records: Sequence[StepRecord], shared: Mapping[str, int]) -> Iterator[str]:
    """The columns of a listing: folder, time (UTC), size, shared bytes, metrics, what keeps it.

    Args:
        records: by number, or the other way round.
        shared: folder name -> bytes that other steps share; see `xckpt.viewer.run.shared_at`.

    Example:
        >>> list(step_lines([StepRecord(3, 60.0, {"loss": 0.25}, 1024, keep=("Latest(2)",))], {}))
        ['step-00000003  1970-01-01 00:01:00Z  1.0 KiB  loss=0.25  Latest(2)']
    """
    reasons = kept_by(sorted(records, key=lambda record: record.number))
    cells = (
        (
            printable(record.name),
            utc_text(record.time),
            _size(record, shared.get(record.name, 0)),
            " ".join(f"{printable(name)}={value:.6g}" for name, value in record.metrics.items()),
            ", ".join(map(printable, reasons[record.number])),
        )
        for record in records
    )
    return columns(cells, right=[2])


def _size(record: StepRecord, shared: int) -> str:
    if record.format != "xckpt":
        return record.format
    size = readable_bytes(record.bytes)
    return f"{size}, {readable_bytes(shared)} shared" if shared else size


def step_values(records: Sequence[StepRecord], shared: Mapping[str, int]) -> list[dict[str, Any]]:
    """The same as values, for JSON.

    Example:
        >>> step_values([StepRecord(3, 60.0)], {})[0]["kept_by"]
        ['newest']
    """
    reasons = kept_by(sorted(records, key=lambda record: record.number))
    shown = ("number", "time", "metrics", "bytes", "base", "name", "format")
    return [
        {each: getattr(record, each) for each in shown}
        | {"shared": shared.get(record.name, 0), "kept_by": list(reasons[record.number])}
        for record in records
    ]
