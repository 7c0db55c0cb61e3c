"""Carrying out units: in this process's threads, or by the jobs of any executor.

1. An `Output` writes what a unit has made, durably, and reports what it wrote.
2. `run_here` makes units in threads, within a budget of memory.
3. `run_elsewhere` gives each unit to an executor as a `Job`, which pickles: the process that runs
   it opens the source once and keeps it for the next.
4. Each unit's report goes to ``note`` when the unit is durable, so that it need not be done again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.units.make import make
from xckpt.convert.units.unit import WorkUnit
from xckpt.errors import StorageError
from xckpt.storage.budget import Pool, ProgressCounter

Numbered = tuple[int, WorkUnit]
"""A unit and its number among all of the conversion's."""

Note = Callable[[int, bytes], None]
"""Takes the number and the report of a unit that is durably written."""


class Output(Protocol):
    """Where units are written; pickles, so that it can go along with a job."""

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write the parts of a unit, durably, and report what was written."""
        ...

    def only(self, unit: WorkUnit) -> Output:
        """What is needed of this output for one unit."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One unit to be made by some process."""

    conversion: Conversion
    source: bytes
    """The source's identity, so that a worker does not read another source."""
    unit: WorkUnit
    output: Output

    def run(self, opened: Opened) -> bytes:
        """Make the unit and write it; returns the report."""
        return self.output.write(self.unit, make(opened.resolved, opened.source, self.unit.parts))


def run_job(job: Job) -> bytes:
    """Run a job in a process that may have run others before."""
    return job.run(_opened(job.conversion, job.source))


@functools.lru_cache(maxsize=1)
def _opened(conversion: Conversion, identity: bytes) -> Opened:
    """The source of a conversion, open for as long as the jobs are of that conversion.

    Raises:
        StorageError: this process finds another source there.
    """
    opened = conversion.open()
    if opened.source.identity() != identity:
        raise StorageError(
            f"{conversion.path}: a worker finds other contents there than the process that "
            f"converts; it may have been replaced meanwhile"
        )
    return opened


def start(executor: Executor) -> None:
    """Start an executor's workers before this process opens anything.

    A process that is forked later has TensorStore's memory, but not its threads, and dies of it.
    """
    executor.submit(_nothing).result()


def _nothing() -> None:
    pass


def run_here(
    opened: Opened,
    units: Sequence[Numbered],
    output: Output,
    note: Note,
    progress: ProgressCounter,
    *,
    threads: int | None,
    memory_bytes: int,
) -> None:
    """Make units in threads; at most ``memory_bytes`` of them at a time, a larger one alone.

    Raises:
        XckptError: the first failure; units that were finished before are noted.
    """
    with Pool(threads=threads, budget=memory_bytes) as pool:
        for number, unit in units:
            if pool.failed:
                break
            pool.reserve(unit.nbytes)

            def task(number: int = number, unit: WorkUnit = unit) -> None:
                try:
                    made = make(opened.resolved, opened.source, unit.parts)
                    note(number, output.write(unit, made))
                finally:
                    pool.release(unit.nbytes)
                progress.add(unit.target_bytes)

            pool.submit(task)


def run_elsewhere(
    executor: Executor,
    opened: Opened,
    conversion: Conversion,
    units: Sequence[Numbered],
    output: Output,
    note: Note,
    progress: ProgressCounter,
) -> None:
    """Have an executor's workers make units.

    Raises:
        XckptError: the first failure; units that were finished before are noted.
        StorageError: a worker ended abruptly.
    """
    identity = opened.source.identity()
    jobs: dict[Future[bytes], Numbered] = {}
    try:
        for number, unit in units:
            job = Job(conversion, identity, unit, output.only(unit))
            jobs[executor.submit(run_job, job)] = number, unit
        for future in as_completed(jobs):
            number, unit = jobs[future]
            note(number, future.result())
            progress.add(unit.target_bytes)
    except BrokenExecutor as error:
        raise StorageError(
            f"a worker of the executor ended abruptly: for want of memory, or because it was "
            f"forked from a process that had read or written before (take a ProcessPoolExecutor "
            f"with mp_context=multiprocessing.get_context('spawn')); convert again to go on "
            f"({error})"
        ) from error
    finally:
        for future in jobs:
            future.cancel()
