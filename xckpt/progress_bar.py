"""Ready-made progress: for ``progress=True`` and the command line.

On a terminal or in a notebook it is a bar; in a log, a line now and then (`line_of`). Work that
ends before `PATIENCE` writes nothing there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

import rich.progress
from rich.console import Console

from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes
from xckpt.progress import Progress

LONGEST: Final = 30
"""Most characters before the bar."""
PATIENCE: Final = 2.0
"""Seconds before the first line in a log."""
EVERY: Final = 10.0
"""Seconds from one line to the next."""


class ProgressBar:
    """A progress callback: a bar on stderr where that is a terminal or a notebook, else lines.

    Args:
        doing: what stands before the bar.
        clock: seconds that pass.
        path: of what; its last name is added.

    Example:
        >>> with ProgressBar("save", path="run/7") as bar:
        ...     bar(Progress(1 << 20, 2 << 20))
    """

    def __init__(
        self,
        doing: str,
        clock: Callable[[], float] = time.monotonic,
        path: str | os.PathLike[str] = "",
    ) -> None:
        name = os.path.basename(os.fspath(path).rstrip("/"))
        doing = f"{doing} {name}".rstrip()
        # A name in a path is not markup.
        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._drawn = console.is_terminal or console.is_jupyter
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[amounts]}", markup=False),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._drawn,
        )
        shown = doing if len(doing) <= LONGEST else f"{doing[: LONGEST - 3]}..."
        self._task = self._bar.add_task(printable(shown), total=None, amounts="")
        self._doing, self._clock = printable(doing), clock
        self._started = clock()
        self._next = self._started + PATIENCE
        self._unit = ""
        """What was counted last."""
        self._last: Progress | None = None
        """What the last line said; None before the first."""

    def __call__(self, now: Progress) -> None:
        """Move the bar, or write a line if it is time."""
        if now.unit != self._unit:
            if self._unit:  # Another part of the work, which has a speed of its own.
                self._started, self._last = self._clock(), None
                self._bar.reset(self._task, total=now.total)
            self._unit = now.unit
        seconds = self._clock() - self._started
        if self._drawn:
            amounts = amounts_of(now, seconds)
            self._bar.update(self._task, completed=now.done, total=now.total, amounts=amounts)
            return
        is_end = self._last is not None and now.done >= now.total > self._last.done
        if self._clock() >= self._next or is_end:
            self._last = now
            self._next = self._clock() + EVERY
            line = line_of(self._doing, now, seconds)
            with suppress(OSError):  # a log on a full disk ends no call
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()

    def __enter__(self) -> ProgressBar:
        self._started = self._clock()
        self._next = self._started + PATIENCE
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def line_of(doing: str, now: Progress, seconds: float) -> str:
    """A line of progress, for a log.

    Args:
        doing: what is done.
        now: how many bytes, or files, of how many.
        seconds: since it began.

    Example:
        >>> line_of("save run/7", Progress(1 << 30, 4 << 30), 5.0)
        'save run/7: 25%, 1.0 GiB of 4.0 GiB, 204.8 MiB/s, 0:00:15 left'
        >>> line_of("save run/7", Progress(4 << 30, 4 << 30), 20.0)
        'save run/7: 100%, 4.0 GiB of 4.0 GiB, 204.8 MiB/s, after 0:00:20'
    """
    rate = now.done / seconds if seconds > 0 else 0.0
    part = f"{100 * now.done // now.total if now.total else 100}%"
    if now.done >= now.total:
        left = f"after {_duration(seconds)}"
    else:
        left = f"{_duration((now.total - now.done) / rate)} left" if rate else "time left unknown"
    return f"{doing}: {part}, {amounts_of(now, seconds)}, {left}"


def amounts_of(now: Progress, seconds: float) -> str:
    """The amount done, the total, and the rate.

    Example:
        >>> amounts_of(Progress(1 << 30, 4 << 30), 5.0)
        '1.0 GiB of 4.0 GiB, 204.8 MiB/s'
        >>> amounts_of(Progress(1500, 6000, "files"), 5.0)
        '1,500 of 6,000 files, 300/s'
    """
    rate = int(now.done / seconds) if seconds > 0 else 0
    if now.unit == "bytes":
        sizes = f"{readable_bytes(now.done)} of {readable_bytes(now.total)}"
        return f"{sizes}, {readable_bytes(rate)}/s"
    return f"{now.done:,} of {now.total:,} {now.unit}, {rate:,}/s"


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> _duration(3725.4)
        '1:02:05'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
