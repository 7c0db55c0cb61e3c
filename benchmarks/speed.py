"""Seconds to save and to load, all contenders interleaved in one process.

1. An untimed round saves and loads with every contender and compares every bit; it also pays for
   imports and thread pools.
2. In each timed round, each contender saves into a fresh directory, what it left to the page
   cache is flushed, each of its loads runs, and the directory is deleted.
3. The order rotates from round to round, and every second round runs backwards: the first one
   pays for fresh pages, and none always follows the same neighbour.
4. Before each save, and each load of new arrays, as much memory was used and given back
   (`benchmarks.state.use_memory`), so that new pages cost all contenders the same.
5. A load ends when one element of each page of the result has been read.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks import state
from benchmarks.contender import Contender, Load, State, as_arrays, in_form

Each = TypeVar("Each")


@dataclass(slots=True)
class Times:
    """The seconds of each round for one contender."""

    save: list[float] = field(default_factory=list)
    """From the call to its return."""
    flush: list[float] = field(default_factory=list)
    """To force what was saved to the device after the save."""
    loads: dict[str, list[float]] = field(default_factory=dict)
    """For each way to load, from the call until one element of each page was read."""

    def saved(self) -> float:
        """Median seconds until the checkpoint was on the device."""
        return statistics.median(s + f for s, f in zip(self.save, self.flush, strict=True))

    def loaded(self, name: str) -> float:
        """Median seconds of one way to load."""
        return statistics.median(self.loads[name])


@dataclass(frozen=True, slots=True)
class Arena:
    """The arrays that all contenders share: what is saved, and memory to load into."""

    source: state.Arrays
    target: state.Arrays
    forms: dict[str, State]
    """The source in each form that a contender asked for."""

    @classmethod
    def of(cls, shapes: state.Shapes) -> Arena:
        """Random source arrays and mapped targets of these shapes."""
        return cls(state.random_arrays(shapes), state.empty_arrays(shapes), {})

    def saved_by(self, contender: Contender) -> State:
        """The source in the contender's form."""
        if contender.form not in self.forms:
            self.forms[contender.form] = in_form(self.source, contender.form)
        return self.forms[contender.form]

    def loaded_by(self, contender: Contender, load: Load) -> State:
        """What the load is given: the targets, or for a fresh load the source as a pattern."""
        return self.saved_by(contender) if load.fresh else in_form(self.target, contender.form)


@contextmanager
def fresh_directory(parent: Path) -> Iterator[Path]:
    """A new directory under ``parent`` that is deleted afterwards."""
    directory = parent / "checkpoint"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def flush(directory: Path) -> None:
    """Force every file and directory under ``directory`` to the device.

    By one call for the file system where there is one: a walk over 1,700 files and directories
    takes 15 ms of Python, which no contender has caused.
    """
    if sys.platform == "linux":
        descriptor = os.open(directory, os.O_RDONLY)
        failed = ctypes.CDLL(None, use_errno=True).syncfs(descriptor)
        os.close(descriptor)
        if failed:
            raise OSError(ctypes.get_errno(), f"{directory} cannot be flushed")
        return
    for root, _, names in os.walk(directory):
        for path in [root, *(os.path.join(root, name) for name in names)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long some work takes, garbage collected before."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _load_and_touch(directory: Path, load: Load, given: State) -> None:
    state.touch(as_arrays(load.run(directory, given)))


def verify(contender: Contender, arena: Arena, parent: Path) -> list[str]:
    """Save and load once, untimed; return what came back wrong, one line each."""
    wrong: list[str] = []
    with fresh_directory(parent) as directory:
        contender.save(directory, arena.saved_by(contender))
        for load in contender.loads:
            state.clear(arena.target)
            loaded = as_arrays(load.run(directory, arena.loaded_by(contender, load)))
            differing = state.differing(loaded, arena.source)
            wrong += [f"{contender.name}, {load.name}: {name} differs" for name in differing]
    return wrong


def measure(contender: Contender, arena: Arena, parent: Path, times: Times) -> None:
    """Time one save and each load of one contender, and append the seconds."""
    source = arena.saved_by(contender)
    shapes = {name: array.shape for name, array in arena.source.items()}
    with fresh_directory(parent) as directory:
        state.use_memory(shapes)
        times.save.append(seconds_of(lambda: contender.save(directory, source)))
        times.flush.append(seconds_of(lambda: flush(directory)))
        for load in contender.loads:
            given = arena.loaded_by(contender, load)
            if load.fresh:
                state.use_memory(shapes)
            seconds = seconds_of(partial(_load_and_touch, directory, load, given))
            times.loads.setdefault(load.name, []).append(seconds)


def order(contenders: Sequence[Each], number: int, rounds: int) -> list[Each]:
    """Return the contenders in the order of one round: rotated, odd rounds reversed."""
    start = number * max(1, len(contenders) // rounds) % len(contenders)
    rotated = [*contenders[start:], *contenders[:start]]
    return rotated[::-1] if number % 2 else rotated


def run(
    contenders: Sequence[Contender],
    arena: Arena,
    parent: Path,
    rounds: int,
    tell: Callable[[str], None],
) -> dict[str, Times]:
    """Verify every contender, then time all of them in ``rounds`` rounds of rotating order.

    Raises:
        RuntimeError: a contender returned other data than it saved.
    """
    for contender in contenders:
        tell(f"verify {contender.name}")
        wrong = verify(contender, arena, parent)
        if wrong:
            raise RuntimeError("\n".join(wrong[:20]))
    times = {contender.name: Times() for contender in contenders}
    for number in range(rounds):
        for contender in order(contenders, number, rounds):
            tell(f"round {number + 1} of {rounds}: {contender.name}")
            measure(contender, arena, parent, times[contender.name])
    for contender in contenders:
        contender.release()
    return times
