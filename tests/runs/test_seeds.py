"""Random runs: saves, failures, damage, deletions, signals, kills and restarts break no promise.

A seed draws all of a run: its policies, its lives, what is done in each and how each ends. The
promises are those of docs/runs.md; `tests.runs.world` compares.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import xckpt
from tests.runs.killed import live_and_be_killed
from tests.runs.life import Life, Operation, Place, failing_disk, on_threads, plan
from tests.runs.world import World
from tests.support.servers import environment, gcs, s3
from xckpt.api.run import folder, restore
from xckpt.api.run.reading import RunReading
from xckpt.api.run.saves import RunSaves
from xckpt.core.run.policies import KeepPolicy
from xckpt.core.run.record import StepRecord
from xckpt.policies import All, Best, EverySteps, Latest

__all__ = ["environment", "gcs", "s3"]


def nothing(records: Sequence[StepRecord]) -> list[int]:
    """A policy that keeps no step."""
    return []


KEEPING: list[list[KeepPolicy]] = [
    [Latest(1)],
    [Latest(2), EverySteps(8)],
    [Best("loss", 1)],
    [Latest(1), Best("loss", 2, mode="max")],
    [nothing],
    [All()],
]
_roots = itertools.count()


def run_by(
    seed: int,
    root: str,
    *,
    size: int,
    lives: int,
    operations: int,
    kills: bool = False,
    steps: int = 0,
) -> None:
    """A run of some lives, and of more until so many steps were trained.

    Where there are several ranks, the first life has all of them, and the next any number.
    """
    draw = random.Random(seed)
    keep, every = draw.choice(KEEPING), draw.choice([1, 5, 20])
    worlds = [World(root, keep) for _ in range(size)]
    ranks = size
    trained = 0

    def live(place: Place, number: int, operations: Sequence[Operation]) -> None:
        nonlocal trained
        life = Life(worlds[place.rank], place, number, every)
        life.live(operations)
        trained += life.saves if place.rank == 0 else 0

    with failing_disk(), warnings.catch_warnings():
        # Of damaged steps; every thread that sets this for itself would undo it for others.
        warnings.simplefilter("ignore", UserWarning)
        for number in itertools.count(1):
            if number > lives and trained >= steps:
                break
            done = plan(draw, operations)
            on_threads(ranks, partial(live, number=number, operations=done))
            if kills and draw.random() < 0.5:
                live_and_be_killed(draw, worlds[0], number + 1000, every, ranks)
            ranks = draw.randint(1, size)
            for world in worlds[1:]:
                world.good, world.bad = dict(worlds[0].good), set(worlds[0].bad)
                world.begun, world.last = {}, worlds[0].last


def in_memory() -> str:
    return f"memory://seeds-{next(_roots)}"


# Fifty seeds: in memory, on files and in buckets, on one rank and three; two of them with kills.
@pytest.mark.parametrize("seed", range(40))
def test_a_run_in_memory(seed: int) -> None:
    run_by(seed, in_memory(), size=1 + seed % 2 * 2, lives=2, operations=4)


@pytest.mark.parametrize("seed", range(40, 48))
def test_a_run_on_files(seed: int, tmp_path: Path) -> None:
    kills = seed in (41, 42)
    run_by(seed, str(tmp_path / "run"), size=1 + seed % 2 * 2, lives=2, operations=4, kills=kills)


@pytest.mark.parametrize("seed", range(48, 50))
@pytest.mark.parametrize("bucket", ["s3", "gcs"])
def test_a_run_in_a_bucket(bucket: str, seed: int, request: pytest.FixtureRequest) -> None:
    root = f"{request.getfixturevalue(bucket)}/seeds-{seed}"
    run_by(seed, root, size=1 + seed % 2 * 2, lives=2, operations=2)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_runs(block: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Fifty each, on one rank and more: ten blocks on files, seven with kills, three in buckets."""
    bucket = request.getfixturevalue("gcs" if block == 19 else "s3") if block >= 17 else ""
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        root = f"{bucket}/seeds-{seed}" if bucket else str(tmp_path / str(seed))
        operations = 5 if bucket else 10
        size = 1 + seed % 2 * 2
        run_by(seed, root, size=size, lives=2, operations=operations, kills=block >= 10)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("place", ["files", "bucket"])
def test_a_run_of_a_thousand_steps(
    place: str, size: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bucket = place == "bucket"
    root = f"{request.getfixturevalue('s3')}/long-{size}" if bucket else str(tmp_path / "run")
    run_by(7 + size, root, size=size, lives=4, operations=10, kills=not bucket, steps=1000)


def deletes_first(patch: pytest.MonkeyPatch) -> None:
    begin = RunSaves.begin

    def early(self: RunSaves, *arguments: Any) -> None:
        for record in self.folder.look()[-1:]:
            self.folder.remove(record).result()
        begin(self, *arguments)

    patch.setattr(RunSaves, "begin", early)


def caches_latest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunReading, "latest", functools.cache(RunReading.latest))


def swallows_failures(patch: pytest.MonkeyPatch) -> None:
    settle = RunSaves.settle

    def silent(self: RunSaves) -> None:
        with contextlib.suppress(xckpt.StorageError):
            settle(self)

    patch.setattr(RunSaves, "settle", silent)


def deletes_the_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(folder, "deletable", lambda records, policies: [*records])
    keep = folder.RunFolder.keep
    other = StepRecord(10**9)
    patch.setattr(folder.RunFolder, "keep", lambda self, rules, _: keep(self, rules, other))


def never_falls_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore, "is_damage", lambda *_: False)


def names_no_skipped(patch: pytest.MonkeyPatch) -> None:
    restored = restore.Restored
    patch.setattr(restore, "Restored", lambda state, record, skipped: restored(state, record, ()))


FAULTS = [
    deletes_first,
    caches_latest,
    swallows_failures,
    deletes_the_last,
    never_falls_back,
    names_no_skipped,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_manager_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    found = (AssertionError, pytest.fail.Exception, xckpt.XckptError)
    with pytest.raises(found):
        some_runs()


def some_runs() -> None:
    for seed in range(0, 20, 2):
        run_by(seed, in_memory(), size=1, lives=2, operations=4)
