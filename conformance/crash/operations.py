"""What a program does to files: the operations that a `conformance.crash.disk.Disk` knows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Create",
    "Exchange",
    "Link",
    "MakeFolder",
    "Operation",
    "Remove",
    "RemoveFolder",
    "Rename",
    "Resize",
    "Sync",
    "SyncAll",
    "Write",
]


@dataclass(frozen=True, slots=True)
class Create:
    """A new empty file."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeFolder:
    path: str


@dataclass(frozen=True, slots=True)
class Write:
    """``data`` at an offset of a file, which grows if need be."""

    path: str
    offset: int
    data: bytes

    def __repr__(self) -> str:
        return f"Write({self.path!r}, {self.offset}, {len(self.data)} bytes)"


@dataclass(frozen=True, slots=True)
class Resize:
    """A file's new length, in bytes; zeros where it grows."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Rename:
    """A file or folder takes another name, in one step; a file or an empty folder there is gone."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two files or folders change their names with each other, in one step."""

    one: str
    other: str


@dataclass(frozen=True, slots=True)
class Link:
    """A second name for a file."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Remove:
    """A file loses this name."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    path: str


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync of a file, or of a folder; ``""`` is the root."""

    path: str


@dataclass(frozen=True, slots=True)
class SyncAll:
    """sync or syncfs."""


Operation = (
    Create
    | MakeFolder
    | Write
    | Resize
    | Rename
    | Exchange
    | Link
    | Remove
    | RemoveFolder
    | Sync
    | SyncAll
)
"""Paths are relative to the root and have no slash at either end."""
