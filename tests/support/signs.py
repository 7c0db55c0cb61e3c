"""Files by which processes of a test say how far they are, and deeds at a collective."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60
"""Seconds that a sign is waited for."""


def await_sign(sign: Path) -> None:
    """Return once a file is there.

    Raises:
        TimeoutError: it does not come.
    """
    until = time.monotonic() + SECONDS
    while not sign.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{sign.name}: no process has made it within {SECONDS} s")
        time.sleep(0.005)


def stop_here(note: Path) -> None:
    """Note when, and which process; stop until another process sends SIGCONT."""
    new = note.with_suffix(".new")
    new.write_text(f"{time.monotonic()} {os.getpid()}")
    new.rename(note)
    os.kill(os.getpid(), signal.SIGSTOP)


def seconds_since(note: Path) -> float:
    """Seconds since a process stopped."""
    return time.monotonic() - float(note.read_text().split()[0])


def continue_after(note: Path, rank: int, others: Iterable[int]) -> None:
    """A rank is done: once all others that live are, the process that stopped goes on."""
    (note.parent / f"ended {rank}").touch()
    for other in others:
        await_sign(note.parent / f"ended {other}")
    os.kill(int(note.read_text().split()[1]), signal.SIGCONT)


def act_before(kind: type, number: int, act: Callable[[], object]) -> pytest.MonkeyPatch:
    """Have this process do something before a kind of group's collective of a number, from 0 on."""
    patch, count = pytest.MonkeyPatch(), iter(range(1 << 30))

    def wrapped(method: Any) -> Any:
        def taking_part(self: object, *args: Any) -> Any:
            if next(count) == number:
                act()
            return method(self, *args)

        return taking_part

    for name in ("gather", "scatter", "broadcast"):
        patch.setattr(kind, name, wrapped(getattr(kind, name)))
    return patch
