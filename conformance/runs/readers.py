"""Readers of a step that is deleted while they read.

1. A run was recorded that saves steps and keeps the newest (`conformance.runs.crashes`), so its
   operations on files show in which order the files of step 0 go.
2. A reader begins to read step 0 (`Manager.begin`): it has found the step and what is in it. Then
   the files that are gone after so many operations are removed below it, and it goes on.
3. It must end with the step as it was saved, or with an error that says that the step is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from conformance.crash.disk import Image
from conformance.crash.recording import replay
from conformance.runs.crashes import ROOT, Left
from conformance.runs.manager import Manager, State, same, state_of

__all__ = ["readers", "says_deleted"]

_GONE = re.compile(r"delete|remove|no longer|gone|not found|no such|not exist|replaced", re.I)
_BROKEN = re.compile(r"corrupt|damage|altered|checksum|digest|truncated", re.I)


def says_deleted(error: Exception) -> bool:
    """Whether an error says that a step is gone, and not that it is damaged.

    Example:
        >>> says_deleted(FileNotFoundError("step 3 does not exist")), says_deleted(KeyError("w"))
        (True, False)
    """
    text = f"{type(error).__name__}: {error}"
    return bool(_GONE.search(text)) and not _BROKEN.search(text)


def readers(manager: Manager, recorded: Sequence[Left], folder: Path) -> Iterator[str]:
    """A reader for each set of files of step 0 that was gone at some moment.

    Args:
        manager: which made the run.
        recorded: what a kill leaves of it, after each change.
        folder: a new one.
    """
    whole = next(left.image for left in recorded if left.said == 0)
    for number, gone in enumerate(_deletions(whole, [left.image for left in recorded])):
        place = folder / str(number)
        replay(whole, place)
        rest = manager.begin(place / ROOT, 0)
        for path in gone:
            (place / path).unlink()
        yield _read(rest, f"{len(gone)} files are gone, {', '.join(sorted(gone)[:3])}")


def _read(rest: Callable[[], State], where: str) -> str:
    """What is wrong with what the reader gets; empty if nothing."""
    try:
        found = rest()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        return "" if says_deleted(error) else f"{where}: the reader gets {text}"
    return "" if same(found, state_of(0)) else f"{where}: the reader gets a mixture"


def _deletions(whole: Image, images: Sequence[Image]) -> list[frozenset[str]]:
    """Which files of an image are gone in later ones: each set once, in order."""
    there = {path for path, content in whole.items() if content is not None}
    found: list[frozenset[str]] = []
    began = False
    for image in images:
        began = began or image == whole
        gone = frozenset(there - image.keys())
        if began and gone and gone not in found:
            found.append(gone)
    return found
