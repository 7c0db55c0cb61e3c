"""The chunks of a base in a local folder: their digests, and second names for their files.

1. `BaseChunks` holds the base's root group open, so that it stays the same folder when another save
   takes its place, and checks that it is the one that the coordinator has read.
2. `BaseChunks.digest` reads the digest of one chunk, `BaseChunks.place` its place in a pack.
3. `BaseChunks.share_document` compares a whole file, a zarr.json, before it is shared.
4. `BaseChunks.share` gives a chunk's file a second name, a hard link. If the file system refuses
   that, the new name gets a copy that shares its blocks (a reflink), if the file system has those.
   The file must be a plain one of the right length, and belong to the owner of the save's own
   files: another user could change theirs.

No file is ever opened for writing under a name that may be shared: new files get their names by a
rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterable
from typing import Final

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.own_keys import DIGESTS
from xckpt.core.manifest.packs import NAME_BYTES, PACKS, PLACE, PLACES, ChunkPlace, pack_key
from xckpt.storage.array import DIGEST_BYTES
from xckpt.storage.base.identity import file_identity
from xckpt.storage.chunks.orders import BaseOrders

FICLONE: Final = 0x40049409
"""Linux: have a new file share the blocks of another."""

MOST_NAMES: Final = 1024
"""Checkpoints that share one file at most. File systems have limits of their own (ext4: 65,000)."""

_PLACE: Final = struct.Struct("<QQ")

_NO_LINKS: Final = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS)
"""The error numbers of a file system that cannot link any of these files."""


class BaseChunks:
    """The chunks of a base, as one rank shares them.

    Args:
        orders: where the base is.
        folder: where the save writes; it exists.

    Raises:
        OSError: the base is not there, or no longer the one that the coordinator has read.
    """

    def __init__(self, orders: BaseOrders, folder: str) -> None:
        self.problem: str = ""
        """Why this rank can share nothing more; empty if it can."""
        self._owner = os.stat(folder).st_uid
        self._root = os.open(os.path.join(orders.folder, orders.root), os.O_RDONLY | os.O_CLOEXEC)
        self._digests = self._places = -1
        self._packs, self._inline = orders.packs, orders.inline_places
        try:
            if file_identity(orders.folder) != orders.manifest:
                raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", orders.folder)
            self._digests = self._open(DIGESTS)
            if orders.packs and not self._inline:
                self._places = self._open(PLACES)
        except BaseException:
            self.close()
            raise

    def _open(self, key: str) -> int:
        """A descriptor of a file of the base, if it is no link; a pipe is not waited for."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(key, flags, dir_fd=self._root)

    def digest(self, array: ZarrArray, number: int) -> bytes:
        """The digest of a chunk of an array of the base; empty if it cannot be read."""
        with contextlib.suppress(OSError):
            return os.pread(self._digests, DIGEST_BYTES, (array.first + number) * DIGEST_BYTES)
        return b""

    def place(self, array: ZarrArray, number: int) -> ChunkPlace | None:
        """The place of a chunk of an array of the base; None if it has none, or cannot be read."""
        if array.place is None:
            return None
        with contextlib.suppress(OSError, struct.error):
            at = (self._packs + array.place + number) * PLACE.itemsize
            pack, offset = _PLACE.unpack(self._of_places(at, PLACE.itemsize))
            if pack < self._packs:
                return ChunkPlace(pack_key(self._of_places(pack * NAME_BYTES, NAME_BYTES)), offset)
        return None

    def _of_places(self, start: int, nbytes: int) -> bytes:
        """Some bytes of the table of places."""
        if self._inline:
            return self._inline[start : start + nbytes]
        return os.pread(self._places, nbytes, start)

    def sizes(self, keys: Iterable[str]) -> list[int]:
        """Bytes of packs; 0 of one that is not there."""
        return [self._size(key) for key in keys]

    def _size(self, key: str) -> int:
        with contextlib.suppress(OSError):
            return os.stat(key, dir_fd=self._root, follow_symlinks=False).st_size
        return 0

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """A part of an object; empty if it cannot be read."""
        with contextlib.suppress(OSError):
            opened = self._open(key)
            try:
                return os.pread(opened, nbytes, offset)
            finally:
                os.close(opened)
        return b""

    def share(self, leaf: str, key: str, new: str, nbytes: int, *, synced: bool) -> str:
        """Give the file of a chunk or pack a second name; returns why that failed, or nothing.

        Args:
            leaf: the chunk's, for the message.
            key: of the file.
            new: the new path; its folder is made.
            nbytes: the expected length of the file.
            synced: whether a copy is made durable; a link is as durable as its file.
        """
        if self.problem:
            return self.problem
        try:
            try:
                self._link(key, new, synced)
            except FileNotFoundError:  # most folders are there
                os.makedirs(os.path.dirname(new), exist_ok=True)
                self._link(key, new, synced)
        except FileExistsError:
            if not key.startswith(PACKS):
                raise
            return ""  # another rank has shared the pack, or has packed the same
        except OSError as error:
            problem = f"{error.strerror}"
            if error.errno in _NO_LINKS:
                self.problem = problem
            return problem
        status = os.lstat(new)
        problem = self._fault(status, nbytes)
        if problem:
            os.unlink(new)
            return f"{leaf}: the base's chunk {problem}"
        return ""

    def share_document(self, key: str, content: bytes, new: str, *, synced: bool) -> bool:
        """Give a file of the base a second name if it has this content; whether it was done.

        Raises:
            OSError: the new name is taken, or its folder cannot be made.
        """
        if self.problem or self.read(key, 0, len(content) + 1) != content:
            return False
        return not self.share("", key, new, len(content), synced=synced)

    def _fault(self, status: os.stat_result, nbytes: int) -> str:
        if not stat.S_ISREG(status.st_mode):
            return "is not a plain file"
        if status.st_size != nbytes:
            return f"is {status.st_size:,} bytes long instead of {nbytes:,}"
        if status.st_uid != self._owner:
            return "belongs to another user"
        if status.st_nlink > MOST_NAMES:
            return f"is shared by {MOST_NAMES:,} checkpoints already"
        return ""

    def _link(self, key: str, new: str, synced: bool) -> None:
        try:
            os.link(key, new, src_dir_fd=self._root, follow_symlinks=False)
        except OSError as error:
            if error.errno not in (*_NO_LINKS, errno.EMLINK):
                raise
            try:
                os.makedirs(os.path.dirname(new), exist_ok=True)
                self._clone(key, new, synced)
            except OSError:
                raise error from None

    def _clone(self, key: str, new: str, synced: bool) -> None:
        """A copy that shares its blocks.

        Raises:
            OSError: the file system has none.
        """
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        with contextlib.ExitStack() as opened:
            source = self._open(key)
            opened.callback(os.close, source)
            copy = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            opened.callback(os.close, copy)
            try:
                fcntl.ioctl(copy, FICLONE, source)
                if synced:
                    os.fsync(copy)
            except BaseException:
                os.unlink(new)
                raise

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        for descriptor in (self._root, self._digests, self._places):
            if descriptor >= 0:
                os.close(descriptor)
        self._root = self._digests = self._places = -1
