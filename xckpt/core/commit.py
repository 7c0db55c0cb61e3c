"""The rules of a commit, without any I/O: what may be written where, and what makes it visible.

A save never touches what is readable. It writes to a place of its own and then takes one atomic
step. Which one depends on what is at the path and on what the store can do there (`decide`):

==============  ============  ============  ============  ============  =============  ==========
at the path     KEYS          FOLDER        PLAIN_FOLDER  OUTPUT        PLAIN_OUTPUT   FILE
==============  ============  ============  ============  ============  =============  ==========
nothing         IN_PLACE      RENAME        RENAME        RENAME        RENAME         RENAME
a checkpoint    GENERATION    EXCHANGE      GENERATION    EXCHANGE      refused        REPLACE
an unfinished   GENERATION    GENERATION    GENERATION    refused       refused        refused
something else  GENERATION    EXCHANGE      GENERATION    refused       refused        refused
==============  ============  ============  ============  ============  =============  ==========

All but the first row needs ``overwrite=True``. The first three columns are checkpoints of xckpt,
whose manifest can name data beside the old ones; the others are outputs in other formats.

In each row, files that belong to no checkpoint are the user's. A save beside them (GENERATION) does
not touch them. An exchange carries them over (`xckpt.storage.commit.carry`); where it cannot, the
file system counts as one that exchanges no folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from xckpt.core.manifest.entries import Manifest
from xckpt.core.manifest.rules import count_chunks
from xckpt.core.names import LONGEST_COMPONENT
from xckpt.errors import CheckpointExistsError

MANY: Final = 256
"""Leaves from which on files are synced together."""

MANY_SHARED: Final = 16
"""Chunks from which on those of a save with a base are: most of them lie on the disk already."""


class Found(Enum):
    """What is at a path before a save."""

    NOTHING = "nothing"
    """No file, no key, or an empty folder."""
    CHECKPOINT = "checkpoint"
    """One of this format; other files may be in it."""
    UNFINISHED = "unfinished"
    """The claim of a save that has not committed."""
    FOREIGN = "foreign"
    """Other files."""


class Place(Enum):
    """What the store can do at a path."""

    KEYS = "keys"
    """Conditional writes: object stores, ``memory://``, folders that cannot be renamed."""
    FOLDER = "folder"
    """Rename a folder to the path, and exchange it with the one that is there."""
    PLAIN_FOLDER = "plain folder"
    """Rename a folder to the path; this file system exchanges none."""
    OUTPUT = "output"
    """As FOLDER, for a folder in another format, which has no manifest."""
    PLAIN_OUTPUT = "plain output"
    """As PLAIN_FOLDER, for a folder in another format."""
    FILE = "file"
    """Rename a file to the path, in place of one that is there."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What the file system under a save can do, found out once a save."""

    locks: bool
    """Whether it has locks. Without them, only a save in a folder of its own is safe."""
    syncs_folders: bool
    """Whether a folder can be synced to disk. If not, only files are."""
    tells_case: bool
    """Whether names that differ in case alone are two names."""
    longest_name: int
    """Bytes that a name may have."""

    def problems(self, paths: Mapping[str, str], *, beside: bool = False) -> list[str]:
        """Why a save must not begin here, a line each.

        Args:
            paths: where each zarr array goes -> the leaf that it is of. All is ASCII, so that no
                file system normalises it.
            beside: whether the save is staged among the files that are there.

        Example:
            >>> plain = FileSystem(True, True, tells_case=False, longest_name=255)
            >>> plain.problems({"m/A": "m/A", "m/a": "m/a", "m/b": "m/b"})
            ['m/A and m/a differ in case alone, and here that is one name: rename one']
        """
        problems: list[str] = []
        if beside and not (self.locks and self.syncs_folders):
            lacking = "locks files" if not self.locks else "forces the names in a folder to disk"
            problems.append(f"it neither exchanges folders nor {lacking}: save to a new path")
        if not self.tells_case:
            problems += _clashing(paths)
        for path, leaf in paths.items() if self.longest_name < LONGEST_COMPONENT else ():
            longest = max(map(len, path.split("/")))
            if longest > self.longest_name:
                problems.append(
                    f"{leaf}: its name takes {longest} bytes, and here names have at most "
                    f"{self.longest_name}: give it a shorter one"
                )
        return problems


def _clashing(paths: Mapping[str, str]) -> Iterator[str]:
    """A line for each path of which a part differs from another's in case alone."""
    spelled: dict[str, str] = {}
    leaves: dict[str, str] = {}
    said: set[str] = set()
    for path, leaf in paths.items():
        end = 0
        while end >= 0:
            end = path.find("/", end + 1)
            part = path if end < 0 else path[:end]
            folded = part.lower()
            if spelled.setdefault(folded, part) == part:
                leaves.setdefault(part, leaf)
            elif folded not in said:
                said.add(folded)
                yield (
                    f"{leaves[spelled[folded]]} and {leaf} differ in case alone, and here that is "
                    f"one name: rename one"
                )


class Step(Enum):
    """The atomic step that commits a save."""

    RENAME = "rename"
    """The staged folder or file gets the name, which must be free."""
    EXCHANGE = "exchange"
    """The staged folder and the one that is there exchange their names."""
    REPLACE = "replace"
    """The staged file gets the name of the one that is there."""
    IN_PLACE = "in place"
    """Claim the path, write there, create the manifest."""
    GENERATION = "generation"
    """Write beside the old data; replace the manifest if it is still the one that was seen."""


_STEPS: Final[Mapping[Found, Mapping[Place, Step]]] = MappingProxyType(
    {
        Found.NOTHING: {**dict.fromkeys(Place, Step.RENAME), Place.KEYS: Step.IN_PLACE},
        Found.CHECKPOINT: {
            Place.KEYS: Step.GENERATION,
            Place.FOLDER: Step.EXCHANGE,
            Place.PLAIN_FOLDER: Step.GENERATION,
            Place.OUTPUT: Step.EXCHANGE,
            Place.FILE: Step.REPLACE,
        },
        Found.UNFINISHED: dict.fromkeys(
            (Place.KEYS, Place.FOLDER, Place.PLAIN_FOLDER), Step.GENERATION
        ),
        Found.FOREIGN: {
            Place.KEYS: Step.GENERATION,
            Place.FOLDER: Step.EXCHANGE,
            Place.PLAIN_FOLDER: Step.GENERATION,
        },
    }
)
"""The rows of the table above; what is not here is refused."""


def decide(where: object, found: Found, place: Place, *, overwrite: bool, reason: str = "") -> Step:
    """The step for a save to ``where``.

    Args:
        where: the path, for the message.
        found: what is there now.
        place: what the store can do there.
        overwrite: whether the caller allowed to replace a checkpoint.
        reason: why what is there belongs to someone else, for the message.

    Raises:
        CheckpointExistsError: the save must not be done.

    Example:
        >>> decide("/ckpt", Found.NOTHING, Place.FOLDER, overwrite=False)
        <Step.RENAME: 'rename'>
        >>> decide("s3://b/c", Found.CHECKPOINT, Place.KEYS, overwrite=True)
        <Step.GENERATION: 'generation'>
    """
    step = _STEPS[found].get(place)
    if step is not None and (overwrite or found is Found.NOTHING):
        return step
    raise CheckpointExistsError(f"{where} {_refusal(found, overwrite=overwrite, reason=reason)}")


def _refusal(found: Found, *, overwrite: bool, reason: str) -> str:
    if found is Found.FOREIGN and not overwrite and not reason:
        return (
            "is not empty and holds no checkpoint; nothing there was touched: choose another path, "
            "or pass overwrite=True to save there and keep the files"
        )
    if found is Found.FOREIGN:
        return (
            f"{reason or 'is not empty and holds no checkpoint'}; nothing there was touched: "
            f"choose another path or clear it yourself"
        )
    if overwrite:
        return "cannot be replaced in one step here: choose another path or remove it yourself"
    if found is Found.CHECKPOINT:
        return "holds a checkpoint already; pass overwrite=True to replace it"
    return "is claimed by a save that has not committed; if that save is dead, pass overwrite=True"


def has_many_files(planned: Manifest | None, *, shares: bool) -> bool:
    """Whether a save has so many files that syncing the disk once is quicker than each of them."""
    if planned is None:
        return False
    return len(planned.leaves) >= MANY or (shares and count_chunks(planned) >= MANY_SHARED)
