"""Signals by which schedulers announce that a process must end soon, by name or number."""

from __future__ import annotations

import signal
from collections.abc import Collection


def signals_named(given: str | int | Collection[str | int]) -> frozenset[signal.Signals]:
    """Signals by their names or numbers, one or several.

    Raises:
        ValueError: some are not signals, or cannot be caught.

    Example:
        >>> signals_named("SIGTERM") == signals_named([signal.SIGTERM, 15])
        True
    """
    several = given if isinstance(given, Collection) and not isinstance(given, str) else [given]
    return frozenset(map(signal_named, several))


def signal_named(given: str | int) -> signal.Signals:
    """A signal by its name or number.

    Raises:
        ValueError: there is no such signal, or it cannot be caught.

    Example:
        >>> signal_named("SIGUSR1") is signal_named(signal.SIGUSR1)
        True
    """
    try:
        found = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ValueError(f"OnPreemption(signals=) takes signals; {given!r} is not one") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"OnPreemption(signals=): no process can catch {found.name}")
    return found
