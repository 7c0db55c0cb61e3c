"""Run the benchmarks: ``python -m benchmarks.run`` or ``make bench``.

1. ``speed``: every contender saves and loads the same 1.4 GiB in one process, in turns.
2. ``memory``: the peak of each save and load, in a separate process.
3. ``reshard``: four ranks save rows and load columns.
4. ``dcp``: what a row shard reads through torch's distributed checkpoint.
5. ``async``: how long saves in the background block, and the memory that they keep.
6. ``planning``: the global plan for 64 to 4,096 ranks.
7. ``conversion``: what converting a model costs, and BERT into Flax beside transformers' loader.
8. ``deltas``: what a save with a base writes, for several kinds of training.
9. ``imports``: what ``import xckpt`` costs.
10. ``deletions``: what deleting 10,000 files costs the saves beside it.

Tables go to the terminal, everything to a JSON file, and the bars that xckpt has set itself are
computed from these figures.  ``--quick`` runs all of it on 6 MB to see that it works, and judges
nothing.  Only a run of everything replaces the figures that are kept; those of `benchmarks.scale`
stay beside them.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import (
    async_saves,
    bars,
    conversion,
    dcp,
    deletions,
    deltas,
    imports,
    memory,
    planning,
    report,
    reshard,
    speed,
    state,
)
from benchmarks.bars import Bar
from benchmarks.contender import Contender
from benchmarks.contenders import all_contenders
from benchmarks.contenders.memcpy import MEMCPY

MEMORY_BACKED = Path("/dev/shm")
RESULTS = Path(__file__).with_name("results.json")


@dataclass(slots=True)
class Run:
    """One run: what was asked for, and what was found so far."""

    contenders: list[Contender]
    directory: Path
    disk: Path
    """Where models lie that are too large for memory-backed files."""
    rounds: int
    quick: bool
    full: bool
    console: Console
    results: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def tell(self, line: str) -> None:
        """Say what is being done, where stderr is a terminal."""
        if self.console.is_terminal:
            self.console.print(line, style="dim")

    def resharders(self) -> list[str]:
        """The names of the contenders that take part in the resharding."""
        chosen = {contender.name for contender in self.contenders}
        mine = ["xckpt"] if bars.TORCH in chosen else []
        return [name for name in (*bars.DCP, bars.THROUGH) if name in chosen] + mine


def run_speed(run: Run) -> None:
    """Saves and loads, interleaved."""
    shapes = state.shapes(run.quick)
    arena = speed.Arena.of(shapes)
    times = speed.run(run.contenders, arena, run.directory, run.rounds, run.tell)
    run.results["speed"] = report.speed_json(times)
    run.bars += bars.speed(times)
    report.show(run.console, report.speed_table(times, state.size_of(shapes)))


def run_memory(run: Run) -> None:
    """Peaks of saves and loads."""
    # What memcpy saves is gone with its process.
    contenders = [contender for contender in run.contenders if contender is not MEMCPY]
    extras = memory.run(contenders, run.directory, run.quick, run.tell)
    run.results["memory"] = [asdict(extra) for extra in extras]
    run.bars += bars.memory(extras)
    report.show(run.console, report.memory_table(extras))


def run_reshard(run: Run) -> None:
    """Rows to columns."""
    run.tell("rows to columns over 4 ranks")
    figures = reshard.run(run.resharders(), run.directory, run.rounds, run.quick)
    run.results["reshard"] = report.resharding_json(figures)
    run.bars += bars.resharding(figures)
    report.show(run.console, report.resharding_table(figures))


def run_dcp(run: Run) -> None:
    """A row shard through DCP."""
    run.tell("one row shard through DCP")
    figures = dcp.run(run.directory, run.quick)
    run.results["row_shard"] = {name: asdict(figure) for name, figure in figures.items()}
    run.bars += bars.row_shard(figures)
    report.show(run.console, report.row_shard_table(figures))


def run_async(run: Run) -> None:
    """Saves in the background."""
    figures = async_saves.run(run.directory, min(run.rounds, 3), run.quick, run.tell)
    run.results["async"] = report.async_json(figures)
    run.bars += bars.async_saves(figures)
    report.show(run.console, report.async_table(figures))


def run_planning(run: Run) -> None:
    """The global plan."""
    ranks = (4, 16) if run.quick else (64, 256, 1024, 4096)
    figures = planning.run(planning.ALIKE, ranks, run.tell)
    figures += planning.run(planning.UNLIKE, ranks, run.tell)
    figures += planning.run(planning.DCP, ranks[: 3 if run.full else 2], run.tell)
    run.results["planning"] = [asdict(figure) for figure in figures]
    run.bars += bars.planning(figures)
    report.show(run.console, report.planning_table(figures))


def run_conversion(run: Run) -> None:
    """One model's layout into another's."""
    figures = conversion.run(run.directory, run.disk, run.rounds, run.quick, run.tell)
    run.results["conversion"] = report.conversion_json(figures)
    run.bars += bars.conversion(figures)
    report.show(
        run.console,
        report.conversion_memory_table(figures),
        report.conversion_table(figures),
        report.loading_table(figures),
    )


def run_deltas(run: Run) -> None:
    """Saves with a base."""
    has_disk = is_memory_backed(run.directory) and not is_memory_backed(run.disk)
    about = run.directory, min(run.rounds, 3), run.quick, run.tell
    figures = deltas.run(*about, disk=run.disk if has_disk else None)
    run.results["deltas"] = [asdict(figure) for figure in figures]
    run.bars += bars.deltas(figures)
    report.show(run.console, report.deltas_table(figures))


def run_imports(run: Run) -> None:
    """The import."""
    run.tell("import xckpt")
    figure = imports.run()
    run.results["imports"] = asdict(figure)
    run.bars += bars.imports(figure)
    report.show(run.console, report.import_line(figure))


def run_deletions(run: Run) -> None:
    """Saves beside the deletion of a step."""
    run.tell("deletions beside saves")
    figures = list(deletions.run(run.directory, quick=run.quick))
    run.results["deletions"] = [asdict(each) for each in figures]
    run.bars += bars.deletions(figures)
    for each in figures:
        report.show(run.console, str(each))


SECTIONS: dict[str, Callable[[Run], None]] = {
    "speed": run_speed,
    "memory": run_memory,
    "reshard": run_reshard,
    "dcp": run_dcp,
    "async": run_async,
    "planning": run_planning,
    "conversion": run_conversion,
    "deltas": run_deltas,
    "imports": run_imports,
    "deletions": run_deletions,
}


def is_memory_backed(directory: Path) -> bool:
    """Whether files under the directory lie in memory."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    kinds = {line.split()[1]: line.split()[2] for line in mounts}
    path = directory.resolve()
    return next((kinds[str(p)] for p in (path, *path.parents) if str(p) in kinds), "") in (
        "tmpfs",
        "ramfs",
    )


def with_others(path: Path, results: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Figures, with those of a file that they do not replace: `benchmarks.scale` has sections too.

    Args:
        path: the file, which may be absent.
        results: the figures.
        whole: whether they are of all sections of `SECTIONS`, so that they say on what machine.
    """
    kept = json.loads(path.read_text()) if path.exists() else {}
    return {**kept, **results} if whole or not kept else report.with_part(kept, results)


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help="6 MB and one round: a smoke test.")
@click.option("--full", is_flag=True, help="Plan 1,024 ranks with DCP too: a minute, 1.2 GiB.")
@click.option(
    "--disk", is_flag=True, help="The temporary directory instead of memory-backed files."
)
@click.option("--directory", type=click.Path(path_type=Path), help="Where checkpoints are written.")
@click.option("--section", "sections", multiple=True, type=click.Choice(list(SECTIONS)))
@click.option(
    "--contender", "names", multiple=True, type=click.Choice([c.name for c in all_contenders()])
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The JSON file; of a run of everything benchmarks/results.json. If it exists, a section's "
    "figures take the place of those in it.",
)
def main(
    rounds: int,
    quick: bool,
    full: bool,
    disk: bool,
    directory: Path | None,
    sections: tuple[str, ...],
    names: tuple[str, ...],
    output: Path | None,
) -> None:
    """Measure xckpt beside the checkpoint libraries that people use today."""
    on_disk = directory or Path(tempfile.gettempdir())
    if directory is None:
        directory = MEMORY_BACKED if MEMORY_BACKED.is_dir() and not disk else on_disk
    folder = Path(tempfile.mkdtemp(prefix="xckpt-bench-", dir=directory))
    # A file or a pipe has no width.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    contenders = [c for c in all_contenders() if not names or c.name in names]
    run = Run(contenders, folder, on_disk, 1 if quick else rounds, quick, full, console)
    shapes = state.shapes(quick)
    run.results |= {
        "machine": report.machine(is_memory_backed(folder)),
        "state": {"tensors": len(shapes), "bytes": state.size_of(shapes), "rounds": run.rounds},
    }
    try:
        for section in sections or SECTIONS:
            SECTIONS[section](run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # 6 MB in 340 tensors say something about overheads, and nothing about the bars.
    if not quick:
        report.show(run.console, report.bars_table(run.bars))
        run.results["bars"] = [{**asdict(bar), "met": bar.met} for bar in run.bars]
    # A smoke test or a part must not replace the figures of a whole run.
    whole = not (quick or sections or names)
    path = output or (RESULTS if whole else Path(tempfile.gettempdir()) / "xckpt-bench.json")
    report.write(path, with_others(path, run.results, whole) if whole or output else run.results)
    run.console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
