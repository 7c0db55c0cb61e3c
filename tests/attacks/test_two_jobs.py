"""Two jobs that know nothing of each other use one path or one root at once, time and again.

Each call is success or an error of xckpt; what loads is whole, and of one job; nothing stays.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import results
from tests.attacks.victim import Outcome, attempt, outcome
from xckpt.convert import convert
from xckpt.policies import EverySteps, Latest

SAID = ("CheckpointExistsError", "CheckpointReplacedError", "StorageError", "NotACheckpointError")
"""What the one that comes second may hear."""


def state(job: int, number: int) -> dict[str, Any]:
    mark = 100_000 * job + number
    return {f"w{n}": np.full((32, 64), mark, np.int32) for n in range(4)} | {"mark": mark}


def whole(loaded: dict[str, Any]) -> int:
    """The mark of a state, which all of its leaves have."""
    marks = {int(each) for leaf in loaded.values() for each in np.unique(leaf)}
    assert len(marks) == 1, f"a mixture: {marks}"
    return marks.pop()


def saves(path: str, job: int, seconds: float, size: int) -> dict[str, int]:
    """A job of some ranks overwrites a path; how often it heard what."""
    heard: dict[str, int] = {}
    until, number = time.monotonic() + seconds, 0

    def on_rank(group: Any) -> str:
        made = outcome(xckpt.save, path, state(job, number), overwrite=True, group=group)
        assert made.kind in ("done", *SAID, "RanksFailedError"), (made.kind, made.text)
        assert "Traceback" not in made.text
        return made.kind

    while time.monotonic() < until:
        kinds = results(size, on_rank) if size > 1 else [on_rank(xckpt.LocalGroup())]
        assert len(set(kinds)) == 1, kinds
        heard[kinds[0]] = heard.get(kinds[0], 0) + 1
        number += 1
    return heard


def other_calls(path: str, job: int, seconds: float, size: int) -> dict[str, int]:
    """A job copies to the path, converts to it, deletes what is there and collects leftovers."""
    heard: dict[str, int] = {}
    source = f"{path}-source-{job}"
    xckpt.save(source, state(job, 0))
    above = os.path.dirname(path) if "://" not in path else path.rpartition("/")[0]
    calls: list[Callable[[], object]] = [
        lambda: xckpt.copy(source, path, overwrite=True),
        lambda: convert(source, path, overwrite=True),
        lambda: xckpt.delete(path),
        lambda: xckpt.gc(above),
        lambda: whole(xckpt.load(path)),
        lambda: xckpt.save(path, state(job, 1)),
    ]
    until, chosen = time.monotonic() + seconds, random.Random(job)
    while time.monotonic() < until:
        number = chosen.randrange(len(calls))
        made = outcome(calls[number])
        assert made.kind in ("done", *SAID), (number, made.kind, made.text)
        heard[made.kind] = heard.get(made.kind, 0) + 1
    xckpt.delete(source)
    return heard


def at_once(*calls: tuple[Any, ...], seconds: float) -> list[Outcome]:
    """Calls in processes of their own, with hash seeds of their own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        made = [threads.submit(attempt, *call, seconds=seconds + 60) for call in calls]
        ended = [each.result() for each in made]
    for each in ended:
        assert each.kind == "done", (each.kind, each.text)
        assert each.value.get("done"), each.value
    return ended


SECONDS = [1.0, pytest.param(12.0, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize(
    "other", [saves, pytest.param(other_calls, marks=pytest.mark.thorough)], ids=["saves", "others"]
)
def test_two_jobs_at_one_path(tmp_path: Path, other: Any, seconds: float) -> None:
    path = str(tmp_path / "ckpt")
    at_once((saves, path, 1, seconds, 2), (other, path, 2, seconds, 3), seconds=seconds)
    if xckpt.exists(path):
        assert xckpt.open(path).verify() == []
        assert whole(xckpt.load(path)) // 100_000 in (1, 2)
    xckpt.save(path, state(3, 0), overwrite=True)
    assert os.listdir(tmp_path) == ["ckpt"]


def trains(root: str, job: int, seconds: float, own: bool) -> dict[str, int]:
    """A run saves steps, restores and deletes; of ``own`` numbers, or of those of the other."""
    heard: dict[str, int] = {}
    until, step = time.monotonic() + seconds, job
    while time.monotonic() < until:

        def a_life(first: int = step) -> None:
            with xckpt.CheckpointManager(root, save=[EverySteps(1)], keep=[Latest(2)]) as run:
                for number in range(first, first + 6, 2 if own else 1):
                    run.save(number, state(job, number))
                found = run.restore(default=None)
                assert found is None or whole(found) > 0

        made = outcome(a_life)
        assert made.kind in ("done", *SAID), (made.kind, made.text)
        heard[made.kind] = heard.get(made.kind, 0) + 1
        step += 6
    return heard


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("own", [True, False], ids=["steps of its own", "the same steps"])
def test_two_managers_on_one_root(tmp_path: Path, own: bool, seconds: float) -> None:
    root = str(tmp_path / "run")
    at_once((trains, root, 1, seconds, own), (trains, root, 2, seconds, own), seconds=seconds)
    with xckpt.CheckpointManager(root, save=[EverySteps(1)], keep=[Latest(2)]) as run:
        steps = run.steps()
        assert steps and all(xckpt.open(run.path(each.number)).verify() == [] for each in steps)
        assert whole(run.restore()) % 100_000 == steps[-1].number
        run.save(50_000, state(3, 0))
        run.wait()
        assert [each.number for each in run.steps()] == [steps[-1].number, 50_000]
    left = sorted(os.listdir(root))
    assert left == [f"step-{steps[-1].number:08}", "step-00050000"]
