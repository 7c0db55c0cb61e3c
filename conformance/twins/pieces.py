"""The pieces of a leaf as rows, for twins and tests that edit them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, list[int]]
COLUMNS = ("offset", "shape", "chunk", "shard")


def rows_of(cut: dict[str, Any]) -> list[Row]:
    """A cut of the manifest as rows, one for each piece."""
    names = [name for name in COLUMNS if cut.get(name)]
    columns = [
        np.frombuffer(base64.b64decode(cut[name]), "<i8").reshape(-1, cut["rank"]).tolist()
        for name in names
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def cut_of(rows: Sequence[Row], rank: int) -> dict[str, Any]:
    """The cut that consists of some rows."""
    names = COLUMNS if rows and "shard" in rows[0] else COLUMNS[:3]
    columns = {name: [number for row in rows for number in row[name]] for name in names}
    encoded = {
        name: base64.b64encode(np.array(column, "<i8").tobytes()).decode()
        for name, column in columns.items()
    }
    return {"rank": rank, **encoded}


def lengthened(cut: dict[str, Any], times: int) -> dict[str, Any]:
    """A cut with its first piece that many times more."""
    longer = dict(cut)
    for name in COLUMNS:
        if cut.get(name):
            content = base64.b64decode(cut[name])
            content += content[: 8 * cut["rank"]] * times
            longer[name] = base64.b64encode(content).decode()
    return longer
