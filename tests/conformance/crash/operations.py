"""Operations on files: drawn at random, and carried out by the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

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
from conformance.implementation import Implementation
from xckpt.storage.commit.file_system import exchange

PATHS = ("a", "b", "d", "d/a", "d/b", "d/e", "d/e/a")

paths = st.sampled_from(PATHS)
some_operations = st.lists(
    st.one_of(
        st.builds(Create, paths),
        st.builds(MakeFolder, paths),
        st.builds(Write, paths, st.integers(0, 5), st.binary(min_size=1, max_size=6)),
        st.builds(Resize, paths, st.integers(0, 8)),
        st.builds(Rename, paths, paths),
        st.builds(Exchange, paths, paths),
        st.builds(Link, paths, paths),
        st.builds(Remove, paths),
        st.builds(RemoveFolder, paths),
        st.builds(Sync, st.sampled_from(("", *PATHS))),
    ),
    min_size=8,
    max_size=40,
)
"""Most will not be possible where they stand."""


def perform(operation: Operation, root: Path) -> None:
    """Carry one out.

    Raises:
        OSError: it is not possible.
    """
    match operation:
        case Create(path):
            os.close(os.open(root / path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        case MakeFolder(path):
            os.mkdir(root / path)
        case Write(path, offset, data):
            with open(root / path, "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), data, offset)
        case Resize(path, size):
            os.truncate(root / path, size)
        case Rename(source, target):
            os.rename(root / source, root / target)
        case Exchange(one, other):
            exchange(root / one, root / other)
        case Link(source, target):
            os.link(root / source, root / target)
        case Remove(path):
            os.unlink(root / path)
        case RemoveFolder(path):
            os.rmdir(root / path)
        case Sync(path):
            descriptor = os.open(root / path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        case SyncAll():
            os.sync()


def perform_all(operations: Iterable[Operation], root: Path) -> list[Operation]:
    """Carry them out as far as they are possible; those that were."""
    done: list[Operation] = []
    for operation in operations:
        try:
            perform(operation, root)
        except OSError:
            continue
        done.append(operation)
    return done


def perform_in_saver(
    implementation: Implementation, operations: Iterable[Operation], root: Path
) -> None:
    """The same as an action of a `Recorder`."""
    perform_all(operations, root)
