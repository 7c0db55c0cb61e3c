"""SIGTERM, by which schedulers say that a process is to end soon.

The signal is only noted: what is to be done about it, the ranks decide together at their next step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Preemption:
    """Whether this process was asked to end, noted from `watch` to `rest`.

    Example:
        >>> preemption = Preemption()
        >>> preemption.watch()
        >>> signal.raise_signal(signal.SIGTERM)
        >>> preemption.noted
        True
        >>> preemption.rest()
    """

    def __init__(self) -> None:
        self.noted = False
        """Whether the signal has come, once or more often."""
        self._watches = False
        self._previous: object = None

    def watch(self) -> None:
        """Note the signal from now on; only the main thread can have it noted."""
        if threading.current_thread() is threading.main_thread() and not self._watches:
            self._previous = signal.signal(signal.SIGTERM, self._note)
            self._watches = True

    def rest(self) -> None:
        """Put the previous handler back; if the signal has come, call it."""
        if not self._watches:
            return
        self._watches = False
        previous = self._previous
        # Another handler that was set meanwhile stays, and may call this one.
        if signal.getsignal(signal.SIGTERM) == self._note:
            known = callable(previous) or isinstance(previous, signal.Handlers)
            signal.signal(signal.SIGTERM, previous if known else signal.SIG_DFL)  # type: ignore[arg-type]
        if self.noted and callable(previous) and not isinstance(previous, signal.Handlers):
            previous(signal.SIGTERM, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.noted = True
