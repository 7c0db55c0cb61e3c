"""Runs of random steps, failing saves, damage, strangers and restarts: no promise is broken.

The promises are those of docs/runs.md:

1. At the moment at which a step is deleted, a step that was saved after it is committed and whole.
2. A restore gives the newest whole step, names the damaged ones above it, and nothing else.
3. What the policies keep of the whole steps is there after each wait.
4. A save that fails leaves what was there, and is raised once.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.run.keeping import kept
from xckpt.core.run.policies import KeepPolicy
from xckpt.policies import Best, EverySteps, Latest
from xckpt.storage import run_steps
from xckpt.storage.commit.remove import Hidden
from xckpt.storage.location import Location, open_store
from xckpt.storage.write_checkpoint import ZarrStorageWriter

_roots = itertools.count()
KEEPING: list[list[KeepPolicy]] = [
    [Latest(1)],
    [Latest(2), EverySteps(4)],
    [Best("loss", 1)],
    [lambda records: ()],
]
OPERATIONS = st.sampled_from(["save", "save", "save", "fail", "damage", "restart", "delete"])


class Run:
    """A root, what is whole in it, and the manager that works there."""

    def __init__(self, keep: list[KeepPolicy]) -> None:
        self.root = f"memory://promises-{next(_roots)}"
        self.keep = keep
        self.whole: set[int] = set()
        self.order: list[int] = []
        self.fails = False
        self.early: list[int] = []
        self.manager = self.start()
        self.step = 0

    def start(self) -> xckpt.CheckpointManager:
        return xckpt.CheckpointManager(self.root, save=[EverySteps(1)], keep=self.keep)

    def there(self) -> set[int]:
        return set(run_steps.committed_steps(Location.parse(self.root)).values())

    def do(self, operation: str) -> None:
        getattr(self, operation)()
        self.manager.wait()
        assert not self.early, f"{self.early} were deleted before they had a successor"
        assert not self.whole or self.whole & self.there()

    def save(self) -> None:
        step, self.step = self.step, self.step + 1
        state = {"w": np.full(4, float(step)), "step": step}
        assert self.manager.save(step, state, {"loss": (step * 7) % 5})
        self.order.append(step)
        self.whole.add(step)
        self.manager.wait()
        records = [each for each in self.manager.steps() if each.number in self.whole]
        assert kept(records, self.keep) <= self.there() and step in self.there()
        self.whole &= self.there()

    def fail(self) -> None:
        before, self.fails = self.there(), True
        self.manager.save(self.step, {"w": np.zeros(4), "step": -1})
        with pytest.raises(xckpt.StorageError, match="no space"):
            self.manager.wait()
        self.fails = False
        self.manager.wait()
        assert self.there() == before

    def damage(self) -> None:
        if self.whole:
            newest = max(self.whole)
            store = open_store(Location.parse(self.manager.path(newest)))
            # In a generation, if the step was replaced.
            [key] = [key for key in store.list().result() if key.endswith(b"w/c/0")]
            store.write(key, b"\1" * len(store.read(key).result().value)).result()
            self.whole.discard(newest)
            self.restart()

    def restart(self) -> None:
        self.manager = self.start()
        damaged = [step for step in self.there() if step > max(self.whole, default=-1)]
        like: Any = {"w": np.zeros(4), "step": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if damaged and not self.whole:
                with pytest.raises(xckpt.CorruptCheckpointError):
                    self.manager.restore(like, default=like)
                self.step = self.manager.next_step
                return
            found = self.manager.restore(like, default={"w": like["w"], "step": -1})
        assert found["step"] == max(self.whole, default=-1)
        assert [each.number for each in self.manager.skipped] == sorted(damaged, reverse=True)
        self.step = self.manager.next_step

    def delete(self) -> None:
        if len(self.whole) > 1:
            xckpt.delete(self.manager.path(min(self.whole)))
            self.whole.discard(min(self.whole))


def runs_on(keep: list[KeepPolicy], operations: list[str]) -> None:
    run = Run(keep)
    remove, write = run_steps.hide_checkpoint, ZarrStorageWriter.write_data

    def removed(place: Location, *given: Any) -> Hidden:
        step = int(place.path[-8:])
        later = run.order[len(run.order) - run.order[::-1].index(step) :]
        if not set(later) & run.there() & run.whole:
            run.early.append(step)
        return remove(place, *given)

    def written(self: ZarrStorageWriter, *arguments: Any) -> object:
        if run.fails:
            raise xckpt.StorageError("no space")
        return write(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_steps, "hide_checkpoint", removed)
        patch.setattr(ZarrStorageWriter, "write_data", written)
        for operation in operations:
            run.do(operation)
        run.restart()


@examples(15)
@given(st.sampled_from(KEEPING), st.lists(OPERATIONS, max_size=14))
def test_no_promise_is_broken(keep: list[KeepPolicy], operations: list[str]) -> None:
    runs_on(keep, operations)


def test_a_manager_that_deletes_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the promises are for: they notice a deletion before the commit."""
    from xckpt.api.run.saves import RunSaves

    begin = RunSaves.begin

    def early(self: RunSaves, *arguments: Any) -> None:
        for record in self.folder.records:
            self.folder.remove(record).result()
        begin(self, *arguments)

    monkeypatch.setattr(RunSaves, "begin", early)
    with pytest.raises(AssertionError, match="before they had a successor"):
        runs_on([Latest(1)], ["save", "save"])


def test_a_failure_for_which_two_threads_wait_is_raised_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, goes_on = Run([Latest(1)]).manager, threading.Event()
    raised: list[xckpt.StorageError] = []

    def fail(*arguments: object) -> object:
        goes_on.wait(30)
        raise xckpt.StorageError("no room")

    def wait() -> None:
        try:
            run.wait()
        except xckpt.StorageError as error:
            raised.append(error)

    monkeypatch.setattr(ZarrStorageWriter, "write_data", fail)
    run.save(0, {"w": np.zeros(3)})
    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    threading.Timer(0.1, goes_on.set).start()  # when both wait
    for thread in threads:
        thread.join()
    assert [str(each).partition("\n")[0] for each in raised] == ["no room"]
