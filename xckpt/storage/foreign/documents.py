"""JSON of other libraries, read within the memory that the caller allows."""

from __future__ import annotations

from contextlib import closing
from typing import Final

from xckpt.core.manifest.memory import COPIES, LEAST_LIMIT, RAISE, check_memory, json_bytes
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import MemoryLimitError, StorageError
from xckpt.options import LoadOptions
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import FilePath
from xckpt.storage.location import storage_errors

MEMORY_BYTES: Final = LoadOptions().memory_bytes
"""What descriptions may take where the caller does not say."""


def read_json(path: FilePath, memory_bytes: int) -> bytes:
    """The text of a file of JSON, whose objects take no more memory than is allowed.

    Raises:
        MemoryLimitError: they take more.
        StorageError: it is not a plain file, or cannot be read.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("some.json").write_text("{}")
        >>> read_json(Path("some.json"), 1 << 20)
        b'{}'
    """
    most = max(memory_bytes, LEAST_LIMIT) // COPIES
    with storage_errors(path):
        if not path.is_file():
            raise StorageError(f"{path} is not a plain file")
        with closing(open_file(path)) as file:
            text = file.whole(most)
    if text is None:
        raise MemoryLimitError(
            f"{path}: its JSON of more than {readable_bytes(most)} takes more than memory_bytes "
            f"({readable_bytes(memory_bytes)}); {RAISE}"
        )
    check_memory(json_bytes(text), f"{path}: its JSON of {len(text):,} bytes", memory_bytes)
    return text
