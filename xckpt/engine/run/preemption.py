"""How a process learns that it must end soon: by signals, or by a notice of its framework.

1. A signal is only noted: the ranks decide together at their next step what to do about it.
2. JAX has a service of its own that notes SIGTERM, where several processes have joined; then xckpt
   leaves the signal to that service, and asks it at each step (`xckpt.engine.adapters`).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType

from xckpt.engine.adapters import preemption_notices


class Preemption:
    """Whether this process was asked to end, noted from `watch` to `rest`.

    Args:
        signals: those that ask for it.

    Example:
        >>> preemption = Preemption()
        >>> preemption.watch()
        True
        >>> signal.raise_signal(signal.SIGTERM)
        >>> preemption.asked()
        True
        >>> preemption.rest()
    """

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM,)) -> None:
        self.signals = tuple(signals)
        self.notices = preemption_notices()
        """What to ask at each step, besides the signals."""
        self._noted: list[int] = []
        """The signals that have come, each once."""
        self._previous: dict[int, object] = {}
        """The handlers that were there."""
        self._process = os.getpid()
        self._depth = 0
        """How often `watch` was called, less `rest`."""

    def watch(self) -> bool:
        """Note the signals from now on; only the main thread can have them noted.

        Returns:
            Whether watching begins now, with nothing noted; else it continues until the last
            `rest`.
        """
        self._depth += 1
        if self._depth > 1:
            return False
        self._noted.clear()
        self._process = os.getpid()
        self._take()
        return True

    def _take(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        taken = {number for notice in self.notices for number in notice.signals}
        for number in self.signals:
            if number not in self._previous and number not in taken:
                self._previous[number] = signal.signal(number, self._note)

    def asked(self) -> bool:
        """Whether the process was asked to end; on several ranks each asks at the same steps."""
        noticed = [notice.reached() for notice in self.notices]
        return bool(self._noted) or any(noticed)

    def rest(self) -> None:
        """Put the previous handlers back; those of signals that have come are called."""
        self._depth -= 1
        if self._depth > 0:
            return
        for number in self._previous:
            # Another handler that was set meanwhile stays, and may call this one.
            if signal.getsignal(number) == self._note:
                self._restore(number)
        answered, self._previous = self._previous, {}
        for number in self._noted:
            previous = answered.get(number)
            if callable(previous) and not isinstance(previous, signal.Handlers):
                previous(number, None)

    def _restore(self, number: int) -> None:
        previous = self._previous[number]
        known = callable(previous) or isinstance(previous, signal.Handlers)
        signal.signal(number, previous if known else signal.SIG_DFL)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child, such as a worker of a data loader, has no part in the run.
            self._restore(number)
            signal.raise_signal(number)
            return
        if number not in self._noted:
            self._noted.append(number)
