"""A ready progress bar: what ``progress=True`` shows, and the command line."""

from __future__ import annotations

from types import TracebackType

import rich.progress
from rich.console import Console

from xckpt.core.text.printable import printable
from xckpt.progress import Progress

LONGEST = 30
"""Most characters before the bar."""


class ProgressBar:
    """A progress callback that moves a bar on stderr, where that is a terminal or a notebook.

    Args:
        doing: what stands before the bar.

    Example:
        >>> with ProgressBar("save run/7") as bar:
        ...     bar(Progress(1 << 20, 2 << 20))
    """

    def __init__(self, doing: str) -> None:
        # What is done may hold a path, which is not to be read as markup.
        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(binary_units=True),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        shown = doing if len(doing) <= LONGEST else f"{doing[: LONGEST - 3]}..."
        self._task = self._bar.add_task(printable(shown), total=None)

    def __call__(self, now: Progress) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=now.done, total=now.total)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
