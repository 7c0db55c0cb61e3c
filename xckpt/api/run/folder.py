"""What a `xckpt.CheckpointManager` knows of its root, the same on every rank, and does there.

1. `RunFolder.look` has the coordinator list the root; what it finds goes to all ranks. Manifests
   that were read before are not read again.
2. `RunFolder.restore` loads the newest step, and where that is damaged the one before it.
3. `RunFolder.keep` deletes in the background, on the coordinator, what no policy keeps.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

import msgspec

from xckpt.api.load import load
from xckpt.api.parts import Patterns
from xckpt.api.save import Path
from xckpt.core.plan.load import LoadPlanner
from xckpt.core.plan.report import LoadReport, Severity
from xckpt.core.run.keeping import deletable
from xckpt.core.run.names import step_name
from xckpt.core.run.policies import KeepPolicy
from xckpt.core.run.record import StepRecord
from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.steps import broadcast
from xckpt.errors import (
    CorruptCheckpointError,
    ManifestError,
    NotACheckpointError,
    RanksFailedError,
    VersionError,
    XckptError,
)
from xckpt.options import LoadOptions

if TYPE_CHECKING:
    from xckpt.mapping.mapping import LeafMapping

logger = logging.getLogger("xckpt")

LEFTOVERS = 86400.0
"""Seconds after which what a killed save or deletion has left is removed, if its owner may be
alive on another host."""

DAMAGE = (CorruptCheckpointError, ManifestError, NotACheckpointError)
"""What a load raises where a step is not what was saved."""


class LoadArguments(TypedDict, total=False):
    """Further arguments of `xckpt.CheckpointManager.restore`: see `xckpt.load`."""

    at: str
    select: Patterns | None
    framework: str | None
    device: object
    strict: bool
    missing: Severity | None
    unexpected: Severity | None
    cast: bool
    planner: LoadPlanner | None
    mapping: LeafMapping | None
    allow_lossy: bool
    report: Callable[[LoadReport], object] | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that was not restored, for it is damaged."""

    number: int
    error: XckptError
    """What its load raised."""

    def __str__(self) -> str:
        return f"step {self.number}: {str(self.error).splitlines()[0]}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore has loaded."""

    state: object
    record: StepRecord
    skipped: tuple[Skipped, ...]
    """Newer steps, the newest first."""


class RunFolder:
    """The root of a run, as one rank of a group sees it."""

    def __init__(self, root: Path, group: Group) -> None:
        from xckpt.storage.location import Location
        from xckpt.storage.run_steps import Remover, Steps

        self.location = Location.parse(root)
        self.group = group
        self.is_coordinator = group.rank == group.coordinator
        self.remover = Remover(self.location)
        self.damaged: dict[int, str] = {}
        """Number -> folder name, of steps that could not be restored."""
        self._known = Steps()

    def path(self, name: str) -> str:
        """Where the step of a folder name is."""
        return str(self.location.within(name))

    def path_of(self, number: int) -> str:
        """Where a step is, or would be saved."""
        return self.path(self.name_of(number) or step_name(number))

    def look(self, *, afresh: bool = False) -> list[StepRecord]:
        """The committed steps, by number, but for those known as damaged; collective.

        Args:
            afresh: read all manifests again, and forget which steps are damaged.
        """
        from xckpt.storage.run_steps import Steps

        if afresh:
            self._known, self.damaged = Steps(), {}
        with operation(self.group):
            found = broadcast(self.group, "list the steps", self._listing)
        self._known = msgspec.msgpack.decode(found, type=Steps)
        there = {record.number: record.name for record in self._known.records}
        there.update(self._known.unreadable)
        self.damaged = {n: name for n, name in self.damaged.items() if there.get(n) == name}
        return self.records

    @property
    def records(self) -> list[StepRecord]:
        """The good steps, by number, as of the last look and the saves since."""
        return [record for record in self._known.records if record.number not in self.damaged]

    def name_of(self, number: int) -> str | None:
        """The folder name that a step has already, sound or not."""
        names = {record.number: record.name for record in self._known.records}
        return (names | self._known.unreadable).get(number)

    def _listing(self) -> bytes:
        from xckpt.storage.run_steps import Steps, committed_steps, described, without

        there = committed_steps(self.location)
        known = {(record.number, record.name): record for record in self._known.records}
        kept = [known[each] for each in there.items() if each in known]
        new = {number: name for number, name in there.items() if (number, name) not in known}
        read = described(self.location, new)
        records = sorted([*kept, *read.records], key=lambda record: record.number)
        steps = without(Steps(records, read.unreadable), self.remover.names)
        return msgspec.msgpack.encode(steps)

    def add(self, record: StepRecord) -> None:
        """A step was committed."""
        from xckpt.storage.run_steps import Steps

        self.damaged.pop(record.number, None)
        self.remover.gone.discard(record.name)
        others = [each for each in self._known.records if each.number != record.number]
        unreadable = {n: name for n, name in self._known.unreadable.items() if n != record.number}
        self._known = Steps(sorted([*others, record], key=lambda each: each.number), unreadable)

    def keep(self, policies: Iterable[KeepPolicy], last: int) -> None:
        """Begin to delete what no policy keeps; only the coordinator does.

        Args:
            policies: see `xckpt.core.run.keeping`.
            last: a step that was just committed and stays, though newer ones may be there.
        """
        if not self.is_coordinator:
            return
        from xckpt.storage.run_steps import without

        self._known = without(self._known, self.remover.gone)
        going = self.remover.names
        for record in deletable(self.records, policies):
            if record.number != last and record.name not in going:
                self.remover.remove(record.name)

    def delete(self, number: int) -> None:
        """Delete a step now; collective.

        Raises:
            NotACheckpointError: there is no such step.
            ValueError: it is the only good one.
        """
        records = self.look()
        name = self.name_of(number)
        if name is None:
            raise self.no_such(number)
        if [record.number for record in records] == [number]:
            raise ValueError(
                f"step {number} is the only good checkpoint in {self.location}: "
                f"xckpt.delete({self.path(name)!r}) deletes it all the same"
            )
        with operation(self.group):
            broadcast(self.group, f"delete step {number}", lambda: self._delete(name))
        self.look()

    def _delete(self, name: str) -> bytes:
        self.remover.remove(name).result()
        return b""

    def no_such(self, number: int) -> NotACheckpointError:
        """The error for a step that is not there."""
        numbers = [str(record.number) for record in self._known.records]
        shown = numbers if len(numbers) < 9 else [*numbers[:3], "...", *numbers[-3:]]
        there = f"its steps are {', '.join(shown)}" if numbers else "it holds no step yet"
        return NotACheckpointError(f"{self.location} has no step {number}: {there}")

    def empty(self) -> NotACheckpointError:
        """The error for a root without steps."""
        return NotACheckpointError(
            f"{self.location} holds no step yet; pass default= for what to begin with"
        )

    def restore(
        self, step: int | None, like: object, options: LoadOptions | None, arguments: LoadArguments
    ) -> Restored | None:
        """Load a step, or the newest good one; None if there is none, good or not; collective.

        Raises:
            NotACheckpointError: there is no such step.
            CorruptCheckpointError: all steps are damaged, or the one that was named.
        """
        self.look(afresh=step is None)
        records = {record.number: record for record in self._known.records}
        for number, name in self._known.unreadable.items():
            records[number] = StepRecord(number, name=name)
        if step is not None and step not in records:
            raise self.no_such(step)
        skipped: list[Skipped] = []
        for number in sorted(records, reverse=True) if step is None else [step]:
            try:
                state = self.load(records[number].name, like, options, arguments)
            except XckptError as error:
                if step is not None or not is_damage(error):
                    raise
                skipped.append(Skipped(number, error))
                self.damaged[number] = records[number].name
                continue
            self._warn(number, skipped)
            return Restored(state, records[number], tuple(skipped))
        if skipped:
            summary = f"{self.location}: no step is good, so nothing was restored"
            raise CorruptCheckpointError.listing(summary, map(str, skipped))
        return None

    def _warn(self, number: int, skipped: Sequence[Skipped]) -> None:
        if skipped:
            newer = "; ".join(map(str, skipped))
            text = (
                f"{self.location}: step {number} was restored, for newer ones are damaged: {newer}"
            )
            warnings.warn(text, UserWarning, stacklevel=4)

    def load(
        self, name: str, like: object, options: LoadOptions | None, arguments: LoadArguments
    ) -> object:
        """Load one step; collective."""
        path, target = self.path(name), cast(Any, like)
        return load(path, target, group=self.group, options=options, **arguments)

    def collect(self) -> None:
        """Remove in the background what killed saves and deletions have left in a local root."""
        if self.is_coordinator and self.location.folder is not None:
            self.remover.run(self._collect)

    def _collect(self) -> None:
        from xckpt.api.gc import gc

        try:
            if self.location.folder is not None and self.location.folder.is_dir():
                gc(str(self.location), older_than=LEFTOVERS)
        except XckptError as error:
            logger.warning("leftovers in %s were not removed: %s", self.location, error)


def is_damage(error: XckptError) -> bool:
    """Whether a load failed since the checkpoint is not what was saved, on all failing ranks.

    Example:
        >>> is_damage(CorruptCheckpointError("w: chunk 3")), is_damage(VersionError("version 9"))
        (True, False)
    """
    if isinstance(error, RanksFailedError):
        known = {kind.__name__ for kind in DAMAGE}
        causes = [each for each in error.failures if not each.is_consequence]
        return bool(causes) and all(each.cause in known for each in causes)
    return isinstance(error, DAMAGE) and not isinstance(error, VersionError)
