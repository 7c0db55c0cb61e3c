"""Where a pack grows: in a local file, or in memory until it is an object of a bucket.

A pack's name is the digest of its content, which is known at its end only. Until then a local file
has a temporary name (`PackFile`), and the content of an object stays in memory (`PackObject`).
"""

from __future__ import annotations

import contextlib
import os
import secrets

import tensorstore as ts
import xxhash

from xckpt.core.manifest.packs import PACKS, pack_key
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.plain_files import SLAB_BYTES, new_file, sync, write_at
from xckpt.storage.commit.folder import sync_folder
from xckpt.storage.location import Location, Writing, storage_errors


class PackFile:
    """A pack that grows in a local folder; memory holds a slab of it.

    Args:
        folder: the root group.
        where: the checkpoint's place, for errors.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(self, folder: Location, where: Location) -> None:
        self._folder, self._where = folder, where
        self.size: int = 0
        """Bytes that it has."""
        self._slab = bytearray()
        self._hash = xxhash.xxh3_128()
        self._path = f"{folder.path}/{PACKS}/{secrets.token_hex(16)}.__lock"
        with storage_errors(where):
            self._descriptor = new_file(self._path, folder.path)

    def append(self, part: bytes | memoryview) -> None:
        """Put bytes behind those that are there.

        Raises:
            StorageError: they cannot be written.
        """
        self._slab += part
        self.size += len(part)
        if len(self._slab) >= SLAB_BYTES:
            self._write()

    def finish(self) -> tuple[bytes, None]:
        """The pack's name; the pack is now as durable as the orders say.

        Raises:
            StorageError: it cannot be written.
        """
        self._write()
        name, synced = self._hash.digest(), not self._folder.unsynced
        with storage_errors(self._where):
            if synced:
                sync(self._descriptor)
            path = f"{self._folder.path}/{pack_key(name)}"
            os.rename(self._path, path)
            if synced:
                sync_folder(os.path.dirname(path))
            self._close()
        return name, None

    def discard(self) -> None:
        """Remove it, after a failure."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        """Close it, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self) -> None:
        self._hash.update(self._slab)
        with storage_errors(self._where), memoryview(self._slab) as slab:
            write_at(self._descriptor, slab, self.size - len(slab))
        self._slab.clear()


class PackObject:
    """A pack that grows in memory; while it is sent it is there twice.

    Args:
        root: the root group.
        where: the checkpoint's place, for errors.
    """

    def __init__(self, root: ts.KvStore, where: Location) -> None:
        self._root, self._where = root, where
        self.size: int = 0
        """Bytes that it has."""
        self._parts: list[bytes] = []

    def append(self, part: bytes | memoryview) -> None:
        """Put bytes behind those that are there."""
        self._parts.append(bytes(part))
        self.size += len(part)

    def finish(self) -> tuple[bytes, Writing]:
        """The pack's name, and its write, which has begun.

        Raises:
            StorageError: the storage refused.
        """
        content = b"".join(self._parts)
        self._parts.clear()
        name = digest_bytes(content)
        with storage_errors(self._where):
            return name, self._root.write(pack_key(name), content)

    def discard(self) -> None:
        """Forget it, after a failure."""
        self._parts.clear()
