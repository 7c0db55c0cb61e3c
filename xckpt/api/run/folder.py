"""The roots of a `xckpt.CheckpointManager`, as all ranks know them, and operations on them.

1. `RunFolder.look` has the coordinator list the roots; what it finds goes to all ranks. Manifests
   that were read before are not read again.
2. `RunFolder.keep` deletes in the background, on the coordinator, what no policy keeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from xckpt.api.run.root import RunRoot
from xckpt.api.save import names_limits
from xckpt.core.run.keeping import deletable
from xckpt.core.run.policies import KeepPolicy
from xckpt.core.run.record import StepRecord, place_of
from xckpt.engine.ranks.group import Group, operation
from xckpt.engine.run.agreement import listed
from xckpt.engine.steps import broadcast
from xckpt.errors import NotACheckpointError

if TYPE_CHECKING:
    from xckpt.storage.location import Location

COLLECT_SECONDS: Final = 86400.0
"""After this long a run looks again for what killed saves have left: by then it may be removed."""


class RunFolder:
    """The roots of a run, as one rank of a group sees them.

    Args:
        group: the ranks of the run.
        kept: where checkpoints are kept.
        temporary: where others lie, if there is such a root.

    Raises:
        ValueError: both roots are one place.
    """

    def __init__(self, group: Group, kept: RunRoot, temporary: RunRoot | None = None) -> None:
        if temporary is not None and temporary.is_at(kept):
            raise ValueError(
                f"the temporary root {temporary.location} is the root of the run itself, and its "
                f"policies would delete the steps that are kept: name another folder"
            )
        self.group = group
        self.kept = kept
        self.roots: Final = (kept,) if temporary is None else (kept, temporary)
        self.is_coordinator: Final = group.rank == group.coordinator
        self.damaged: set[tuple[bool, str]] = set()
        """The steps that could not be restored, by `key_of`."""
        # Changed by one call each: a save in a signal handler may come between two.
        self._records: dict[tuple[bool, str], StepRecord] = {}
        self._unreadable: dict[tuple[bool, str], StepRecord] = {}
        self._collected = -math.inf

    def root_of(self, record: StepRecord) -> RunRoot:
        """Where a step lies."""
        return self.roots[record.temporary]

    def path(self, record: StepRecord) -> str:
        """Where a step is."""
        return self.root_of(record).path(record.name)

    def place(self, record: StepRecord) -> Location:
        """Where a step is, to be asked within the time of the last look."""
        return self.root_of(record).asked.within(record.name)

    def path_of(self, number: int) -> str:
        """Where a step is, or would be saved."""
        found = self.find(number)
        return self.path(found[-1] if found else StepRecord(number))

    @names_limits
    def look(self, *, reread: bool = False, again: bool = False) -> list[StepRecord]:
        """The committed steps, by number, except those known as damaged; collective.

        Args:
            reread: read all manifests again, and forget which steps are damaged.
            again: in a call that has looked before, and has one time for all.

        Raises:
            PlanError: the ranks make different calls.
        """
        from xckpt.storage.run_steps import Steps

        if reread:
            self._records, self._unreadable, self.damaged = {}, {}, set()
        self._forget_deleted()
        before = tuple(self._records)
        listing = partial(self._listing, begins=not again)
        found = msgspec.msgpack.decode(listed(self.group, listing), type=Steps)
        for root in () if self.is_coordinator or again else self.roots:
            root.begin()
        records = {key_of(record): record for record in found.records}
        for key in {*before} - records.keys():
            self._records.pop(key, None)
        self._records.update(records)
        self._unreadable = {key_of(record): record for record in found.unreadable}
        self.damaged &= {key_of(record) for record in self.all}
        return self.records

    @property
    def all(self) -> list[StepRecord]:
        """The steps, sound or not, by number; of one number the one that counts last."""
        return sorted([*self._records.values(), *self._unreadable.values()], key=place_of)

    @property
    def _good(self) -> list[StepRecord]:
        known = sorted(self._records.values(), key=place_of)
        return [each for each in known if key_of(each) not in self.damaged]

    @property
    def records(self) -> list[StepRecord]:
        """The good steps, by number, as of the last look and the saves since."""
        return list({record.number: record for record in self._good}.values())

    def find(self, number: int) -> list[StepRecord]:
        """The steps of a number, sound or not; the one that counts last."""
        known = (*self._records.values(), *self._unreadable.values())
        return sorted((each for each in known if each.number == number), key=place_of)

    def replaced(self, number: int, *, temporary: bool) -> tuple[str | None, bool]:
        """Folder name of what a save replaces, and whether that lies in the temporary root."""
        own = [each for each in self.find(number) if each.format == "xckpt" and not each.linked]
        temporary = temporary and all(each.temporary for each in own)  # what is kept counts
        names = (each.name for each in reversed(own) if each.temporary == temporary)
        return next(names, None), temporary

    def _listing(self, *, begins: bool) -> bytes:
        from xckpt.storage.run_steps import Steps

        found: list[Steps] = []
        for root in reversed(self.roots):  # a lost temporary one takes no time from the other
            if begins:
                root.begin()
            known = [each for each in tuple(self._records.values()) if self.root_of(each) is root]
            found.append(root.listing(known))
        records = sorted((each for steps in found for each in steps.records), key=place_of)
        unreadable = [each for steps in found for each in steps.unreadable]
        return msgspec.msgpack.encode(Steps(records, unreadable))

    def add(self, record: StepRecord) -> None:
        """A step was committed."""
        key = key_of(record)
        self.damaged.discard(key)
        self.root_of(record).remover.gone.discard(record.name)
        self._records[key] = record
        self._unreadable.pop(key, None)

    def keep(self, policies: Sequence[Iterable[KeepPolicy]], last: StepRecord) -> None:
        """Begin to delete what no policy keeps; only the coordinator does.

        Args:
            policies: of each root; see `xckpt.core.run.keeping`.
            last: a step that was just committed and stays, even if newer ones exist.
        """
        if not self.is_coordinator:
            return
        if time.monotonic() - self._collected >= COLLECT_SECONDS:
            self.collect()
        self._forget_deleted()
        for root, rules in zip(self.roots, policies, strict=True):
            stays = {key_of(last), *((root.temporary, name) for name in root.remover.names)}
            own = [each for each in self._good if self.root_of(each) is root]
            one_each = {each.number: each for each in own}  # policies see each number once
            numbers = {each.number for each in deletable(list(one_each.values()), rules)}
            # Older ones of the last step, if damaged, too: they would count again some day.
            twins = self.find(last.number) if root.temporary and not last.temporary else []
            for record in dict.fromkeys([*(r for r in own if r.number in numbers), *twins]):
                if record.managed and self.root_of(record) is root and key_of(record) not in stays:
                    self.remove(record)

    def _forget_deleted(self) -> None:
        for root in self.roots:
            gone = set(root.remover.gone)
            for name in gone:
                self._records.pop((root.temporary, name), None)
                self._unreadable.pop((root.temporary, name), None)
            root.remover.gone.difference_update(gone)  # another process may save it again

    def remove(self, record: StepRecord) -> Future[None]:
        """Delete a step in the background; only the coordinator does."""
        return self.root_of(record).remover.remove(record)

    def delete(self, number: int) -> None:
        """Delete a step now; collective.

        Raises:
            NotACheckpointError: there is no such step.
            ValueError: it is the only good one, another library's, or a symbolic link.
        """
        self.look()
        there = self.find(number)
        if not there:
            raise no_such_step(self, number)
        found = [each for each in there if each.format == "xckpt"]
        if not found:
            raise ValueError(
                f"step {number} was written by another library ({there[-1].format}), and xckpt "
                f"does not delete it: {self.path(there[-1])}"
            )
        if linked := [self.path(each) for each in found if each.linked]:
            raise ValueError(
                f"step {number} is a symbolic link: remove the link {linked[0]}, or delete the "
                f"step that it points to"
            )
        if self._good and all(each in found for each in self._good):
            raise ValueError(
                f"step {number} is the only good checkpoint in {self.kept.location}: "
                f"xckpt.delete({self.path(found[-1])!r}) deletes it nevertheless"
            )
        with operation(self.group, "delete of its CheckpointManager"):
            broadcast(self.group, f"delete step {number}", lambda: self._delete(found))
        self.look()

    def _delete(self, found: Iterable[StepRecord]) -> bytes:
        for deleting in [self.remove(record) for record in found]:
            deleting.result()
        return b""

    def collect(self) -> None:
        """Remove in the background what killed saves and deletions have left in the roots."""
        self._collected = time.monotonic()
        times = [record.time for record in self.records if record.time is not None]
        for root in self.roots if self.is_coordinator else ():
            root.collect(next(iter(times[-1:]), None))

    def wait(self) -> None:
        """Return when all is deleted, or could not be."""
        for root in self.roots:
            root.remover.wait()


def key_of(record: StepRecord) -> tuple[bool, str]:
    """A key of a step, unique in the run."""
    return record.temporary, record.name


def no_such_step(folder: RunFolder, number: int) -> NotACheckpointError:
    """The error for a step that is not there."""
    numbers = [str(number) for number in sorted({each.number for each in folder.all})]
    shown = numbers if len(numbers) < 9 else [*numbers[:3], "...", *numbers[-3:]]
    there = f"its steps are {', '.join(shown)}" if numbers else "it holds no step yet"
    return NotACheckpointError(f"{folder.kept.location} has no step {number}: {there}")


def no_steps(folder: RunFolder) -> NotACheckpointError:
    """The error for a root without steps."""
    where = " on every rank" if folder.group.size > 1 else ""
    return NotACheckpointError(
        f"{folder.kept.location} holds no step yet; pass default={where} to begin without one"
    )
