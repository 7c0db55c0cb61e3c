"""What a process may run out of: open files, threads, memory, address space, time.

1. That can happen almost anywhere: Python reads a module where it is first needed. `naming_limit`
   makes an error of it that says what to do, for other ranks and threads too, and
   `xckpt.api.save.names_limits` does so around each public call.
2. TensorStore ends a process in which it cannot be loaded or cannot start its threads. It is loaded
   with `xckpt.storage`, and starts its threads with the first store that it opens. Before that
   `check_loaded` and `check_address_space` look at what is left.
3. Python ends daemon threads wherever they are. In C++ that ends the process, by a signal: so the
   interpreter's exit waits for the calls that they are in (`awaited_at_exit`), as it does for saves
   in the background.
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from xckpt.core.text.shown import readable_bytes
from xckpt.errors import LeafTooLargeError, StorageError, XckptError, said_by

if sys.platform == "linux":
    import resource

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
T = TypeVar("T")

FILES: Final = "this process may open no more files: close some, or raise the limit (ulimit -n)"
THREADS: Final = (
    "this process may start no more threads: end some, raise the limits (ulimit -u, ulimit -v, "
    "pids.max of the container), or lower threads= of the options"
)
SYSTEM_FILES: Final = "the system may open no more files (fs.file-max): close some"
MEMORY: Final = (
    "free some, raise the limit of this process (ulimit -v), or lower memory_bytes= of the options"
)
NO_THREAD: Final = "can't start new thread"
"""How Python's RuntimeError begins."""

MAIN_THREAD: Final = threading.main_thread().ident
"""It is no daemon; a call compares numbers before it looks for the thread, which takes longer."""

NOT_COMPILED: Final = "xckpt saves and loads outside of compiled code"

TO_LOAD: Final = 1 << 27
"""Bytes of address space to load TensorStore, and for Python meanwhile; measured: 57 MiB."""
FOR_THREADS: Final = 1 << 30
"""Bytes of address space for TensorStore's threads and stacks; most is never touched."""


def naming_limit(error: E) -> E | XckptError:
    """The error to raise for one that may say what the process lacks; for any other, itself.

    Example:
        >>> print(naming_limit(OSError(24, "Too many open files", "xckpt/manager.py")))
        Too many open files (xckpt/manager.py); this process may open no more files: close some, \
or raise the limit (ulimit -n)
        >>> naming_limit(ValueError("3"))
        ValueError('3')
    """
    said, made = said_by(error)[0], StorageError
    match error:
        case XckptError():
            return error
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            said = f"{error.strerror} ({error.filename})" if error.filename else error.strerror
            advice = FILES if error.errno == errno.EMFILE else SYSTEM_FILES
        case RuntimeError() if said.startswith(NO_THREAD):
            advice = THREADS
        case MemoryError() | OSError(errno=errno.ENOMEM):
            said, made = f"not enough memory: {said}".rstrip(": "), LeafTooLargeError
            advice = MEMORY
        case _:
            return error
    named = made(f"{said}; {advice}")
    named.__cause__ = error
    return named


class Uncompiled(dict[object, Callable[P, T]]):
    """A call as torch's compiler leaves it alone: the compiler's ``disable``, or None -> the call.

    Its user looks it up by ``torch._dynamo.disable`` where that is imported, in a frame of its own.
    No functools.cache does that: torch's compiler looks into one. ``awaited`` is the call with a
    look at the thread, which the compiler would not get past.
    """

    def __init__(self, call: Callable[P, T], awaited: Callable[P, T]) -> None:
        super().__init__({None: awaited})
        self._call: Final = call

    def __missing__(self, disable: Callable[[Callable[P, T]], Callable[P, T]]) -> Callable[P, T]:
        outside = self[disable] = disable(self[None])
        return outside

    def marked(self, wrapper: Callable[P, T]) -> Callable[P, T]:
        """The wrapper of the call, marked as `torch.compiler.disable` marks a function.

        Torch may be imported later.
        """
        functools.update_wrapper(wrapper, self._call)
        wrapper.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=NOT_COMPILED)
        return wrapper


def not_compiled(call: Callable[P, T]) -> Callable[P, T]:
    """Have torch's compiler not look into a call; `xckpt.api.save.names_limits` names limits too.

    Example:
        >>> not_compiled(len)("abc")
        3
    """

    def awaited(*arguments: P.args, **keywords: P.kwargs) -> T:
        if threading.get_ident() == MAIN_THREAD:
            return call(*arguments, **keywords)
        return awaited_at_exit(call, *arguments, **keywords)

    outside = Uncompiled(call, awaited)

    def call_outside(*arguments: P.args, **keywords: P.kwargs) -> T:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        return outside[disable](*arguments, **keywords)

    return outside.marked(call_outside)


_under_way: Final[dict[int, threading.Lock]] = {}
"""Daemon threads that are in a call, and a lock that each holds until the call has ended."""
_exit_began: Final = threading.Event()
os.register_at_fork(after_in_child=_under_way.clear)


def awaited_at_exit(call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    """Call something; in a daemon thread the interpreter's exit waits until that has ended.

    Once the exit waits, a call that the thread begins ends the thread, as Python soon would.
    A call's own threads end with it.
    """
    thread, me = threading.current_thread(), threading.get_ident()
    if not thread.daemon or me in _under_way or thread.name.startswith("xckpt"):
        return call(*arguments, **keywords)
    running = threading.Lock()
    with running:
        _under_way[me] = running
        try:
            if _exit_began.is_set():
                raise SystemExit
            return call(*arguments, **keywords)
        finally:
            _under_way.pop(me, None)


@atexit.register
def _await_calls() -> None:
    _exit_began.set()
    while _under_way:
        for running in list(_under_way.values()):
            with running:
                pass


def check_loaded() -> None:
    """Refuse to load TensorStore where it lacks address space.

    Raises:
        StorageError: the limit of the process's address space is too near.
    """
    if "tensorstore" not in sys.modules:
        check_address_space(TO_LOAD, "the library that reads and writes needs")


def check_address_space(size: int, needed_by: str) -> None:
    """Refuse to go on where less than ``size`` bytes of address space are left.

    Raises:
        StorageError: the limit of the process's address space is too near.
    """
    if sys.platform != "linux":
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit - used < size:
        raise StorageError(
            f"the address space of this process is limited to {readable_bytes(limit)}, of which "
            f"{readable_bytes(used)} are taken; {needed_by} {readable_bytes(size)}: raise the "
            f"limit (ulimit -v)"
        )
