"""Another library's checkpoint at the path of a load, in place of one of ours."""

from __future__ import annotations

import os
from contextlib import suppress

from xckpt.core.storage import StorageReader
from xckpt.errors import XckptError
from xckpt.formats.detect import detect, open_source
from xckpt.formats.reader import SourceReader
from xckpt.formats.source import TensorSource
from xckpt.options import LoadOptions

OURS = "xckpt"


class FormatsAt:
    """What lies at a path; its format is found once, by the coordinator of a load.

    Args:
        path: see `xckpt.load`.
        options: threads, memory, progress.
    """

    def __init__(self, path: str | os.PathLike[str], options: LoadOptions | None) -> None:
        self._path = path
        self._options = options
        self._format = OURS

    def find(self) -> str | None:
        """The coordinator, where there is no manifest: the format that is there, if it is known."""
        with suppress(XckptError):
            format = detect(self._path)
            return None if format == OURS else format
        return None

    def reader(self, format: str) -> StorageReader:
        """The reader of the format that the coordinator has found."""
        self._format = format
        return SourceReader(self.open_source, str(self._path), options=self._options)

    def open_source(self) -> TensorSource:
        """Open what is there; a checkpoint of ours unless another format was found."""
        return open_source(self._path, self._format)
