"""What Linux has and other systems lack, taken away from a process.

`take_away` removes names that Python has on Linux alone, renameat2, advice on huge pages, and
what lies below ``/proc``. The process stays a Linux one, so this shows that nothing asks for more
than macOS has, not that everything works there.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

GONE = {
    os: (
        "sched_getaffinity",
        "sched_setaffinity",
        "posix_fadvise",
        "POSIX_FADV_WILLNEED",
        "memfd_create",
        "copy_file_range",
        "O_DIRECT",
        "O_PATH",
        "eventfd",
        "splice",
    ),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_FREE", "MAP_POPULATE"),
}
"""Module -> names that other systems lack."""


class _Library(ctypes.CDLL):
    """The C library without what Linux alone has."""

    def __getattr__(self, name: str) -> Any:
        if name == "renameat2":
            raise AttributeError(name)
        return super().__getattr__(name)


def take_away() -> None:
    """Make this process do without; there is no way back."""
    for module, names in GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    ctypes.CDLL = _Library  # type: ignore[misc]
    sys.platform = "darwin"
    os.stat = _without_proc(os.stat)
    os.lstat = _without_proc(os.lstat)
    os.listdir = _without_proc(os.listdir)
    os.open = _without_proc(os.open)
    io.open = builtins.open = _without_proc(builtins.open)


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **named)

    return refusing
