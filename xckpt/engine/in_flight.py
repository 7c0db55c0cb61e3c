"""Saves in the background, as seen by those that wait for them; each failure is raised once.

`xckpt.engine.background` lists its saves in `IN_FLIGHT`. The next save of the group waits for them
(`settle`), and so may any thread that has the future (`SaveInFlight.ask`).
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from xckpt.core.metadata import Metadata
from xckpt.engine.ranks.group import Group

logger: Final = logging.getLogger("xckpt")


@dataclass(slots=True, eq=False)
class SaveInFlight:
    """A save in the background, as seen by those that wait for it."""

    where: str
    """The path or URL that is saved to."""
    rank: int
    size: int
    """How many ranks save together."""
    saved: Future[Metadata] = field(default_factory=Future[Metadata])
    seen: bool = False
    """Whether the outcome is known where it counts: a failure was raised, or logged."""
    beginner: int | None = None
    """The thread that copies the state for it, until that is done."""
    asking: int = 0
    """How many threads wait for the outcome; one of them will raise a failure."""
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def concerns(self, group: Group) -> bool:
        """Whether a save by this rank of ``group`` has to wait for this one.

        One that this thread was about to begin, when a handler of signals came, waits for it.
        """
        if self.beginner == threading.get_ident():
            return False
        return self.size != group.size or self.rank == group.rank

    def ask(self, timeout: float | None) -> BaseException | None:
        """Wait for the end, for a caller that asks; return the failure, each time.

        Raises:
            TimeoutError: that takes more than ``timeout`` seconds.
        """
        with self._turn:
            self.asking += 1
        try:
            error = self.saved.exception(timeout)
            self.seen = True
            return error
        finally:
            with self._turn:
                self.asking -= 1

    def take_failure(self) -> BaseException | None:
        """Wait for the end; return the failure if nobody asks for it, and only once."""
        error = self.saved.exception()
        with self._turn:
            if self.seen or (error is not None and self.asking):
                return None
            self.seen = True
        return error

    def log(self, error: BaseException) -> None:
        """Log a failure that was never asked for."""
        logger.error(
            "the asynchronous save to %s failed, and its result was never asked for: %s: %s",
            self.where,
            type(error).__name__,
            error,
        )


IN_FLIGHT: Final[dict[SaveInFlight, None]] = {}
"""Saves in the background, oldest first: still running, or failed and never asked about."""


def settle(group: Group) -> BaseException | None:
    """Wait for the saves in flight; return a failure that was never asked for, if there is one.

    The caller must raise it; it is not stored. Each failure is raised once: by the future that is
    asked, or else by one later save, whatever threads ask and save at the same time. Where several
    saves have failed, the others are logged.
    """
    failures: list[tuple[SaveInFlight, BaseException]] = []
    for save in [save for save in list(IN_FLIGHT) if save.concerns(group)]:
        error = save.take_failure()
        if save.seen:  # else a caller waits for it, perhaps not long enough
            IN_FLIGHT.pop(save, None)
        if error is not None:
            failures.append((save, error))
    if not failures:
        return None
    for save, error in failures[1:]:
        save.log(error)
    save, error = failures[0]
    error.add_note(
        f"This is the failure of the asynchronous save to {save.where}, whose result was never "
        f"asked for; the save that was called now was not begun."
    )
    return error
