"""Carrying out units: in this process's threads, or by the workers of any executor.

1. An `Output` writes what a unit has made, durably, and reports what it wrote.
2. `run_here` makes units in threads, within a budget of memory.
3. `run_elsewhere` has an executor call `run_unit` for each unit. What goes along pickles; the
   process that runs it opens the source once and keeps it for the next.
4. Each unit's report goes to ``note`` when the unit is durable, so that it need not be done again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.units.make import make
from xckpt.convert.units.unit import WorkUnit
from xckpt.errors import StorageError
from xckpt.storage.budget import Pool

Note = Callable[[WorkUnit, bytes], None]
"""Takes a unit that is durably written, and its report."""


class Output(Protocol):
    """Where units are written; pickles, so that it can go along with a unit."""

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write the parts of a unit, durably, and report what was written."""
        ...

    def only(self, unit: WorkUnit) -> Output:
        """What is needed of this output for one unit."""
        ...


def run_here(
    opened: Opened,
    units: Sequence[WorkUnit],
    output: Output,
    note: Note,
    *,
    threads: int | None,
    memory_bytes: int,
) -> None:
    """Make units in threads; at most ``memory_bytes`` of them at a time, a larger one alone.

    Raises:
        XckptError: the first failure; units that were finished before are noted.
    """

    def run(unit: WorkUnit) -> None:
        try:
            report = output.write(unit, make(opened.resolved, opened.source, unit.parts))
        finally:
            pool.release(unit.nbytes)
        note(unit, report)

    with Pool(threads=threads, budget=memory_bytes) as pool:
        for unit in units:
            if pool.failed:
                break
            pool.reserve(unit.nbytes)
            pool.submit(functools.partial(run, unit))


def run_elsewhere(
    executor: Executor,
    opened: Opened,
    conversion: Conversion,
    units: Sequence[WorkUnit],
    output: Output,
    note: Note,
) -> None:
    """Have an executor's workers make units.

    Raises:
        XckptError: the first failure; units that were finished before are noted.
        StorageError: a worker ended abruptly.
    """
    identity = opened.source.identity()
    futures: dict[Future[bytes], WorkUnit] = {}
    try:
        for unit in units:
            future = executor.submit(run_unit, conversion, identity, unit, output.only(unit))
            futures[future] = unit
        for future in as_completed(futures):
            note(futures[future], future.result())
    except BrokenExecutor as error:
        raise StorageError(
            f"a worker of the executor ended abruptly: for want of memory, or because it was "
            f"forked from a process that had read or written before (take a ProcessPoolExecutor "
            f"with mp_context=multiprocessing.get_context('spawn')); convert again to go on "
            f"({error})"
        ) from error
    finally:
        for future in futures:
            future.cancel()


def run_unit(conversion: Conversion, identity: bytes, unit: WorkUnit, output: Output) -> bytes:
    """Make a unit and write it, in a process that may have done others before.

    Returns:
        The output's report.

    Raises:
        StorageError: this process finds another source than the one of this identity.
    """
    opened = _opened(conversion, identity)
    return output.write(unit, make(opened.resolved, opened.source, unit.parts))


@functools.lru_cache(maxsize=1)
def _opened(conversion: Conversion, identity: bytes) -> Opened:
    """The source of a conversion, open for as long as the units are of that conversion."""
    opened = conversion.open()
    if opened.source.identity() != identity:
        raise StorageError(
            f"{conversion.path}: a worker finds other contents there than the process that "
            f"converts; it may have been replaced meanwhile"
        )
    return opened
