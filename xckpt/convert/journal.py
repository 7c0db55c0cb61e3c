"""The journal of a conversion: the units that are done, in a file that survives its process.

1. The first record says which conversion it is: a digest of source, mapping and options.
2. Then one record for each unit that is durably written: its number and its report.
3. A record is its length, a digest of its content, and the content. A kill in the middle of one
   leaves a tail that cannot be read; a process that resumes cuts it off. Any other mismatch makes
   the journal void, and the conversion starts over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
from pathlib import Path
from typing import Final

import msgspec

from xckpt.core.text.printable import printable
from xckpt.storage.array import DIGEST_BYTES, digest_bytes
from xckpt.storage.commit.folder import LEFTOVER, journals
from xckpt.storage.location import storage_errors

logger: Final = logging.getLogger("xckpt")

STARTS_OVER: Final = (
    "%s: the conversion starts over: an earlier one had another source, mapping or options, or a "
    "file of the source has been written, moved, linked or given other permissions since"
)
_HEAD = struct.Struct(f"<Q{DIGEST_BYTES}s")


def read_journal(path: Path) -> tuple[bytes | None, dict[int, bytes], int]:
    """The content of a journal: its digest (None if it has none), unit -> report, sound length.

    Example:
        >>> read_journal(Path("/nowhere/journal"))
        (None, {}, 0)
    """
    known: bytes | None = None
    done: dict[int, bytes] = {}
    sound = 0
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        data = path.read_bytes()
        while len(data) - sound >= _HEAD.size:
            length, check = _HEAD.unpack_from(data, sound)
            end = sound + _HEAD.size + length
            content = data[sound + _HEAD.size : end]
            if end > len(data) or digest_bytes(content) != check:
                break
            if known is None:
                known = content
            else:
                unit, report = msgspec.msgpack.decode(content, type=tuple[int, bytes])
                done[unit] = report
            sound = end
    return known, done, sound


def noted_units(staged: Path, digest: bytes) -> dict[int, bytes]:
    """Unit -> report, from all ranks' journals beside the staging folder of a conversion.

    Args:
        staged: the staging folder.
        digest: that of the conversion; the journals of other ones are ignored.

    Example:
        >>> from xckpt.storage.commit.folder import journal_of
        >>> staged = Path("staged")
        >>> Journal(journal_of(staged, 0), b"this one").note(3, b"written")
        >>> noted_units(staged, b"this one"), noted_units(staged, b"another")
        ({3: b'written'}, {})
    """
    reports: dict[int, bytes] = {}
    for path in journals(staged):
        known, done, _ = read_journal(path)
        if known == digest:
            reports |= done
    return reports


def others_noted(staged: Path, digest: bytes) -> bool:
    """Whether other conversions have noted units that they wrote.

    Args:
        staged: the staging folder.
        digest: that of the conversion that begins.
    """
    found = journals(staged) if staged.parent.is_dir() else []
    return bool({known for path in found if (known := read_journal(path)[0])} - {digest})


def warn_of_others(place: object) -> None:
    """Log a warning that a conversion cannot resume what an earlier one has written.

    Args:
        place: where it writes to.
    """
    logger.warning(STARTS_OVER, printable(str(place)))


class Journal:
    """A journal that is being written; calls from several threads are fine.

    Args:
        path: where it is; a journal of the same conversion that is there is continued.
        digest: that of the conversion.

    Example:
        >>> Journal(Path("journal"), b"this one").note(3, b"written")
        >>> Journal(Path("journal"), b"this one").note(4, b"too")
        >>> read_journal(Path("journal"))[1]
        {3: b'written', 4: b'too'}
        >>> _ = Journal(Path("journal"), b"another")
        >>> read_journal(Path("journal"))[1]
        {}
    """

    def __init__(self, path: Path, digest: bytes) -> None:
        self.path = path
        named = LEFTOVER.fullmatch(path.name)
        self._place = path.with_name(named["name"]) if named else path
        self._lock = threading.Lock()
        known, _, sound = read_journal(path)
        with storage_errors(self._place):
            if known == digest:
                os.truncate(path, sound)
                return
            path.unlink(missing_ok=True)
        self._append(digest)

    def note(self, unit: int, report: bytes) -> None:
        """Note that a unit is durably written.

        Raises:
            StorageError: the disk refused; it names what is converted to.
        """
        self._append(msgspec.msgpack.encode((unit, report)))

    def _append(self, content: bytes) -> None:
        # One write, so that a kill leaves at most one broken record, the last.
        record = _HEAD.pack(len(content), digest_bytes(content)) + content
        with (
            self._lock,
            storage_errors(self._place),
            open(self.path, "ab", buffering=0) as file,
        ):
            file.write(record)
