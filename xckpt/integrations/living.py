"""Folders that belong to one process each, in a root that processes share."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Final

from xckpt.storage.commit.file_system import Lock
from xckpt.storage.commit.folder import ClaimText
from xckpt.storage.commit.leftovers import OwnerState, owner_state
from xckpt.storage.location import Location

_NAME: Final = re.compile(
    r"(?P<process>\d{1,18})_(?P<life>[\d-]*)_(?P<boot>[\dA-Za-z-]*)_[\da-f]{32}"
)

_DAY: Final = 86400.0
"""Seconds without a change after which the folder of a process of another host is removed."""


def own_name() -> str:
    """A new name for a folder of this process.

    Example:
        >>> own_name() != own_name()
        True
    """
    own = ClaimText.own("")
    return f"{own.process}_{own.life}_{own.boot}_{uuid.uuid4().hex}"


def remove_of_dead(own: str) -> None:
    """Remove the folders of dead processes beside an own one.

    Processes of other hosts may be alive: theirs go once nothing in them has changed for a day.

    Args:
        own: its path or URL; in a bucket nothing is removed.

    Example:
        >>> from pathlib import Path
        >>> own = Path("shared", own_name())
        >>> own.mkdir(parents=True)
        >>> remove_of_dead(str(own))
        >>> own.exists()
        True
    """
    folder = Location.parse(own).folder
    for each in folder.parent.glob("*_*_*_*") if folder is not None else ():
        if found := _NAME.fullmatch(each.name):
            owner = ClaimText("", int(found["process"]), boot=found["boot"], life=found["life"])
            state = owner_state(owner, Lock.LACKING, local=False)
            if state is OwnerState.DEAD or (state is OwnerState.UNKNOWN and _is_old(each)):
                shutil.rmtree(each, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # another process removes it
        return time.time() - folder.stat().st_mtime > _DAY
    return False
