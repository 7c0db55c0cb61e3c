"""What deleting a step of 10,000 files costs the saves beside it, throttled and not.

1. A step of 10,000 small chunks is saved, and taken out of sight.
2. A state of 256 MiB is saved again and again, in turns: once while the files of the step are
   deleted in the background, as a manager does it, and once while the deletion pauses. So both
   kinds of saves see the same machine, whatever else it does.
3. The same without a rate, where the deletion is over within a save or two.

``python -m benchmarks.deletions [FOLDER]`` prints the figures; the folder decides the file system.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import xckpt
from xckpt.manager import DELETE_RATE
from xckpt.storage.commit.remove import Pace, hide_checkpoint
from xckpt.storage.location import Location

FILES = 10_000
CHUNK = 4096
"""Bytes of each."""
STATE = 1 << 28
"""Bytes of what is saved beside."""
ROUNDS = 3
"""Steps that are deleted."""


class Pausing(Pace):
    """A pace that can be held."""

    def __init__(self, per_second: float | None) -> None:
        super().__init__(per_second)
        self.goes = threading.Event()
        self.deleted = 0

    def after(self, count: int) -> None:
        """Wait as the pace says, and while it is held."""
        self.deleted += count
        super().after(count)
        self.goes.wait()


@dataclass(slots=True)
class Saves:
    """Seconds of saves with and without a deletion beside them."""

    rate: float | None
    alone: list[float] = field(default_factory=list[float])
    beside: list[float] = field(default_factory=list[float])
    deleted: int = 0
    """Files, during the saves beside."""

    @property
    def ratio(self) -> float:
        """A save beside the deletion, in saves alone."""
        return statistics.median(self.beside) / statistics.median(self.alone)

    def __str__(self) -> str:
        rate = "no rate" if self.rate is None else f"{self.rate:,.0f} files/s"
        alone, beside = statistics.median(self.alone), statistics.median(self.beside)
        return (
            f"{rate:>13}: a save alone {alone * 1e3:.0f} ms ({len(self.alone)}), beside the "
            f"deletion {beside * 1e3:.0f} ms ({len(self.beside)}): {self.ratio:.2f} x; beside them "
            f"{self.deleted / sum(self.beside):,.0f} files/s were deleted"
        )


def measure(folder: Path, rate: float | None, *, files: int = FILES, size: int = STATE) -> Saves:
    """Save beside deletions in a folder.

    Args:
        folder: where.
        rate: most files that are deleted a second.
        files: of each step.
        size: bytes that are saved beside.
    """
    state = {"w": np.random.default_rng(0).integers(0, 255, size, np.uint8)}
    many = {"w": np.zeros((files, CHUNK), np.uint8)}
    found = Saves(rate)
    for number in range(ROUNDS):
        step = folder / f"step-{number}"
        xckpt.save(step, many, options=xckpt.SaveOptions(chunk_bytes=CHUNK, pack_bytes=0))
        hidden, pace = hide_checkpoint(Location.parse(step)), Pausing(rate)
        deleting = threading.Thread(target=hidden.sweep, args=(pace,))
        _saved(folder, state)  # what the small files left to be written is written
        deleting.start()
        while deleting.is_alive():
            found.alone.append(_saved(folder, state))
            before = pace.deleted
            pace.goes.set()
            seconds = _saved(folder, state)
            pace.goes.clear()
            if deleting.is_alive() or rate is None:
                found.beside.append(seconds)
                found.deleted += pace.deleted - before
        deleting.join()
    return found


def _saved(folder: Path, state: dict[str, np.ndarray]) -> float:
    start = time.perf_counter()
    xckpt.save(folder / "saved", state, overwrite=True)
    return time.perf_counter() - start


def run(directory: Path, *, quick: bool = False) -> Iterator[Saves]:
    """As a manager deletes by default, then without a rate."""
    for rate in (DELETE_RATE, None):
        with tempfile.TemporaryDirectory(dir=directory, prefix="deletions-") as folder:
            files, size = (100, 1 << 20) if quick else (FILES, STATE)
            yield measure(Path(folder), rate, files=files, size=size)


def main() -> None:
    """Print the figures."""
    for saves in run(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())):
        print(saves, flush=True)


if __name__ == "__main__":
    main()
