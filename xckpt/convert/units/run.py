"""Carrying out a rank's share of the units: in this process's threads, or by any executor.

1. `share_units` gives each rank its units.
2. `UnitShare.make` makes those that no earlier process has noted as written. An `Output` writes the
   parts of a unit durably and returns a report; the report is noted, so that the unit is not made
   again.
3. In this process units are made in threads, within a budget of memory. Otherwise an executor's
   workers call `run_unit`. Everything sent to them can be pickled; a worker opens the source once
   and keeps it.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.conversion import Conversion, Opened
from xckpt.convert.journal import Journal, noted_units
from xckpt.convert.units.make import make
from xckpt.convert.units.unit import WorkUnit
from xckpt.errors import StorageError
from xckpt.options import SaveOptions
from xckpt.storage.budget import Pool, ProgressCounter, share_of
from xckpt.storage.commit.folder import journal_of

Seen = tuple[bytes, bytes]
"""A source's identity, and its state: with another one, of equal identity, it is opened anew."""

Note = Callable[[WorkUnit, bytes], None]
"""Takes a unit that is durably written, and its report."""


class Output(Protocol):
    """Where units are written; can be pickled, so that it can be sent with a unit."""

    def write(self, unit: WorkUnit, made: Sequence[NDArray[np.generic]]) -> bytes:
        """Write the parts of a unit, durably, and report what was written."""
        ...

    def only(self, unit: WorkUnit) -> Output:
        """What is needed of this output for one unit."""
        ...


def share_units(units: Sequence[WorkUnit], rank: int, ranks: int) -> list[WorkUnit]:
    """A rank's units: each next unit goes to the rank with the fewest bytes.

    Example:
        >>> units = [WorkUnit((), size, 0, number) for number, size in enumerate((9, 4, 6, 1))]
        >>> [[unit.number for unit in share_units(units, rank, 2)] for rank in (0, 1)]
        [[0, 3], [1, 2]]
    """
    mine: list[WorkUnit] = []
    loads = [(0, taker) for taker in range(ranks)]
    for unit in units:
        load, taker = loads[0]
        heapq.heapreplace(loads, (load + unit.target_bytes, taker))
        if taker == rank:
            mine.append(unit)
    return mine


@dataclass(slots=True, eq=False)
class UnitShare:
    """A rank's units, and what makes them."""

    units: Sequence[WorkUnit]
    rank: int
    conversion: Conversion
    opened: Opened
    """The conversion's source, open in this process."""
    options: SaveOptions
    executor: Executor | None
    """None for this process's threads."""
    bytes_before: int = 0
    """Bytes of the units that an earlier process had written, once the others are made."""

    @property
    def target_bytes(self) -> int:
        """Bytes of the target that the units make."""
        return sum(unit.target_bytes for unit in self.units)

    def make(
        self, output: Output, digest: bytes, staged: Path | None, host_ranks: int
    ) -> list[bytes]:
        """Make and write the units, except those already written.

        Args:
            output: where they are written.
            digest: that of the conversion; see `xckpt.convert.journal`.
            staged: the staging folder that has journals beside it, if there are any.
            host_ranks: how many ranks share a host's memory, at most.

        Returns:
            The reports of all units.

        Raises:
            XckptError: the first failure; units that were finished before are noted.
        """
        journal: Journal | None = None
        reports: dict[int, bytes] = {}
        if staged is not None:
            reports = noted_units(staged, digest)
            journal = Journal(journal_of(staged, self.rank), digest)
        missing = [unit for unit in self.units if unit.number not in reports]
        total = self.target_bytes
        self.bytes_before = total - sum(unit.target_bytes for unit in missing)
        progress = ProgressCounter(total, self.options.progress)
        if self.bytes_before:
            progress.add(self.bytes_before)

        def note(unit: WorkUnit, report: bytes) -> None:
            if journal is not None:
                journal.note(unit.number, report)
            reports[unit.number] = report
            progress.add(unit.target_bytes)

        with self.opened.source.unchanged(self.opened.state, self.conversion.path):
            if self.executor is None:
                memory = share_of(self.options.memory_bytes, host_ranks)
                self._run_here(missing, output, note, memory)
            else:
                self._run_in(self.executor, missing, output, note)
        return [reports[unit.number] for unit in self.units]

    def _run_here(
        self, units: Sequence[WorkUnit], output: Output, note: Note, memory_bytes: int
    ) -> None:
        """Make units in threads, within the budget; a unit above the budget alone."""
        resolved, source = self.opened.resolved, self.opened.source

        def run(unit: WorkUnit) -> None:
            note(unit, output.write(unit, make(resolved, source, unit.parts)))

        threads = self.options.threads or source.threads
        with Pool(threads=threads, budget=memory_bytes) as pool:
            for unit in units:
                if pool.failed:
                    break
                pool.submit(functools.partial(run, unit), unit.nbytes)

    def _run_in(
        self, executor: Executor, units: Sequence[WorkUnit], output: Output, note: Note
    ) -> None:
        """Have an executor's workers make units."""
        conversion, seen = self.conversion, (self.opened.source.identity(), self.opened.state)
        futures: dict[Future[bytes], WorkUnit] = {}
        try:
            for unit in units:
                future = executor.submit(run_unit, conversion, seen, unit, output.only(unit))
                futures[future] = unit
            for future in as_completed(futures):
                note(futures[future], future.result())
        except BrokenExecutor as error:
            raise StorageError(
                f"a worker of the executor ended abruptly: it had too little memory, or was forked "
                f"from a process that had read or written before (take a ProcessPoolExecutor with "
                f"mp_context=multiprocessing.get_context('spawn')); convert again to go on "
                f"({error})"
            ) from error
        finally:
            for future in futures:
                future.cancel()
            _opened.cache_clear()  # an executor's threads are this process's own


def run_unit(conversion: Conversion, seen: Seen, unit: WorkUnit, output: Output) -> bytes:
    """Make a unit and write it, in a process that may have done others before.

    Args:
        conversion: what is converted.
        seen: the source, as the process sees it that converts.
        unit: what is made.
        output: where it is written.

    Returns:
        The output's report.

    Raises:
        StorageError: this process finds a source of another identity.
    """
    opened = _opened(conversion, seen)
    return output.write(unit, make(opened.resolved, opened.source, unit.parts))


@functools.lru_cache(maxsize=1)
def _opened(conversion: Conversion, seen: Seen) -> Opened:
    """The source of a conversion, open for as long as the units are of that conversion."""
    opened, (identity, _) = conversion.open(), seen
    if opened.source.identity() != identity:
        raise StorageError(
            f"{conversion.path}: a worker finds other contents there than the process that "
            f"converts; it may have been replaced since the conversion began: convert again"
        )
    return opened
