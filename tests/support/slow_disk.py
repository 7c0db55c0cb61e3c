"""A disk that is slow, or that does not answer any more, for the process that says so.

`slow_disk` stands between xckpt and the calls by which it writes, reads and syncs local files. A
call that hangs notes when, and ends after some time, as a network file system's may whose server
comes back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CALLS = ("pwrite", "preadv", "fsync")
MOST_BYTES = 1 << 18
"""What one call moves: less than it was asked for, as a disk that is slow may."""


@contextlib.contextmanager
def slow_disk(
    seconds: float, *, hangs_from: int = 0, hangs_for: float = 0.0, note: Path | None = None
) -> Iterator[None]:
    """Have each call take so long; from one on all hang, until the time is over.

    Args:
        seconds: what a call takes.
        hangs_from: number of the call, from 1 on, that hangs; 0 for none.
        hangs_for: seconds.
        note: a file that says when the first one hung, by `time.monotonic`.
    """
    count = itertools.count(1)
    kept = {name: getattr(os, name) for name in CALLS}
    began: list[float] = []

    def slowed(name: str) -> Any:
        def call(descriptor: int, content: Any = (), position: int = 0) -> int | None:
            if 0 < hangs_from <= next(count):
                began.append(time.monotonic())
                if note is not None and len(began) == 1:
                    note.write_text(str(began[0]))
                time.sleep(max(0.0, began[0] + hangs_for - time.monotonic()))
            time.sleep(seconds)
            if name == "fsync":
                return kept[name](descriptor)
            some = content[:MOST_BYTES] if name == "pwrite" else [content[0][:MOST_BYTES]]
            return kept[name](descriptor, some, position)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, slowed(name))
        yield
