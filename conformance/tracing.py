"""Which operations on files a process does, in their order, seen through Linux's ptrace.

Checkpoint libraries write from C++ threads, and several processes may save together, so hooks in
Python see little; the kernel sees all. No program is needed besides Python.

1. `Tracer` attaches to a process; its threads and the processes that it forks come along.
2. Each thread stops before and after each system call (`PTRACE_GET_SYSCALL_INFO` says which). Of
   the calls that change files below the root one is let through at a time, so that the order is
   the order in which they happened, and none overlaps another.
3. Before a call its paths are read from the process's memory and its descriptors from ``/proc``;
   after it, what it wrote is read back from the file. That makes an `Operation`.
4. A tracer can kill all processes just before the n-th operation, which then does not happen.

What cannot be told in operations (shared writable maps, io_uring, symbolic links) raises
`CannotRecordError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from conformance.disk import (
    Create,
    Exchange,
    Link,
    MakeFolder,
    Operation,
    Remove,
    RemoveFolder,
    Rename,
    Resize,
    Sync,
    SyncAll,
    Write,
)

__all__ = ["CannotRecordError", "Tracer"]

_SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXIT_KILL = 1, 2, 4, 8, 0x100000
_SYSCALL_STOP = signal.SIGTRAP | 0x80
_WALL = 0x40000000
_ENTRY, _EXIT = 1, 2

_AT_FDCWD = -100
_AT_REMOVEDIR = 0x200
_RENAME_EXCHANGE = 2
_TMPFILE = 0o20000000
_SHARED, _WRITABLE = 1, 2

_NUMBERS = {
    "x86_64": {
        1: "write", 2: "open", 9: "mmap", 18: "pwrite64", 20: "writev", 40: "sendfile",
        74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir",
        84: "rmdir", 85: "creat", 86: "link", 87: "unlink", 88: "symlink", 162: "sync",
        257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat",
        266: "symlinkat", 275: "splice", 285: "fallocate", 296: "pwritev", 306: "syncfs",
        316: "renameat2", 326: "copy_file_range", 328: "pwritev2", 425: "io_uring_setup",
        437: "openat2",
    },
    "aarch64": {
        34: "mkdirat", 35: "unlinkat", 36: "symlinkat", 37: "linkat", 38: "renameat",
        45: "truncate", 46: "ftruncate", 47: "fallocate", 56: "openat", 64: "write", 66: "writev",
        68: "pwrite64", 70: "pwritev", 71: "sendfile", 76: "splice", 81: "sync", 82: "fsync",
        83: "fdatasync", 222: "mmap", 267: "syncfs", 276: "renameat2", 285: "copy_file_range",
        287: "pwritev2", 425: "io_uring_setup", 437: "openat2",
    },
}  # fmt: skip
"""System calls that change files, by their numbers."""


class CannotRecordError(Exception):
    """A process changes files in a way that cannot be told in operations, or cannot be traced."""


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("ip", ctypes.c_uint64),
        ("sp", ctypes.c_uint64),
        ("values", ctypes.c_uint64 * 8),
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A system call that is about to happen."""

    thread: int
    name: str
    arguments: tuple[int, ...]


_Told = Callable[[int], list[Operation]]
"""What a call was, given what it returned."""


class Tracer:
    """Traces a child process, which does nothing yet, in the thread that makes the tracer.

    This process must have no other children meanwhile.
    """

    def __init__(self, process: int, root: str, *, most: int | None = None) -> None:
        """Attach to a process.

        Args:
            process: its number.
            root: the folder whose operations count, without symbolic links.
            most: how many operations may happen; before the next one all processes are killed.

        Raises:
            CannotRecordError: the system does not allow it.
        """
        self.root = root
        self.most = most
        self.operations: list[Operation] = []
        self.killed = False
        """Whether the processes were killed, as was asked for."""
        self._process = process
        self._numbers = _NUMBERS.get(platform.machine())
        self._threads = {int(thread) for thread in os.listdir(f"/proc/{process}/task")}
        self._running: tuple[int, _Told] | None = None
        self._waiting: deque[_Call] = deque()
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._ptrace.restype = ctypes.c_long
        if self._numbers is None:
            raise CannotRecordError(f"system calls of {platform.machine()} are not known")
        options = _SYSGOOD | _FORK | _VFORK | _CLONE | _EXIT_KILL
        for thread in self._threads:
            if self._ptrace(_SEIZE, thread, None, options) != 0:
                why = os.strerror(ctypes.get_errno())
                raise CannotRecordError(
                    f"ptrace: {why}; a container needs the SYS_PTRACE capability"
                )
            self._ptrace(_INTERRUPT, thread, None, None)

    def run(self) -> int:
        """Let the process and its descendants run to their ends; the process's exit status.

        Raises:
            CannotRecordError: it did something that cannot be told.
        """
        status = 0
        try:
            while self._threads:
                thread, found = os.waitpid(-1, _WALL)
                if os.WIFSTOPPED(found):
                    self._threads.add(thread)
                    self._stopped(thread, found)
                    continue
                self._threads.discard(thread)
                if thread == self._process:
                    status = found
                if self._running is not None and self._running[0] == thread:
                    self._running = None
                    self._start_next()
        except BaseException:
            self._kill()
            raise
        return status

    def _stopped(self, thread: int, status: int) -> None:
        stop, event = os.WSTOPSIG(status), status >> 16
        if stop == _SYSCALL_STOP:
            self._system_call(thread)
        else:
            self._resume(thread, 0 if event else stop)

    def _resume(self, thread: int, number: int = 0) -> None:
        self._ptrace(_SYSCALL, thread, None, number)  # fails only if the thread was killed

    def _system_call(self, thread: int) -> None:
        info = _SyscallInfo()
        size = ctypes.sizeof(info)
        if self._ptrace(_GET_SYSCALL_INFO, thread, size, ctypes.addressof(info)) < 0:
            return  # killed meanwhile
        assert self._numbers is not None
        if info.op == _EXIT and self._running is not None and self._running[0] == thread:
            told, self._running = self._running[1], None
            result = ctypes.c_int64(info.values[0]).value
            if result >= 0:
                self.operations += told(result)
            self._resume(thread)
            self._start_next()
        elif info.op == _ENTRY and (name := self._numbers.get(info.values[0])):
            self._waiting.append(_Call(thread, name, tuple(info.values[1:7])))
            self._start_next()
        else:
            self._resume(thread)

    def _start_next(self) -> None:
        """Let the next call through, if none is under way."""
        while self._running is None and self._waiting:
            call = self._waiting.popleft()
            told = _Reader(call, self.root).told()
            if told is not None:
                if self.most is not None and len(self.operations) >= self.most:
                    self.killed = True
                    self._kill()
                    return
                self._running = call.thread, told
            self._resume(call.thread)

    def _kill(self) -> None:
        """Kill whatever is traced; a call that is about to happen then does not."""
        self._waiting.clear()
        for thread in self._threads:
            with contextlib.suppress(ProcessLookupError):
                os.kill(thread, signal.SIGKILL)


class _Reader:
    """Reads what a stopped thread is about to do."""

    def __init__(self, call: _Call, root: str) -> None:
        self.call = call
        self.root = root

    def told(self) -> _Told | None:
        """What tells the operations once the call has returned; None if it concerns us not."""
        name, a = self.call.name, self.call.arguments
        match name:
            case "open":
                return self._open(self._at(_AT_FDCWD, a[0]), a[1])
            case "creat":
                return self._open(self._at(_AT_FDCWD, a[0]), os.O_CREAT | os.O_TRUNC)
            case "openat":
                return self._open(self._at(a[0], a[1]), a[2])
            case "openat2":
                flags = int.from_bytes(self._memory(a[2], 8), "little")
                return self._open(self._at(a[0], a[1]), flags)
            case "write" | "writev":
                return self._write(a[0], None)
            case "pwrite64":
                return self._write(a[0], a[3])
            case "pwritev" | "pwritev2":
                return self._write(a[0], None if _signed(a[3]) == -1 else a[3])
            case "sendfile":
                return self._write(a[0], None)
            case "copy_file_range" | "splice":
                return self._write(a[2], self._offset(a[3]))
            case "fsync" | "fdatasync":
                return self._one(self._descriptor(a[0]), Sync)
            case "sync":
                return lambda _: [SyncAll()]
            case "syncfs":
                return self._one(self._descriptor(a[0]), lambda _: SyncAll())
            case _:
                return self._told_of_names(name, a)

    def _told_of_names(self, name: str, a: tuple[int, ...]) -> _Told | None:
        here = _AT_FDCWD
        match name:
            case "mkdir":
                return self._one(self._at(here, a[0]), MakeFolder)
            case "mkdirat":
                return self._one(self._at(a[0], a[1]), MakeFolder)
            case "rmdir":
                return self._one(self._at(here, a[0]), RemoveFolder)
            case "unlink":
                return self._one(self._at(here, a[0]), Remove)
            case "unlinkat":
                kind = RemoveFolder if a[2] & _AT_REMOVEDIR else Remove
                return self._one(self._at(a[0], a[1]), kind)
            case "rename":
                return self._two(self._at(here, a[0]), self._at(here, a[1]), Rename)
            case "renameat" | "renameat2":
                flags = a[4] if name == "renameat2" else 0
                kind = Exchange if flags & _RENAME_EXCHANGE else Rename
                return self._two(self._at(a[0], a[1]), self._at(a[2], a[3]), kind)
            case "link":
                return self._two(self._at(here, a[0]), self._at(here, a[1]), Link)
            case "linkat":
                return self._two(self._at(a[0], a[1]), self._at(a[2], a[3]), Link)
            case _:
                return self._told_of_sizes(name, a)

    def _told_of_sizes(self, name: str, a: tuple[int, ...]) -> _Told | None:
        match name:
            case "truncate":
                return self._one(self._at(_AT_FDCWD, a[0]), lambda path: Resize(path, a[1]))
            case "ftruncate":
                return self._one(self._descriptor(a[0]), lambda path: Resize(path, a[1]))
            case "fallocate":
                if self._below(self._descriptor(a[0])) is None:
                    return None
                if a[1]:
                    raise CannotRecordError("fallocate with flags")
                size = max(self._size(a[0]), a[2] + a[3])
                return self._one(self._descriptor(a[0]), lambda path: Resize(path, size))
            case "mmap":
                if a[3] & _SHARED and a[2] & _WRITABLE and not a[3] & 0x20:
                    self._refuse(self._descriptor(a[4]), "maps to be written")
            case "symlink" | "symlinkat":
                number = 1 if name == "symlink" else 2
                folder = _AT_FDCWD if name == "symlink" else a[1]
                self._refuse(self._at(folder, a[number]), "makes a symbolic link")
            case "io_uring_setup":
                raise CannotRecordError("the process uses io_uring")
        return None

    def _refuse(self, path: str, what: str) -> None:
        if self._below(path) is not None:
            raise CannotRecordError(f"the process {what}: {path}")

    def _one(self, path: str, make: Callable[[str], Operation]) -> _Told | None:
        inside = self._below(path)
        return None if inside is None else lambda _: [make(inside)]

    def _two(self, one: str, other: str, make: Callable[[str, str], Operation]) -> _Told | None:
        a, b = self._below(one), self._below(other)
        if a is None and b is None:
            return None
        if a is None or b is None:
            raise CannotRecordError(f"{one} and {other}: one of them is outside of {self.root}")
        return lambda _: [make(a, b)]

    def _open(self, path: str, flags: int) -> _Told | None:
        inside = self._below(path)
        if inside is None or not flags & (os.O_CREAT | os.O_TRUNC | _TMPFILE):
            return None
        if flags & _TMPFILE and not flags & os.O_CREAT:
            if not flags & os.O_DIRECTORY:
                return None
            raise CannotRecordError(f"the process makes a file without a name in {path}")
        if not os.path.lexists(path):
            return lambda _: [Create(inside)]
        return (lambda _: [Resize(inside, 0)]) if flags & os.O_TRUNC else None

    def _write(self, descriptor: int, offset: int | None) -> _Told | None:
        path = self._descriptor(descriptor)
        inside = self._below(path)
        if inside is None or not os.path.isfile(path):
            return None
        if offset is None:
            offset = self._position(descriptor)

        def told(length: int) -> list[Operation]:
            with open(path, "rb") as file:
                file.seek(offset)
                return [Write(inside, offset, file.read(length))] if length else []

        return told

    def _below(self, path: str) -> str | None:
        """A path relative to the root; None if it is elsewhere, or has no name any more."""
        if path.endswith(" (deleted)") or not path.startswith("/"):
            return None
        if path == self.root:
            return ""
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def _at(self, folder: int, address: int) -> str:
        """The absolute path of a path argument; its last part may be a symbolic link."""
        found = self._memory(address, 4096).split(b"\0", 1)[0]
        path = os.fsdecode(found).rstrip("/")
        if not path.startswith("/"):
            within = _signed(folder, 32)
            start = "cwd" if within == _AT_FDCWD else f"fd/{within}"
            path = os.path.join(os.readlink(f"/proc/{self.call.thread}/{start}"), path)
        above, name = os.path.split(path)
        return os.path.join(os.path.realpath(above), name) if name else "/"

    def _descriptor(self, number: int) -> str:
        """What a descriptor is open to; empty if it is not open."""
        try:
            return os.readlink(f"/proc/{self.call.thread}/fd/{_signed(number, 32)}")
        except OSError:
            return ""

    def _size(self, descriptor: int) -> int:
        return os.stat(f"/proc/{self.call.thread}/fd/{_signed(descriptor, 32)}").st_size

    def _position(self, descriptor: int) -> int:
        with open(f"/proc/{self.call.thread}/fdinfo/{_signed(descriptor, 32)}") as file:
            fields = dict(line.split(":", 1) for line in file)
        if int(fields["flags"], 8) & os.O_APPEND:
            return self._size(descriptor)
        return int(fields["pos"])

    def _offset(self, address: int) -> int | None:
        return int.from_bytes(self._memory(address, 8), "little") if address else None

    def _memory(self, address: int, length: int) -> bytes:
        """What is in the thread's memory, as far as there is any."""
        descriptor = os.open(f"/proc/{self.call.thread}/mem", os.O_RDONLY)
        try:
            return os.pread(descriptor, length, address)
        finally:
            os.close(descriptor)


def _signed(value: int, bits: int = 64) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
