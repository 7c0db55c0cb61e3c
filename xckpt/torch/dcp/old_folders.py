"""What a reader says of a folder that DCP's own storage has written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from xckpt.errors import NotACheckpointError, XckptError


@contextmanager
def naming_dcp(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say what to do where torch's own storage has written what is at the path."""
    try:
        yield
    except NotACheckpointError as error:
        # Imported for an error alone.
        from xckpt.formats.detect import detect

        found = ""
        with suppress(XckptError):
            found = detect(path)
        if found != "dcp":
            raise
        raise NotACheckpointError(
            f"{path} was written by DCP's own storage, not by XckptStorageWriter: load it without "
            f"storage_reader, by xckpt.load, or turn it into a checkpoint first by "
            f"xckpt.torch.dcp.import_checkpoint({str(path)!r}, new_path)"
        ) from error
