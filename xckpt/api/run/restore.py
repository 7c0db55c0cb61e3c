"""How a run restores a step: the newest, or if that is damaged the one before it.

1. Where a step lies in both roots of a run, the kept one comes first. Where folders of two names
   have one number, the one comes first whose name a manager gives.
2. A step that is deleted while it is read is not damaged: another process has saved a newer
   one. So the roots are listed again, and the newest untried step comes next.
3. A step that does not fit the target may be damaged, too (`xckpt.api.run.misfit`).
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from xckpt.api.run.folder import RunFolder, key_of, no_such_step
from xckpt.api.run.misfit import damage_of
from xckpt.api.save import Path
from xckpt.core.run.record import StepRecord
from xckpt.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    ManifestError,
    MemoryLimitError,
    NotACheckpointError,
    RanksFailedError,
    StorageError,
    TreeMismatchError,
    VersionError,
    XckptError,
)
from xckpt.options import LoadOptions

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
STILL = (*DAMAGE, TreeMismatchError)
"""Errors of a load of a step that the run knows as damaged: other ranks may have saved it, and its
leaves are compared with the target before its chunks are read."""


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that is loaded if those before it are damaged."""

    path: Path
    name: str
    """What messages call it."""
    damage: tuple[type[XckptError], ...] = field(default=DAMAGE, compare=False)
    """The errors of its load that mean damage."""


Damaged: TypeAlias = dict[Candidate, XckptError]
"""What was passed over, and what its load raised."""


def first_good(
    candidates: Iterable[Candidate],
    load: Callable[[Path], State],
    damaged: Damaged,
    *,
    stacklevel: int,
) -> tuple[Candidate, State] | None:
    """Load the first of several checkpoints that is not damaged; None if there is none.

    Args:
        candidates: no more are asked for than are tried.
        load: loads what is at a path.
        damaged: gets each that is, before the next one is asked for.
        stacklevel: whom to warn of them, as in `warnings.warn`.

    Raises:
        XckptError: what ``load`` raised, if that is not damage.
    """
    for candidate in candidates:
        try:
            state = load(candidate.path)
        except XckptError as error:
            if not is_damage(error, candidate.damage):
                error.add_note(f"This is the failure of the load of {candidate.name}.")
                raise
            forget_frames(error)
            damaged[candidate] = error
            continue
        if damaged:
            newer = "; ".join(passed_over(damaged))
            text = f"{candidate.name} was restored, because newer ones are damaged: {newer}"
            warnings.warn(text, UserWarning, stacklevel=stacklevel)
        return candidate, state
    return None


def forget_frames(error: BaseException) -> None:
    """Let go of what the calls of an error, and of those that led to it, still hold in memory.

    What raised a `ManifestError` holds the manifest: kept errors of many steps would keep them all.
    Each traceback still says where the error came from.
    """
    led: BaseException | None = error
    while led is not None:
        traceback.clear_frames(led.__traceback__)
        led = led.__cause__ or led.__context__


def passed_over(damaged: Damaged) -> list[str]:
    """A line for each damaged checkpoint: its name, and why."""
    return [f"{each.name}: {in_short(error)}" for each, error in damaged.items()]


def restore_step(
    folder: RunFolder,
    step: int | None,
    load: Callable[[Path], State],
    options: LoadOptions | None,
) -> Restored[State] | None:
    """Load a step, or the newest good one; None if there is none, good or not; collective.

    Args:
        folder: the roots of the run.
        step: its number, or None for the newest.
        load: loads what is at a path.
        options: for a look at a newest step that does not fit; see `damage_of`.

    Raises:
        NotACheckpointError: there is no such step.
        CorruptCheckpointError: all steps are damaged, or the one that was named.
    """
    folder.look()
    damaged: Damaged = {}
    if step is None:
        load = partial(_loaded, folder, load, options)
    found = first_good(_each(folder, step, damaged), load, damaged, stacklevel=7)
    records = _newest_first(folder, step)
    if found is not None:
        candidate, state = found
        record = records[candidate]
        folder.damaged.discard(key_of(record))  # it is sound by now
        skipped = (Skipped(records[each].number, error) for each, error in damaged.items())
        return Restored(state, record, tuple(skipped))
    if step is not None:
        raise next(reversed(damaged.values()), no_such_step(folder, step))
    if damaged:
        summary = f"{folder.kept.location}: no step is good, so nothing was restored"
        raise CorruptCheckpointError.listing(summary, passed_over(damaged))
    return None


def _loaded(
    folder: RunFolder, load: Callable[[Path], State], options: LoadOptions | None, path: Path
) -> State:
    """Load a step; one that does not fit is verified if nothing is known of it."""
    try:
        return load(path)
    except XckptError as error:
        if not is_damage(error, (TreeMismatchError,)):
            raise
        steps = {each.path: each.damage for each in _newest_first(folder, None)}
        if TreeMismatchError in steps[path]:
            raise
        paths = list(steps)
        damage = damage_of(folder, path, paths[paths.index(path) + 1 :], options)
        if damage is None:
            raise
        raise damage from error


def _newest_first(folder: RunFolder, step: int | None) -> dict[Candidate, StepRecord]:
    """The steps of a number, or all."""
    records = folder.all if step is None else folder.find(step)
    names = Counter(number for number, _ in {(each.number, each.name) for each in records})
    return {
        Candidate(folder.place(each), _called(each, names), _damage_of(folder, each)): each
        for each in reversed(records)
    }


def _called(record: StepRecord, names: Counter[int]) -> str:
    """What messages call a step: by its folder, if its number has several names."""
    return f"step {record.number}" + f" ({record.name})" * (names[record.number] > 1)


def _damage_of(folder: RunFolder, record: StepRecord) -> tuple[type[XckptError], ...]:
    """The errors of a load of a step that mean damage."""
    known = STILL if key_of(record) in folder.damaged else DAMAGE
    return (*known, *LOST) if record.temporary else known


def _each(folder: RunFolder, step: int | None, damaged: Damaged) -> Iterator[Candidate]:
    """One step after the other, for as long as they are damaged; those that are gone are not."""
    records = _newest_first(folder, step)
    while left := [each for each in records if each not in damaged]:
        yield left[0]
        folder.damaged.add(key_of(records[left[0]]))
        if step is None and is_damage(damaged[left[0]], GONE):
            folder.look(again=True)
            records = _newest_first(folder, step)
            for gone in damaged.keys() - records.keys():
                del damaged[gone]


def is_damage(error: XckptError, kinds: tuple[type[XckptError], ...]) -> bool:
    """Whether a load failed because the checkpoint is not what was saved, on all failing ranks.

    Args:
        error: what the load raised.
        kinds: what counts as damage.

    Example:
        >>> is_damage(CorruptCheckpointError("w: chunk 3"), DAMAGE)
        True
        >>> is_damage(VersionError("version 9"), DAMAGE)
        False
    """
    if isinstance(error, RanksFailedError):
        known = {kind.__name__ for kind in kinds}
        causes = [each for each in error.failures if not each.is_consequence]
        return bool(causes) and all(each.cause in known for each in causes)
    return isinstance(error, kinds) and not isinstance(error, SOUND)
