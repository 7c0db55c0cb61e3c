"""The format of a single file, by its name or first bytes."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from xckpt.errors import StorageError
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.foreign.unread import unread_format

LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file of torch before 1.6: a pickle of a number."""


def format_of_file(path: FilePath) -> str | None:
    """The format of a file that is read: safetensors, or torch; None if it is another.

    Raises:
        OSError, StorageError: it cannot be read.
    """
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return "safetensors"
    with closing(open_file(path)) as file:
        first, most = file.head(len(LEGACY)), file.most_bytes
    if unread_format(path.name, first):
        return None  # a zip archive of another kind, for example
    if path.name.endswith(".bin.index.json") or first.startswith(b"PK\3\4") or first == LEGACY:
        return "torch"
    if first[8:9] == b"{" and int.from_bytes(first[:8], "little") <= most - 8:
        return "safetensors"
    return None


def what_is_there(path: Path) -> str:
    """A clause on what lies at a local path and is not a folder; it names a format that is read."""
    format = None
    with suppress(OSError, StorageError):
        format = format_of_file(path) if path.is_file() else None  # a pipe would be waited for
    if format is None:
        return "is a file and holds no checkpoint"
    of = "of torch.save" if format == "torch" else f"of {format}"
    return f"is a file {of}, which xckpt.load reads and no save replaces"
