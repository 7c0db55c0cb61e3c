"""What the file system of a local folder can do, and whether a checkpoint fits it.

1. `look_into` finds out, without writing anything, what a save can rely on: locks, folders that are
   synced, names. `check_fitness` refuses a checkpoint that cannot be held there.
   `syncs_at_once` says whether one call syncs all files, `suited_threads` how many to use.
2. `can_rename` says whether a new folder can take the place of an old one; `share_mode` gives it
   the other's rights, and `exchange` exchanges the two in one step.
3. `opened_folder` holds a folder, whose name another may get; `delete_entries` deletes in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final

from xckpt.core.commit import FileSystem, Step
from xckpt.core.manifest.entries import Manifest, arrays
from xckpt.core.names import LONGEST_COMPONENT
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import StorageError
from xckpt.options import default_threads, processors

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_IN_MEMORY: Final = {0x01021994, 0x858458F6}
"""Linux's types of file systems that lie in memory: tmpfs, ramfs."""
_LOCAL: Final = {
    *(0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0xF2F52010, 0x794C7630),
    *(0x4D44, 0x2011BAB0, 0x5346544E, 0xCA451A4E, *_IN_MEMORY),
}
"""Those that one system at a time has mounted: ext, xfs, btrfs, zfs, f2fs, overlay, vfat, exfat,
ntfs, bcachefs, and these."""

TELLS_FAILURE = (5, 8)
"""The first release of Linux whose syncfs reports that data could not be written."""

TAKEN: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
"""What a rename says of a name that is not free."""

logger: Final = logging.getLogger("xckpt")


class Lock(Enum):
    """The outcome of an attempt to lock a file."""

    TAKEN = "taken"
    HELD = "held by another"
    LACKING = "there are no locks"


def look_into(folder: Path, descriptor: int = -1) -> FileSystem:
    """What the file system of a folder can do, found out without writing to it.

    Args:
        folder: where a save writes; it must exist.
        descriptor: of a file there that is open for writing, such as the claim.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        locks = lock(opened if descriptor < 0 else descriptor)
        # TensorStore takes locks of this other kind, which folders do not have.
        ranges = locks if descriptor < 0 else lock(descriptor, fcntl.lockf)
        syncs = sync_opened(opened)
    finally:
        os.close(opened)
    # The name of a staging folder has letters.
    # The root of all folders has no name.
    other = folder.parent / folder.name.swapcase()
    same = other.name != folder.name and other.exists() and other.samefile(folder)
    return FileSystem(Lock.LACKING not in (locks, ranges), syncs, not same, longest_name(folder))


def lock(descriptor: int, how: Callable[[int, int], object] = fcntl.flock) -> Lock:
    """Lock an open file, unless a living process holds the lock."""
    try:
        how(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Lock.HELD if error.errno in (errno.EAGAIN, errno.EACCES) else Lock.LACKING
    return Lock.TAKEN


def hold(folder: Path) -> int:
    """Make a folder, and lock it until `let_go` or the end of this process; its descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    lock(descriptor)
    return descriptor


def let_go(descriptor: int) -> None:
    """Unlock and close, also where a forked process has it too; nothing if it is negative."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def held_in(place: Path) -> list[str]:
    """The names of folders in a place that living processes `hold`."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(place)
    return [name for name in names if _is_held(place / name)]


def _is_held(folder: Path) -> bool:
    with contextlib.suppress(OSError), opened_folder(folder) as opened:
        return opened is not None and lock(opened) is Lock.HELD
    return False


def is_at(descriptor: int, folder: Path) -> bool:
    """Whether an open folder still has its name."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    return False


def sync_opened(descriptor: int) -> bool:
    """Sync an open folder; False if the file system syncs none."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    WORK.get().moved = time.monotonic()
    return True


def longest_name(folder: Path) -> int:
    """Bytes that a name in a folder may have."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255


def is_local(folder: Path) -> bool:
    """Whether only this system has a folder's file system mounted, as far as Linux says."""
    return _type_of(folder) in _LOCAL


def suited_threads(folder: Path | None) -> int | None:
    """How many threads suit a folder's files where nothing is waited for; None anywhere else."""
    in_memory = folder is not None and _type_of(folder) in _IN_MEMORY
    return min(processors(), default_threads()) if in_memory else None


def _type_of(folder: Path) -> int:
    """The type that Linux gives a folder's file system; 0 where it gives none."""
    if sys.platform != "linux":
        return 0
    buffer = (ctypes.c_long * 64)()  # its first word is the type
    status = ctypes.CDLL(None).statfs(os.fsencode(folder), buffer)
    return 0 if status else buffer[0] & 0xFFFFFFFF


def syncs_at_once(folder: Path) -> bool:
    """Whether one call syncs the file system of a folder, and reports failures."""
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    new = release is not None and (int(release[1]), int(release[2])) >= TELLS_FAILURE
    return sys.platform == "linux" and new and is_local(folder)


def check_fitness(
    target: object, able: FileSystem, planned: Manifest | None, *, beside: bool = False
) -> None:
    """Refuse a checkpoint that a file system cannot hold, before anything is written.

    Args:
        target: where it is to be, for the message.
        able: what the file system can do.
        planned: the checkpoint, as far as it is known.
        beside: whether it is staged among the files that are there.

    Raises:
        StorageError: it cannot; names the leaves.
    """
    logger.debug("%s: %s", target, able)
    plain = able.tells_case and able.longest_name >= LONGEST_COMPONENT
    leaves = {} if plain or planned is None else {a.path: a.leaf for a in arrays(planned)}
    problems = able.problems(leaves, beside=beside)
    if problems:
        raise StorageError.listing(f"{target}: this file system cannot hold it", problems)


def can_rename(folder: Path) -> bool:
    """Whether a new folder can take this one's place: no mount point or working folder."""
    if not folder.is_dir():
        return True
    with contextlib.suppress(FileNotFoundError):
        if Path.cwd().is_relative_to(folder):
            return False  # this process would stand in a deleted folder
    try:
        return not folder.is_mount() and may_write(folder.parent)
    except FileNotFoundError:
        return True  # another process has just deleted it


def may_write(folder: Path) -> bool:
    """Whether this process may make names in a folder, as the user that it acts as."""
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


def share_mode(old: Path, new: Path) -> None:
    """Give a new folder the group and mode of the one that it replaces, which may be private."""
    with contextlib.suppress(OSError):  # most have none, and some systems know no modes
        status = os.stat(old)
        mode = stat.S_IMODE(status.st_mode) | stat.S_IRWXU
        if stat.S_ISDIR(status.st_mode):
            try:
                os.chown(new, -1, status.st_gid)
            except PermissionError:  # the group of this process may do what all others may
                mode = mode & ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
            new.chmod(mode)


def take_name(step: Step, source: Path, target: Path) -> None:
    """Take the step by which a file or a folder gets its name.

    `Step.RENAME` leaves a file that has come there meanwhile, where there are hard links, and takes
    the name of an empty folder.

    Raises:
        OSError: the system refused, or the name is not free.
    """
    if step is Step.EXCHANGE:
        exchange(source, target)
    elif step is Step.REPLACE or source.is_dir():
        os.rename(source, target)
    else:
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # no hard links here
            os.rename(source, target)
        else:
            with contextlib.suppress(OSError):  # it goes with the folder that it is in
                os.unlink(source)


def exchange(a: Path, b: Path) -> None:
    """Exchange two folders atomically (Linux's renameat2).

    Raises:
        OSError: the kernel or the file system cannot.
    """
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError as error:
        raise OSError("this platform has no renameat2") from error
    source, target = os.fsencode(a), os.fsencode(b)
    if renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(a))


def path_of(opened: int, named: str) -> str:
    """A path of an open folder, whatever its name is by then; its name where the system has none.

    Only Linux exchanges folders, and it has such paths.
    """
    path = f"/proc/self/fd/{opened}"
    return path if os.path.isdir(path) else named


@contextlib.contextmanager
def opened_folder(folder: Path | None) -> Iterator[int | None]:
    """A descriptor of a folder; None without one, or if it is gone."""
    descriptor = None
    if folder is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_deletable(folder: Path | None, entries: Iterable[str]) -> None:
    """Refuse to delete some of a local folder's entries where others may not be deleted.

    Raises:
        PermissionError: a folder may not be changed, or is sticky and an entry another user's.
    """
    if folder is None:
        return
    below: dict[str, list[str]] = {}
    for entry in entries:
        below.setdefault(os.path.dirname(entry), []).append(entry)
    for name, held in below.items():
        place = folder / name
        try:
            status = place.stat()
        except FileNotFoundError:  # deleted meanwhile
            continue
        if not may_write(place) and place.exists():  # nor may one be that went just now
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        if status.st_mode & stat.S_ISVTX and os.geteuid() not in (0, status.st_uid):
            for entry in held:
                with contextlib.suppress(FileNotFoundError):
                    if os.lstat(folder / entry).st_uid != os.geteuid():
                        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), folder / entry)


def delete_entries(entries: Iterable[str], folder: int | None) -> dict[str, Exception]:
    """Delete files and empty folders by their paths in a folder that is open; why some are left.

    A folder that is not empty is not left; nor is anything where the folder is None, which is gone.
    """
    left: dict[str, Exception] = {}
    for entry in entries if folder is not None else ():
        try:
            delete_entry(entry, folder)
        except OSError as error:
            left[entry] = error
    return left


def delete_entry(entry: str, folder: int | None) -> None:
    """Delete a file, or an empty folder, by its path in a folder that is open."""
    try:
        os.unlink(entry, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError:
        if not stat.S_ISDIR(os.lstat(entry, dir_fd=folder).st_mode):
            raise
        with contextlib.suppress(OSError):
            os.rmdir(entry, dir_fd=folder)  # files of the user may be in it
