"""The rules of a commit, without any I/O: what may be written where, and what makes it visible.

A save never touches what is readable. It writes to a place of its own and then makes one atomic
step (`decide` tells which):

=================  ==============================  ===========================================
at the path        local files                     object stores, ``memory://``
=================  ==============================  ===========================================
nothing            RENAME a sibling folder there   IN_PLACE: claim, write, create the manifest
a checkpoint       EXCHANGE with a sibling folder  GENERATION: write beside the old data, replace
                   (GENERATION if the file         the manifest if it is still the one we saw
                   system cannot exchange)
an unfinished one  (as elsewhere)                  refused; GENERATION with ``overwrite=True``
something else     refused                         refused
=================  ==============================  ===========================================
"""

from __future__ import annotations

from enum import Enum

from xckpt.errors import CheckpointExistsError

__all__ = ["Found", "Step", "decide"]


class Found(Enum):
    """What is at a path before a save."""

    NOTHING = "nothing"
    CHECKPOINT = "checkpoint"
    UNFINISHED = "unfinished"
    """The claim of a save that has not committed."""
    FOREIGN = "foreign"
    """Files that are none of ours."""


class Step(Enum):
    """The atomic step that commits a save."""

    RENAME = "rename"
    EXCHANGE = "exchange"
    IN_PLACE = "in place"
    GENERATION = "generation"


def decide(where: str, found: Found, *, overwrite: bool, renames: bool, exchanges: bool) -> Step:
    """The step for a save to ``where``.

    Args:
        where: the path, for the message.
        found: what is there now.
        overwrite: whether the caller allowed to replace a checkpoint.
        renames: whether the store can rename folders (local files).
        exchanges: whether it can exchange two folders atomically.

    Raises:
        CheckpointExistsError: the save must not be done.

    Example:
        >>> decide("/ckpt", Found.NOTHING, overwrite=False, renames=True, exchanges=True)
        <Step.RENAME: 'rename'>
        >>> decide("s3://b/c", Found.CHECKPOINT, overwrite=True, renames=False, exchanges=False)
        <Step.GENERATION: 'generation'>
    """
    if found is Found.FOREIGN:
        raise CheckpointExistsError(
            f"{where} is not empty and holds no checkpoint; nothing there was touched: "
            f"choose another path or clear it yourself"
        )
    if found is Found.NOTHING:
        return Step.RENAME if renames else Step.IN_PLACE
    if not overwrite:
        raise CheckpointExistsError(
            f"{where} holds a checkpoint already; pass overwrite=True to replace it"
            if found is Found.CHECKPOINT
            else f"{where} is claimed by a save that has not committed; if that save is dead, pass "
            f"overwrite=True"
        )
    if found is Found.CHECKPOINT and renames and exchanges:
        return Step.EXCHANGE
    return Step.GENERATION
