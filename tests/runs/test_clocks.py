"""Clocks that jump, an hour back or a day ahead: no save waits long, nothing that lives goes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, gcs, new_place, s3
from xckpt.core.manifest.own_keys import GENERATIONS
from xckpt.policies import EveryMinutes, EverySteps, Latest
from xckpt.storage.location import Location, open_store
from xckpt.storage.write_checkpoint import ZarrStorageWriter

__all__ = ["environment", "gcs", "s3"]

HOUR, DAY = 3600.0, 86400.0
_roots = itertools.count()


@pytest.fixture(params=["folder", "memory", "s3", "gcs"])
def root(request: pytest.FixtureRequest) -> str:
    return new_place(request)


class Clock:
    """The clock of this host, as the tests set it."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._real = time.time

    def now(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock.now)
    return clock


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(6, float(step)), "own": xckpt.PerRank(np.full(3, step))}


def numbers(found: list[xckpt.StepRecord]) -> list[int]:
    return [record.number for record in found]


def test_a_clock_that_jumps_costs_a_save_and_no_step(root: str, clock: Clock) -> None:
    """Every ten minutes a step, every half hour a save; each jump is followed by one at once."""
    jumps = {4: -HOUR, 8: DAY, 12: -DAY, 16: -DAY}
    keep = [EveryMinutes(60), Latest(1)]
    with xckpt.CheckpointManager(root, save=EveryMinutes(30), keep=keep) as checkpoints:
        saved = []
        for step in range(20):
            clock.ahead += 600 + jumps.get(step, 0.0)
            saved += [step] if checkpoints.save(step, state_of(step)) else []
        assert saved == [2, 4, 8, 11, 12, 15, 16, 19]
    again = xckpt.CheckpointManager(root)
    assert numbers(again.steps()) == [2, 4, 8, 12, 16, 19]
    assert again.restore()["w"][0] == 19.0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Saves in the background write, say so, and wait before they commit."""
    write, written, goes_on = ZarrStorageWriter.write_data, threading.Event(), threading.Event()

    def wait(self: ZarrStorageWriter, *arguments: Any) -> object:
        found = write(self, *arguments)
        written.set()
        assert goes_on.wait(60)
        return found

    monkeypatch.setattr(ZarrStorageWriter, "write_data", wait)
    yield written, goes_on
    goes_on.set()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("ahead", [-DAY, 3 * DAY])
def test_a_run_elsewhere_with_another_clock_removes_nothing_that_is_being_saved(
    root: str,
    clock: Clock,
    held: tuple[threading.Event, threading.Event],
    step: int,
    ahead: float,
) -> None:
    """A new step, and one that is replaced."""
    written, goes_on = held
    goes_on.set()
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1))
    checkpoints.save(0, state_of(0))
    checkpoints.wait()
    goes_on.clear()
    written.clear()
    checkpoints.save(step, state_of(7), force=True)
    assert written.wait(60)
    clock.ahead = ahead
    with xckpt.CheckpointManager(root) as other:
        assert numbers(other.steps()) == [0]
    clock.ahead = 0.0
    goes_on.set()
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [step]
    assert xckpt.open(checkpoints.path(step)).verify() == []
    assert xckpt.load(checkpoints.path(step))["w"][0] == 7.0


def test_by_age_nothing_goes_whose_owner_is_known_to_live(
    tmp_path: Path, clock: Clock, held: tuple[threading.Event, threading.Event]
) -> None:
    written, goes_on = held
    checkpoints = xckpt.CheckpointManager(tmp_path, save=EverySteps(1))
    checkpoints.save(0, state_of(0))
    assert written.wait(60)
    for clock.ahead in (0.0, DAY, -DAY):
        [left] = xckpt.gc(tmp_path, older_than=0.0)
        assert (left.owner, left.removed) == ("alive", False)
        assert left.age is not None and (left.age >= DAY if clock.ahead > 0 else left.age < HOUR)
    clock.ahead = 0.0
    goes_on.set()
    checkpoints.wait()
    assert xckpt.open(checkpoints.path(0)).verify() == []


@pytest.mark.parametrize("ahead, gone", [(0.0, False), (-HOUR, False), (2 * DAY, True)])
def test_in_a_bucket_gc_goes_by_the_age_that_it_is_given(
    s3: str, clock: Clock, ahead: float, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An identity that says a later time than now is no older than nothing."""
    monkeypatch.setattr("xckpt.storage.commit.collect_keys.let_arrive", lambda: None)
    root = f"{s3}/clocks-{next(_roots)}"
    store = open_store(Location.parse(root))
    identity = f"{int(clock.now()):08x}{0:08x}"
    store.write(f"5/{GENERATIONS}/{identity}/w/c/0", b"x").result()
    clock.ahead = ahead
    [left] = xckpt.gc(root, older_than=DAY)
    assert left.removed is gone and left.age is not None and left.age >= 0.0
    assert bool(store.list().result()) is not gone
