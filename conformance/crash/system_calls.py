"""Linux's system calls that change files, read from a stopped thread as operations.

Paths are read from the thread's memory and descriptors from ``/proc`` before a call happens; what
it wrote is read back from the file afterwards. `effect_of` gives a function from the call's result
to its operations, or None if the call does not concern the folder. What cannot be expressed as
operations (shared writable maps, io_uring, symbolic links) raises `CannotRecordError`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from conformance.crash.operations import (
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

__all__ = ["NUMBERS", "Call", "CannotRecordError", "Effect", "effect_of"]

_AT_FDCWD = -100
_AT_REMOVEDIR = 0x200
_RENAME_EXCHANGE = 2
_TMPFILE = 0o20000000
_SHARED, _WRITABLE = 1, 2

NUMBERS = {
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


_SELF = "/proc/self/"


class CannotRecordError(Exception):
    """A process changes files in a way that no operation expresses, or cannot be traced."""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that is about to happen."""

    thread: int
    name: str
    arguments: tuple[int, ...]


Effect = Callable[[int], list[Operation]]
"""The operations of a call, given its result."""


def effect_of(call: Call, root: str) -> Effect | None:
    """The effect of a call on the folder; None if it does not concern the folder."""
    return _Reader(call, root).effect()


class _Reader:
    """Reads what a stopped thread is about to do."""

    def __init__(self, call: Call, root: str) -> None:
        self.call = call
        self.root = root

    def effect(self) -> Effect | None:
        """The effect of the call on the folder; None if it does not concern the folder."""
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
                return self._effect_on_names(name, a)

    def _effect_on_names(self, name: str, a: tuple[int, ...]) -> Effect | None:
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
                return self._effect_on_sizes(name, a)

    def _effect_on_sizes(self, name: str, a: tuple[int, ...]) -> Effect | None:
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

    def _one(self, path: str, make: Callable[[str], Operation]) -> Effect | None:
        inside = self._below(path)
        return None if inside is None else lambda _: [make(inside)]

    def _two(self, one: str, other: str, make: Callable[[str, str], Operation]) -> Effect | None:
        a, b = self._below(one), self._below(other)
        if a is None and b is None:
            return None
        if a is None or b is None:
            raise CannotRecordError(f"{one} and {other}: one of them is outside of {self.root}")
        return lambda _: [make(a, b)]

    def _open(self, path: str, flags: int) -> Effect | None:
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

    def _write(self, descriptor: int, offset: int | None) -> Effect | None:
        path = self._descriptor(descriptor)
        inside = self._below(path)
        if inside is None or not os.path.isfile(path):
            return None
        if offset is None:
            offset = self._position(descriptor)

        def effect(length: int) -> list[Operation]:
            with open(path, "rb") as file:
                file.seek(offset)
                return [Write(inside, offset, file.read(length))] if length else []

        return effect

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
        if path.startswith(_SELF):  # it is the thread's self, not that of this process
            path = f"/proc/{self.call.thread}/{path.removeprefix(_SELF)}"
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
