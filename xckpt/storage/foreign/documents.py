"""What describes another library's checkpoint, read within the memory that the caller allows.

1. One `Allowance` counts what the files of a checkpoint take together: however many they are, their
   headers, pickles and documents share one limit.
2. What is needed for a time only, as the text of a document is, comes back (`Allowance.passing`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

from xckpt.core.manifest.memory import COPIES, LEAST_LIMIT, RAISE, check_memory, json_bytes
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import MemoryLimitError, StorageError
from xckpt.options import LoadOptions
from xckpt.storage.foreign.files import read_up_to
from xckpt.storage.foreign.paths import FilePath

MEMORY_BYTES: Final = LoadOptions().memory_bytes
"""What descriptions may take where the caller does not say."""


class Allowance:
    """What the descriptions of one checkpoint may take together; thread-safe.

    Args:
        memory_bytes: the caller's limit; `LEAST_LIMIT` is always allowed.
        within: another one, in which what this one takes counts as well.

    Example:
        >>> memory = Allowance(80 << 20)
        >>> memory.take(50 << 20, "one header")
        >>> with memory.passing() as needed:
        ...     needed.take(20 << 20, "the text of another")
        >>> memory.take(40 << 20, "another header")
        Traceback (most recent call last):
        ...
        xckpt.errors.MemoryLimitError: another header, with the 50.0 MiB of what was read before, \
takes about 90.0 MiB of memory, more than memory_bytes (80.0 MiB); raise \
LoadOptions(memory_bytes=), to convert SaveOptions(memory_bytes=)
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES, within: Allowance | None = None) -> None:
        self.memory_bytes = memory_bytes
        self._taken, self._within, self._lock = 0, within, Lock()

    @classmethod
    def of(cls, options: LoadOptions | None) -> Allowance:
        """What the caller's options allow."""
        return cls((options or LoadOptions()).memory_bytes)

    @property
    def most(self) -> int:
        """Bytes that all may take together."""
        return max(self.memory_bytes, LEAST_LIMIT)

    def take(self, size: int, what: str, own: int = 0) -> None:
        """Count bytes that are about to be taken; ``own`` were taken for the same thing before.

        Raises:
            MemoryLimitError: they do not fit beside those that are taken.
        """
        if self._within is not None:
            self._within.take(size, what, own)
        with self._lock:
            if self._within is None and self._taken + size > self.most:
                if self._taken > own:
                    before = readable_bytes(self._taken - own)
                    what = f"{what}, with the {before} of what was read before,"
                check_memory(self._taken + size, what, self.memory_bytes)
            self._taken += size

    @contextmanager
    def passing(self) -> Iterator[Allowance]:
        """An allowance within this one; what is taken of it comes back at the end."""
        needed = Allowance(self.memory_bytes, self)
        try:
            yield needed
        finally:
            self._give_back(needed._taken)

    def _give_back(self, size: int) -> None:
        if self._within is not None:
            self._within._give_back(size)
        with self._lock:
            self._taken -= size


def read_json(path: FilePath, memory: Allowance) -> bytes:
    """The text of a file of JSON, whose objects take no more memory than is allowed.

    Raises:
        MemoryLimitError: they take more.
        StorageError: it is not a plain file, or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("some.json").write_text("{}")
        >>> read_json(Path("some.json"), Allowance())
        b'{}'
    """
    most = memory.most // COPIES
    text = read_up_to(path, most)
    if text is None:
        raise MemoryLimitError(
            f"{path}: its JSON of more than {readable_bytes(most)} takes more than memory_bytes "
            f"({readable_bytes(memory.memory_bytes)}); {RAISE}"
        )
    memory.take(json_bytes(text), f"{path}: its JSON of {len(text):,} bytes")
    return text


def read_whole(path: FilePath, most: int) -> bytes:
    """A small file's bytes.

    Raises:
        StorageError: it is not a plain file, longer than ``most`` bytes, or cannot be read.
    """
    data = read_up_to(path, most)
    if data is None:
        raise StorageError(f"{path} is longer than the {most:,} bytes that are read")
    return data
