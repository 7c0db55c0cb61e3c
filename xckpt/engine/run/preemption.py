"""How a process learns that it must end soon: by signals, or by a notice of its framework.

1. A signal is only noted: the ranks decide together at their next step what to do about it.
2. Runs inside each other note it together. A handler that is set meanwhile stays, and may call the
   one here: after the run that hands the signal on to what was there before.
3. JAX has a service of its own that notes SIGTERM, where several processes have joined; then xckpt
   leaves the signal to that service, and asks it at each step (`preemption_notices`).
4. A forked child has the handlers that were there before. A signal that reaches it earlier waits:
   Python would forget it, or notice it only after a wait for a lock (`_hand_back_in_children`).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable
from functools import cache
from types import FrameType
from typing import Final, Protocol

_NOTICES: Final = {"jax": "xckpt.jax.preemption"}
"""Framework module -> module with ``current_notice``."""
_HELD: Final[set[int]] = set()
"""The signals that runs have noted: they wait while a process forks."""


class PreemptionNotice(Protocol):
    """A framework's own way to learn that a process must end soon."""

    signals: Collection[int]
    """The signals that the framework handles itself."""

    def reached(self) -> bool:
        """Whether the processes must stop now; all of them ask equally often."""
        ...


def preemption_notices() -> list[PreemptionNotice]:
    """The notices of the frameworks imported so far, where those have any.

    Example:
        >>> preemption_notices()
        []
    """
    modules = [module for framework, module in _NOTICES.items() if sys.modules.get(framework)]
    found = (importlib.import_module(module).current_notice() for module in modules)
    return [notice for notice in found if notice is not None]


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
        self.signals: Final = tuple(signals)
        self.notices: Final = preemption_notices()
        """What to ask at each step, besides the signals."""
        self._noted: list[int] = []
        """The signals that have come, each once."""
        self._previous: dict[int, object] = {}
        """The handlers that were there before `watch`."""
        self._first: dict[int, object] = {}
        """The same, of signals that another handler may still hand on to this one."""
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
                _hand_back_in_children()
                _HELD.add(number)
                if self._is_reached(number):  # by the handler of a run that goes on
                    self._previous[number] = self._first[number]
                    continue
                self._previous[number] = signal.signal(number, self._note)
                self._first.setdefault(number, self._previous[number])

    def _is_reached(self, number: int) -> bool:
        """Whether the handler that is there is this one, or hands on to it."""
        found: object = signal.getsignal(number)
        while isinstance(run := getattr(found, "__self__", None), Preemption):
            if run is self:
                return True
            found = run._before(number)
        return False

    def asked(self) -> bool:
        """Whether the process was asked to end; on several ranks each asks at the same steps."""
        noticed = [notice.reached() for notice in self.notices]
        return bool(self._noted) or any(noticed)

    def rest(self) -> None:
        """Put the previous handlers back; those of signals that have come are called."""
        self._depth -= 1
        if self._depth > 0:
            return
        before = {number: self._before(number) for number in self._previous}
        self._previous.clear()
        for number, previous in before.items():
            # Another handler that was set meanwhile stays, and may call this one.
            if signal.getsignal(number) == self._note:
                _put_back(number, previous)
                del self._first[number]
        for number in self._noted:
            if callable(previous := before.get(number)):
                previous(number, None)

    def first_before(self, number: int) -> object:
        """The handler that was there before the first `watch`, while another may lead to here."""
        return self._first.get(number)

    def _before(self, number: int) -> object:
        """What was there before; the handlers of runs that have ended do not count."""
        found = self._previous.get(number, self._first.get(number))
        while isinstance(run := getattr(found, "__self__", None), Preemption) and not run._depth:
            found = run._first.get(number)
        return found

    def _note(self, number: int, frame: FrameType | None) -> None:
        before = self._before(number)
        if os.getpid() == self._process and self._depth:
            if number not in self._noted:
                self._noted.append(number)
            if isinstance(getattr(before, "__self__", None), Preemption) and callable(before):
                before(number, frame)
        # After the run, or in a forked child whose handler calls this one.
        elif callable(before):
            before(number, frame)
        elif before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@cache
def _hand_back_in_children() -> None:
    here = threading.local()

    def hold() -> None:
        here.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)

    def let_come() -> None:
        mask = vars(here).pop("mask", None)
        if mask is not None:  # None: another thread was forking when this was registered
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def hand_back() -> None:
        for number in _HELD:
            there = before = signal.getsignal(number)
            while isinstance(run := getattr(before, "__self__", None), Preemption):
                before = run.first_before(number)
            if before is not there:
                _put_back(number, before)
        let_come()

    os.register_at_fork(before=hold, after_in_parent=let_come, after_in_child=hand_back)


def _put_back(number: int, previous: object) -> None:
    known = callable(previous) or isinstance(previous, signal.Handlers)
    signal.signal(number, previous if known else signal.SIG_DFL)  # type: ignore[arg-type]
