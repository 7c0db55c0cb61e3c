"""Several ranks of one run: whatever each of them sees, all of them decide alike.

Each rank has a clock an hour from that of the next, and a loss of its own, by which another step is
the best. What the ranks say at each step must be equal, and so must be what they raise when a disk
is full, and what they restore after damage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from conformance.implementation import Refused
from conformance.runs.faults import LIMIT, error_of, files_of, full_disk, saved
from conformance.runs.manager import EVERY, Keep, Manager, Ranked, Run, state_of, whole_steps

__all__ = ["agreeing"]

SIZE = 3
HOUR = 3600.0
STEPS = range(6)


class _Clocks:
    """`time.time` with an offset for each thread that is a rank."""

    def __init__(self) -> None:
        self._offsets: dict[int, float] = {}
        self._time = time.time

    def set(self, seconds: float) -> None:
        self._offsets[threading.get_ident()] = seconds

    def __call__(self) -> float:
        return self._time() + self._offsets.get(threading.get_ident(), 0.0)


_clocks = _Clocks()


def agreeing(manager: Manager, folder: Path) -> Iterator[str]:
    """Runs that keep the newest, the best, or nothing; a full disk; a damaged newest step."""
    if not isinstance(manager, Ranked):
        raise Refused("it is judged on one rank alone")
    with mock.patch("time.time", _clocks):
        for number, keep in enumerate((Keep(latest=1), Keep(latest=1, best=1), Keep())):
            root = folder / str(number)
            answers = manager.on_ranks(SIZE, root, keep, _train)
            yield _differing(f"{keep}", answers)
            # By the losses of rank 0 the last step is the best, by those of others the first.
            there = whole_steps(manager, root, STEPS)
            yield "" if there == [STEPS[-1]] else f"{keep}: steps {there} are kept"
        with full_disk():
            answers = manager.on_ranks(SIZE, folder / "full", Keep(latest=1), _fail)
        yield _differing("a full disk", answers)
        root = folder / "damaged"
        _damage_newest(manager, root)
        yield _differing("a damaged newest step", manager.on_ranks(SIZE, root, EVERY, _restore))


def _damage_newest(manager: Manager, root: Path) -> None:
    run = manager.open(root, EVERY)
    saved(run, 0)
    for path in files_of(root, run, 1):
        if path.stat().st_size > LIMIT:
            content = bytearray(path.read_bytes())
            content[LIMIT] ^= 1
            path.write_bytes(content)
    run.close()


def _differing(what: str, answers: Sequence[object]) -> str:
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            return f"{what}: rank 0 says {answers[0]}, rank {rank} says {answer}"
    return ""


def _train(rank: int, run: Run) -> object:
    """Save steps; the losses of rank 0 fall, those of the others rise."""
    _clocks.set(rank * HOUR)
    said: list[object] = []
    for step in STEPS:
        begun = run.save(step, state_of(step), float(step if rank else -step))
        run.wait()
        said.append((begun, run.latest()))
    return said


def _fail(rank: int, run: Run) -> object:
    """Which calls raise, if no save can succeed."""
    _clocks.set(rank * HOUR)
    calls = (
        lambda: run.save(0, state_of(0), 0.0),
        run.wait,
        lambda: run.save(1, state_of(1), 0.0),
        run.wait,
    )
    return [bool(error_of(call)) for call in calls], run.latest()


def _restore(rank: int, run: Run) -> object:
    _clocks.set(rank * HOUR)
    found = run.restore()
    return found and (found.step, sorted(found.skipped)), run.latest()
