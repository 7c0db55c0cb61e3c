"""How a run restores a step: the newest, or if that is damaged the one before it.

1. Where a step lies in both roots of a run, the kept one comes first.
2. A step that is deleted while it is read is not damaged: another process has saved a newer
   one. So the roots are listed again, and the newest untried step comes next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from xckpt.api.run.folder import RunFolder, key_of
from xckpt.core.run.record import StepRecord
from xckpt.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    ManifestError,
    MemoryLimitError,
    NotACheckpointError,
    RanksFailedError,
    StorageError,
    VersionError,
    XckptError,
)

State = TypeVar("State")
"""What a load returns."""

SOUND = (VersionError, MemoryLimitError)
"""Errors of a load of what may be sound: an older step in its place would lose work in silence."""
DAMAGE = (CorruptCheckpointError, ManifestError, NotACheckpointError, CheckpointReplacedError)
"""Errors of a load if a step is not what was saved, or is deleted while it is read."""
GONE = (NotACheckpointError, CheckpointReplacedError)
"""Errors of a load if a step was deleted after it was listed."""
LOST = (*DAMAGE, StorageError)
"""Errors of a load of a temporary step if its root was lost, on some hosts or on all."""


def in_short(error: XckptError) -> str:
    """The first lines of an error, as one.

    Example:
        >>> in_short(CorruptCheckpointError.listing("run/step-3: 1 chunk", ["w: chunk 0", "x"]))
        'run/step-3: 1 chunk (w: chunk 0)'
    """
    # Of several ranks' failures the first line says how many there are, the next one why.
    summary, *listed = str(error).splitlines()
    return summary + (f" ({listed[0].strip().removeprefix('- ')})" if listed else "")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that was not restored because it is damaged."""

    number: int
    error: XckptError
    """What its load raised."""

    def __str__(self) -> str:
        return f"step {self.number}: {in_short(self.error)}"


@dataclass(frozen=True, slots=True)
class Restored(Generic[State]):
    """What a restore has loaded."""

    state: State
    record: StepRecord
    skipped: tuple[Skipped, ...]
    """Newer steps, the newest first."""


def restore_step(
    folder: RunFolder, step: int | None, load: Callable[[str], State]
) -> Restored[State] | None:
    """Load a step, or the newest good one; None if there is none, good or not; collective.

    Args:
        folder: the roots of the run.
        step: its number, or None for the newest.
        load: loads what is at a path.

    Raises:
        NotACheckpointError: there is no such step.
        CorruptCheckpointError: all steps are damaged, or the one that was named.
    """
    folder.look()
    chosen = _newest_first(folder, step)
    if step is not None and not chosen:
        raise folder.no_such(step)
    skipped: dict[tuple[bool, str], Skipped] = {}
    while chosen:
        record = chosen.pop(0)
        try:
            state = load(folder.path(record))
        except XckptError as error:
            is_last = step is not None and not chosen
            if is_last or not is_damage(error, LOST if record.temporary else DAMAGE):
                raise
            skipped[key_of(record)] = Skipped(record.number, error)
            folder.damaged.add(key_of(record))
            if step is None and is_damage(error, GONE):
                folder.look()
                there = _newest_first(folder, step)
                chosen = [each for each in there if key_of(each) not in skipped]
                for key in skipped.keys() - set(map(key_of, there)):
                    del skipped[key]
            continue
        folder.damaged.discard(key_of(record))  # it is sound by now
        found = tuple(skipped.values())
        _warn(folder, record, found)
        return Restored(state, record, found)
    if skipped:
        summary = f"{folder.kept.location}: no step is good, so nothing was restored"
        raise CorruptCheckpointError.listing(summary, map(str, skipped.values()))
    return None


def _newest_first(folder: RunFolder, step: int | None) -> list[StepRecord]:
    """The steps of a number, or all."""
    return [each for each in reversed(folder.all) if step in (None, each.number)]


def _warn(folder: RunFolder, record: StepRecord, skipped: Sequence[Skipped]) -> None:
    if skipped:
        newer = "; ".join(map(str, skipped))
        text = (
            f"{folder.root_of(record).location}: step {record.number} was restored, for newer "
            f"ones are damaged: {newer}"
        )
        warnings.warn(text, UserWarning, stacklevel=5)


def is_damage(error: XckptError, kinds: tuple[type[XckptError], ...] = DAMAGE) -> bool:
    """Whether a load failed because the checkpoint is not what was saved, on all failing ranks.

    Args:
        error: what the load raised.
        kinds: what counts as damage.

    Example:
        >>> is_damage(CorruptCheckpointError("w: chunk 3")), is_damage(VersionError("version 9"))
        (True, False)
    """
    if isinstance(error, RanksFailedError):
        known = {kind.__name__ for kind in kinds}
        causes = [each for each in error.failures if not each.is_consequence]
        return bool(causes) and all(each.cause in known for each in causes)
    return isinstance(error, kinds) and not isinstance(error, SOUND)
