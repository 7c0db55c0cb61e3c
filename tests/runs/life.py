"""A life of a run: from the start of its processes to their end, by a plan that a seed has drawn.

`live` is what each rank does. Whatever the ranks say at a step is compared between them, and what
they find with a `World`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, _Table, results
from tests.runs.world import World, restored, state_of, tag_of
from xckpt.policies import EverySteps, OnPreemption
from xckpt.storage.write_checkpoint import ZarrStorageWriter

Operation = tuple[str, int]
"""What is done, and a number for all that is random in it."""

WEIGHTS = {
    "train": 8, "force": 3, "fail": 2, "damage": 2, "delete": 1, "vanish": 1, "wait": 2,
    "read": 1, "restore": 1, "should": 1, "signal": 1,
}  # fmt: skip

FAILING: set[str] = set()
"""Folder names of steps that cannot be written, by this process."""


@dataclass(frozen=True)
class Place:
    """A rank, and how it learns what the others say."""

    rank: int = 0
    size: int = 1
    group: Any = None
    meet: Callable[[object], list[Any]] = lambda mine: [mine]


def plan(draw: random.Random, operations: int) -> list[Operation]:
    """Operations of a life."""
    names = draw.choices([*WEIGHTS], [*WEIGHTS.values()], k=operations)
    return [(name, draw.randrange(1 << 30)) for name in names]


@contextmanager
def failing_disk() -> Any:
    """Saves of the steps in `FAILING` fail."""
    write = ZarrStorageWriter.write_data
    FAILING.clear()

    def fail(self: ZarrStorageWriter, *arguments: Any) -> object:
        if os.path.basename(str(self.target)) in FAILING:
            raise xckpt.StorageError("no space left on device")
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZarrStorageWriter, "write_data", fail)
        yield


class Life:
    """One rank of a run while its processes live."""

    def __init__(self, world: World, place: Place, number: int, every: int) -> None:
        self.world, self.place, self.number, self.every = world, place, number, every
        save = [EverySteps(every), OnPreemption()]
        self.manager = xckpt.CheckpointManager(
            world.root, save=save, keep=world.keep, group=place.group
        )
        self.step = 0
        self.saves = 0
        self.ended = False
        self.reader: Callable[[], None] | None = None

    def live(self, operations: Sequence[Operation]) -> None:
        """Restore, and do all of it; then end as a loop ends."""
        if threading.current_thread() is not threading.main_thread():
            self.whole_life(operations)
            return
        before = signal.signal(signal.SIGTERM, lambda number, _: None)
        try:
            self.whole_life(operations)
        finally:
            signal.signal(signal.SIGTERM, before)

    def whole_life(self, operations: Sequence[Operation]) -> None:
        with self.manager:
            self.agree(self.restore(0))
            for name, number in operations:
                self.agree((name, getattr(self, name)(number)))
                if self.ended:
                    break
        self.world.commit()
        self.look()

    def agree(self, mine: object) -> None:
        """All ranks have done, seen and found the same."""
        said = self.place.meet((mine, self.step, self.manager.preempted, dict(self.world.good)))
        assert all(each == said[0] for each in said), f"the ranks differ: {said}"

    def look(self) -> None:
        """Nothing goes on: compare with the storage, on one rank."""
        records, latest = self.manager.steps(), self.manager.latest()
        if self.place.rank == 0:
            self.world.look(records, None if latest is None else latest.number)
        good, bad = self.place.meet((dict(self.world.good), set(self.world.bad)))[0]
        self.world.good, self.world.bad = dict(good), set(bad)

    def save(self, force: bool = False) -> bool:
        """One step of training."""
        self.saves += 1
        tag = self.number * 10_000 + self.saves
        self.world.announce(self.step, tag)
        state = state_of(tag, self.place.rank, self.place.size)
        # The other ranks' losses are not those that count.
        metrics = {"loss": (self.step * 7 + self.place.rank) % 5}
        due = self.manager.save(self.step, state, metrics, force=force)
        if due:
            self.world.begin(self.step, tag)
        self.step += 1
        return due

    # Operations: what they return, all ranks return.

    def train(self, number: int) -> list[bool]:
        return [self.save() for _ in range(1 + number % (3 * self.every))]

    def force(self, number: int) -> bool:
        assert self.save(force=True)
        return True

    def wait(self, number: int = 0) -> None:
        self.manager.wait()
        self.world.commit()
        self.place.meet(None)
        self.look()

    def should(self, number: int) -> bool:
        due = self.manager.should_save(self.step)
        assert self.save() == due
        return due

    def fail(self, number: int) -> str:
        """A save fails: the next call raises it, and the one after it does not."""
        self.wait()
        name = f"step-{self.step:08d}"
        if self.place.meet(self.manager.path(self.step))[0].endswith(name):
            FAILING.add(name)
            before = dict(self.world.good), set(self.world.bad), self.world.last
            self.save(force=True)
            self.world.begun = {}
            call = self.manager.wait if number % 2 else partial(self.save, force=True)
            with pytest.raises(xckpt.StorageError, match="no space left") as caught:
                call()
            self.world.begun = {}
            assert "does not count as the last save" in caught.value.__notes__[-1]
            self.place.meet(None)
            FAILING.discard(name)
            assert before == (self.world.good, self.world.bad, self.world.last)
            self.step += number % 3
            self.wait()
        return type(self.world.last).__name__

    def damage(self, number: int) -> object:
        """A step is damaged, often the newest: the newest good one is restored."""
        self.wait()
        if not self.world.good:
            return None
        step = self.world.newest if number % 4 else random.Random(number).choice([*self.world.good])
        assert step is not None
        if self.place.rank == 0:
            self.world.damage(step, number)
        self.world.lose(step, damaged=True)
        self.place.meet(None)
        self.manager.reload()
        return self.restore(number)

    def restore(self, number: int) -> object:
        """Go on from the newest good step."""
        self.world.commit()
        found = restored(self.manager, self.world, self.place.rank, self.place.size)
        if found[0] is not None:
            self.step = self.manager.next_step
        return found

    def delete(self, number: int) -> int | None:
        """By hand: any step but the only good one."""
        self.wait()
        if not self.world.good:
            return None
        step = random.Random(number).choice(sorted(self.world.good))
        if len(self.world.good) == 1 and not self.world.bad:
            with pytest.raises(ValueError, match="the only good checkpoint"):
                self.manager.delete(step)
            return None
        if len(self.world.good) > 1:
            self.manager.delete(step)
            self.world.lose(step, damaged=False)
            self.wait()
        return step

    def vanish(self, number: int) -> int | None:
        """Somebody else deletes a step."""
        self.wait()
        step = random.Random(number).choice([None, *sorted(self.world.good)])
        if step is not None:
            if self.place.rank == 0:
                xckpt.delete(self.manager.path(step))
            self.place.meet(None)
            self.world.lose(step, damaged=False)
            self.wait()
        return step

    def read(self, number: int) -> None:
        """A reader that began earlier ends; another begins."""
        if self.place.rank:
            return
        rest, self.reader = self.reader, None
        if rest is not None:
            rest()
        if self.world.last is not None:
            self.reader = reader(self.manager.path(self.world.last), self.world.last, self.world)

    def signal(self, number: int) -> None:
        """One rank is asked to end: all save this step, and stop."""
        self.wait()
        if number % self.place.size == self.place.rank:
            if threading.current_thread() is threading.main_thread():
                signal.raise_signal(signal.SIGTERM)
            else:
                self.manager._saves.signal._note(signal.SIGTERM, None)
        self.place.meet(None)
        # What another rank than the first knows is asked for a few times a second.
        saved = False
        for _ in range(500):
            saved = self.save()
            if self.manager.preempted:
                break
            time.sleep(0.005)
        assert saved and self.manager.preempted
        self.ended = True


def reader(path: str, step: int, world: World) -> Callable[[], None]:
    """Begin to read a step; the rest ends with the step, or by its deletion, or fails."""
    gone = xckpt.CheckpointReplacedError, xckpt.NotACheckpointError
    try:
        stored = xckpt.open(path)
    except gone:
        return lambda: None

    def rest() -> None:
        try:
            ranks = [f"rank{rank}" for rank in range(cast(int, stored["size"]))]
            leaves = ["rows", "w", *(f"own/{rank}" for rank in ranks)]
            arrays = {leaf: np.asarray(cast(Any, stored[leaf])[...]) for leaf in leaves}
        except gone:
            return
        except xckpt.CorruptCheckpointError:
            assert step in world.bad, "a sound step is called corrupt"
            return
        own = {rank: arrays.pop(f"own/{rank}") for rank in ranks}
        values = {"own": own, "tag": stored["tag"], "size": len(ranks)}
        assert tag_of({**arrays, **values}) >= 0, "a reader has read a mixture"

    return rest


@dataclass(frozen=True, slots=True)
class RankThread(ThreadGroup):
    """A rank that is a thread, with connections of its own for background saves."""

    background: Any = None

    def in_background(self) -> ThreadGroup:
        return ThreadGroup(self.rank, self.background, self.coordinator)


def on_threads(size: int, function: Callable[[Place], None]) -> None:
    """Call ``function`` on ranks that are threads; on one, in this one."""
    if size == 1:
        function(Place())
        return
    background, meeting = _Table(size), _Table(size)

    def rank(group: ThreadGroup) -> None:
        mine = RankThread(group.rank, group.table, 0, background)
        try:
            function(Place(group.rank, size, mine, partial(meeting.meet, group.rank)))
        except BaseException:
            background.leave()
            meeting.leave()
            raise

    results(size, rank)
