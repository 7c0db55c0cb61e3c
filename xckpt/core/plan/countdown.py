"""How much of something is still to come, counted down from several threads."""

from __future__ import annotations

import threading


class Countdown:
    """Counts what is missing, elements or parts; exactly one call of `land` sees 0.

    Example:
        >>> missing = Countdown(5)
        >>> missing.land(3), missing.land(2)
        (2, 0)
        >>> missing.land(1)
        -1
    """

    __slots__ = ("_lock", "missing")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        """How many are still to come."""
        self._lock = threading.Lock()

    def land(self, count: int) -> int:
        """So many (more than 0) have come; returns how many are missing now.

        Negative if more have come than were expected.
        """
        with self._lock:
            self.missing -= count
            return self.missing
