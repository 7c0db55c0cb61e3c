"""Leftovers of killed saves in a folder: their owners, whether these are alive, their removal.

Beside its path a save leaves a staging folder, a claim, journals (`xckpt.storage.commit.folder`).
The claim's lock and the system on which it was made show whether its owner is alive:

1. A lock that is held: the owner lives.
2. A claim of this system, which has not been restarted since, and a free lock: the owner is dead,
   whatever host name it had. Where there are no locks, its process tells.
3. A claim that this host made before it was last started, on a disk of its own: dead.
4. Any other owner may be alive on another host: locks of network file systems need not be visible
   there.

An empty folder with the name of a step has no claim: a deletion was killed after it had removed its
claim. Where a manager gives that name, a process that makes such a folder fills it within a minute.
Another usual name counts beside steps of xckpt: its owner may be another library, and alive.

`remove_dead` is what each save does to the leftovers of its parent folder. It removes what is dead,
except what a conversion to another path can resume from. What ``xckpt gc`` removes is found in
`xckpt.storage.commit.collect`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final

import msgspec

from xckpt.core.manifest.own_keys import CLAIM, MANIFEST, OwnKeys
from xckpt.core.run.names import step_name, step_number
from xckpt.storage.commit.carry import own_keys_in, rescue
from xckpt.storage.commit.file_system import Lock, can_rename, is_local, lock
from xckpt.storage.commit.folder import (
    LEFTOVER,
    ONE_SAVE,
    Claim,
    ClaimText,
    being_written,
    boot_identity,
    claim_of,
    journals,
    process_identity,
    staging_folder,
)

LOCK: Final = f"{CLAIM}.__lock"
"""What a deletion that is killed last of all may leave in the folder: TensorStore's lock."""
SETTLED: Final = 60.0
"""Seconds after which an empty folder of a step is a leftover, and not one that is to be filled."""


class OwnerState(Enum):
    """What is known about the owner of a leftover."""

    DEAD = "dead"
    ALIVE = "alive"
    UNKNOWN = "unknown"
    """Perhaps alive on another host."""


def owner_state(text: ClaimText, locked: Lock, *, local: bool) -> OwnerState:
    """Whether the owner of a claim lives.

    Args:
        text: what the claim says.
        locked: the outcome of the attempt to lock it.
        local: whether only this system has the file system mounted.
    """
    if locked is Lock.HELD:
        return OwnerState.ALIVE
    boot = boot_identity()
    if not (boot and text.boot):
        mine = text.host == socket.gethostname() and locked is Lock.TAKEN
        return OwnerState.DEAD if mine else OwnerState.UNKNOWN
    if text.boot != boot:
        mine = text.host == socket.gethostname() and local
        return OwnerState.DEAD if mine else OwnerState.UNKNOWN
    return OwnerState.DEAD if locked is Lock.TAKEN else _by_process(text)


def owner_of_empty(step: Path) -> OwnerState | None:
    """The owner of an empty folder with the name of a step; None if it is no such folder.

    A folder that cannot be removed, such as a mount point, is no such folder.
    """
    number = step_number(step.name)
    if number is None or any(each.name != LOCK for each in step.iterdir()) or not can_rename(step):
        return None
    if step.name != step_name(number):
        return OwnerState.UNKNOWN if _is_beside_steps(step) else None
    is_young = time.time() - step.stat().st_mtime < SETTLED
    return OwnerState.ALIVE if is_young else OwnerState.DEAD


def owner_of_claim(path: Path) -> OwnerState:
    """What is known about the owner of a save or deletion in place, which holds no lock."""
    try:
        text = msgspec.json.decode(path.read_bytes(), type=ClaimText)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return OwnerState.UNKNOWN
    return owner_state(text, Lock.LACKING, local=is_local(path.parent))


def owner_without_claim(paths: Iterable[Path]) -> OwnerState:
    """What is known about a save that died before it had a claim, or whose claim is gone."""
    for path in paths:
        if path.suffix != ".new":
            return OwnerState.UNKNOWN
        with open(path, "rb") as file:
            if lock(file.fileno()) is not Lock.TAKEN:
                return OwnerState.UNKNOWN
    return OwnerState.DEAD


def _is_beside_steps(folder: Path) -> bool:
    """Whether other folders in the same one are steps that xckpt has saved."""
    beside = (each for each in folder.parent.iterdir() if step_number(each.name) is not None)
    return any((each / MANIFEST).is_file() for each in beside)


def _by_process(text: ClaimText) -> OwnerState:
    """Whether a process of this system is alive; another container's may be invisible."""
    here = process_identity(os.getpid()).partition("-")[0]
    if not here or text.life.partition("-")[0] != here:
        return OwnerState.UNKNOWN
    return OwnerState.ALIVE if process_identity(text.process) == text.life else OwnerState.DEAD


def remove_dead(target: Path, names: Iterable[str], *, but: str) -> None:
    """Remove what dead saves have left in a parent folder.

    Args:
        target: the path that is saved to now.
        names: those in the parent folder that `LEFTOVER` matches.
        but: name of a resumable save to ``target``, which stays; empty for none.
    """
    local = is_local(target.parent)
    kept = staging_folder(target, but) if but else None
    for staged in staged_in(target.parent, names):
        own = staged == staging_folder(target, parts_of(staged)["id"])
        resumable = staged == kept or (not own and not ONE_SAVE.fullmatch(parts_of(staged)["id"]))
        with contextlib.suppress(OSError):
            remove_if_dead(staged, local=local, resumable=resumable)
    remove_unlocked(target.parent, names)


def remove_unlocked(parent: Path, names: Iterable[str]) -> None:
    """Remove claims that were never locked because their owners died first.

    If one belongs to a living save that has not locked it yet, that save makes another.
    """
    for name in names:
        if name.endswith(".new"):
            with contextlib.suppress(OSError), open(parent / name, "r+b") as file:
                # A claim or the begin of one, for its writer may die any time; else a user's file.
                if lock(file.fileno()) is Lock.TAKEN and file.read(1) in (b"", b"{"):
                    (parent / name).unlink()


def remove_if_dead(staged: Path, *, local: bool, resumable: bool, old: bool = False) -> bool:
    """Remove a staging folder, its claim and its journals, if the owner is dead; whether it was.

    Args:
        staged: the staging folder.
        local: whether only this system has the file system mounted.
        resumable: keep it, unless it may hold the user's files by now.
        old: treat an owner as dead if nothing is known about it.
    """
    with opened_claim(staged) as (descriptor, text):
        if (resumable and not (text and text.exchanging)) or is_checkpoint(staged):
            return False
        found = owner_state(text, lock(descriptor), local=local) if text else OwnerState.UNKNOWN
        if found is not OwnerState.DEAD and not (old and found is OwnerState.UNKNOWN):
            return False
        for path in journals(staged):
            path.unlink(missing_ok=True)
        if text is not None and text.exchanging:
            rescue(staged, target_of(staged, text))
        elif staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        if staged.exists():
            return False
        claim_of(staged).unlink(missing_ok=True)
    return True


def remove_empty(step: Path) -> bool:
    """Remove the folder of a step, if nothing has been put into it by now; whether it has gone."""
    with contextlib.suppress(OSError):
        if owner_of_empty(step) in (OwnerState.DEAD, OwnerState.UNKNOWN):
            (step / LOCK).unlink(missing_ok=True)
            step.rmdir()
    return not step.exists()


def remove_emptied(folder: Path, begun: int) -> None:
    """Remove the folders below one that a deletion has emptied since it began, in nanoseconds."""
    own = own_keys_in(folder) if (folder / MANIFEST).exists() else OwnKeys()
    for each, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            is_own = own.is_group(os.path.relpath(each, folder))
            if each != str(folder) and not is_own and os.stat(each).st_mtime_ns >= begun:
                os.rmdir(each)


@contextlib.contextmanager
def opened_claim(staged: Path) -> Iterator[tuple[int, ClaimText | None]]:
    """The claim of a staging folder, open, and its text; None if it has none that can be read."""
    descriptor = -1
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(claim_of(staged), os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor, _text_in(descriptor) if descriptor >= 0 else None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _text_in(descriptor: int) -> ClaimText | None:
    """The text of an open claim; None if it cannot be read."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(os.pread(descriptor, 1 << 16, 0), type=ClaimText)
    return None


def is_checkpoint(staged: Path) -> bool:
    """Whether a folder with the name of a staging folder is a user's checkpoint.

    A save removes its claim last, so its leftovers have a claim for as long as they have a
    manifest.
    """
    return (staged / MANIFEST).exists() and not claim_of(staged).exists()


def parts_of(staged: Path) -> re.Match[str]:
    """The parts of a staging folder's name."""
    parts = LEFTOVER.fullmatch(staged.name)
    assert parts is not None
    return parts


def staged_in(parent: Path, names: Iterable[str]) -> list[Path]:
    """The staging folders that names in a folder belong to, each once."""
    found = (LEFTOVER.fullmatch(name) for name in names)
    return [
        parent / name
        for name in sorted({each[0][: each.start("kind")] for each in found if each is not None})
    ]


def target_of(staged: Path, text: ClaimText | None) -> Path:
    """The path that a staging folder was made for, as far as it is known."""
    name = text.name if text else ""
    # A claim is an untrusted file: the name in it may lead out of the folder.
    known = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    return staged.parent / (name if known else parts_of(staged)["name"])


def reclaim(folder: Path, identity: str) -> Claim | None:
    """Take over what a killed save of this identity left; None if there is nothing.

    Raises:
        CheckpointExistsError: that save is alive.
        OSError: its claim cannot be opened.
    """
    staged = staging_folder(folder, identity)
    path = claim_of(staged)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    locked = lock(descriptor)
    if locked is Lock.LACKING:
        text, local = _text_in(descriptor), is_local(folder.parent)
        state = owner_state(text, locked, local=local) if text else OwnerState.UNKNOWN
        locked = Lock.TAKEN if state is OwnerState.DEAD else Lock.HELD
    if locked is Lock.HELD:
        os.close(descriptor)
        raise being_written(folder)
    taken = Claim(path, staged, descriptor)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)) and staged.is_dir():
            return taken
    taken.release()
    return None
