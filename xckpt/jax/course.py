"""The numbers of the saves and loads of this process: equal calls of all processes have equal ones.

1. Each call takes the next number, so processes that make different calls meet in one number, and
   learn there which call each makes.
2. A process that has not made a call that others made is behind them. They give that number up, and
   go on: a process that finds its next number given up takes the number in which others are by
   then. It looks for them a moment only, for it may be the one that came late to the same call.
"""

from __future__ import annotations

import time
from typing import Final

from xckpt.engine.ranks.patience import GRACE_SECONDS
from xckpt.engine.ranks.waiting import SLICE_SECONDS
from xckpt.jax.notes import Notes


class Course:
    """How far this process is; threads take turns (`JaxGroup.turn`)."""

    def __init__(self) -> None:
        self.last: int = -1
        """The number that was taken last."""

    def next(self, notes: Notes) -> int:
        """Take the next number in which no rank has given up, as `notes` say."""
        number, until = self.last + 1, time.monotonic() + GRACE_SECONDS
        while notes.has_ended(number) and time.monotonic() < until:
            newest = notes.newest_call()
            if newest > number:
                number = newest
            else:
                time.sleep(SLICE_SECONDS / 4)
        self.last = number
        return number


COURSE: Final = Course()
