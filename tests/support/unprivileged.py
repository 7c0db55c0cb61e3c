"""Permissions that hold for root too: a thread without the capabilities to pass over them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION = 0x20080522
"""Of Linux's capabilities in 64 bits."""
_OVERRIDES = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


@contextmanager
def permissions_hold() -> Iterator[None]:
    """Files and folders that may not be read cannot be, in this thread and those that it starts."""
    if os.geteuid() != 0:
        yield
        return
    system = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert system.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~_OVERRIDES
    assert system.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert system.capset(header, sets) == 0
