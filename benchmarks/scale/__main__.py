"""``python -m benchmarks.scale``: how saves and loads grow, as tables and in results.json.

| | |
|---|---|
| | saves of W ranks x T tensors (`benchmarks.scale.saves`) |
| ``--loads`` | loads of W ranks x T tensors (`benchmarks.scale.loads`) |
| ``--bucket`` | requests to a bucket that is far away (`benchmarks.scale.bucket`) |
| ``--line`` | seconds of large objects there, beside other readers (`benchmarks.scale.line`) |
| ``--hosts`` | what hosts read that want the same (`benchmarks.scale.hosts`) |
| ``--amplification`` | what is read in vain by ranks that cut otherwise (`.amplification`) |
| ``--leaves`` | many small leaves, beside DCP and Orbax (`benchmarks.scale.leaves`) |
| ``--dtensors`` | a rank's describing of its DTensors (`benchmarks.scale.dtensors`) |
| ``--dcp-plans`` | DCP's plans, with its cache and without (`benchmarks.scale.dcp_plans`) |
| ``--all`` | all of these |

Each case of the first runs in a process of its own, which holds all ranks, one after the other: the
seconds and bytes are those of the real engine, and nothing is written. All usual cases of saves
take a quarter of an hour; the simulation, which plays every rank, is nearly all of that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.scale import bucket, dcp_plans, dtensors, leaves, line, readers, tables
from benchmarks.scale.amplification import MADE_FOR, PAIRS, amplification, pairs
from benchmarks.scale.hosts import HOSTS, loads_of
from benchmarks.scale.loads import simulate_load
from benchmarks.scale.placements import PLACEMENTS
from benchmarks.scale.saves import simulate
from xckpt.core.plan.alone.known import MOST_BOXES

RESULTS = Path(__file__).parents[1] / "results.json"
CASES = (
    ("fsdp", 1024, 500),
    ("fsdp", 1024, 1000),
    ("fsdp", 10240, 1000),
    ("mesh", 10240, 1000),
    ("hsdp", 10240, 1000),
    ("moe", 10240, 1000),
    ("ddp", 10240, 1000),
    ("ragged", 256, 1000),
    ("unlike", 1024, 1000),
)
"""Ranks plan alone where they know all plans; in these cases they are also made to gather them. Of
more boxes than `MOST_BOXES` they do not, as in the last one."""
LOADS = (("fsdp", 1024, 1000), ("fsdp", 10240, 1000), ("mesh", 10240, 1000), ("ragged", 256, 1000))
QUICK = (("fsdp", 16, 20), ("moe", 16, 20), ("ragged", 16, 20))

Figures = list[dict[str, Any]]


def _saves(quick: bool) -> Figures:
    return [each for case in (QUICK if quick else CASES) for each in _both_ways(case)]


def _loads(quick: bool) -> Figures:
    return [_load(case) for case in (QUICK[::2] if quick else LOADS)]


def _load(case: tuple[str, int, int]) -> dict[str, Any]:
    name, ranks, tensors = case
    what = {"placement": name, "ranks": ranks, "tensors": tensors}
    return what | asdict(simulate_load(PLACEMENTS[name](ranks, tensors)))


def _bucket(quick: bool) -> Figures:
    names = ["medium"] if quick else list(bucket.STATES)
    return [call for name in names for call in bucket.measure(name)]


def _line(quick: bool) -> Figures:
    for name in readers.absent():
        click.echo(f"{name}: its package is not installed")
    much = {"count": 5, "rounds": 1} if quick else {}
    return [turns for each in line.LINES for turns in line.measure(each, **much)]


def _hosts(quick: bool) -> Figures:
    return [asdict(load) for load in loads_of((1, 3) if quick else HOSTS)]


def _amplification(quick: bool) -> Figures:
    drawn = pairs(20 if quick else PAIRS)
    return [asdict(amplification(each, drawn)) for each in MADE_FOR]


def _leaves(quick: bool) -> Figures:
    return [leaves.measure(name, 500 if quick else count) for name, count in leaves.CASES]


def _dtensors(quick: bool) -> Figures:
    if quick:
        return [asdict(dtensors.describe(16, 20, rounds=2))]
    return [asdict(dtensors.describe(*case)) for case in dtensors.CASES]


def _dcp_plans(quick: bool) -> Figures:
    return dcp_plans.measure(16, 20) if quick else dcp_plans.measure()


SECTIONS: dict[str, tuple[Callable[[bool], Figures], Callable[[Sequence[Any]], Table]]] = {
    "scale": (_saves, tables.saves),
    "loads": (_loads, tables.loads),
    "bucket": (_bucket, tables.bucket),
    "line": (_line, tables.line),
    "hosts": (_hosts, tables.hosts),
    "amplification": (_amplification, tables.amplification),
    "leaves": (_leaves, tables.leaves),
    "dtensors": (_dtensors, tables.dtensors),
    "dcp_plans": (_dcp_plans, tables.dcp_plans),
}
"""Key of the results -> what measures it, and its table."""


def _flags(command: Callable[..., None]) -> Callable[..., None]:
    """A flag for each section but the first, and one for all."""
    for name in ("all", *list(SECTIONS)[:0:-1]):
        flag = click.option(f"--{name.replace('_', '-')}", "section", flag_value=name)
        command = flag(command)
    return command


def _checked(
    _context: click.Context, _option: click.Parameter, cases: tuple[tuple[str, int, int], ...]
) -> tuple[tuple[str, int, int], ...]:
    """The cases, if their placements take so many ranks."""
    for name, ranks, tensors in cases:
        try:
            PLACEMENTS[name](ranks, tensors)
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}") from error
    return cases


@click.command()
@click.option("--quick", is_flag=True, help="Few ranks and tensors: a smoke test.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=(click.Choice(list(PLACEMENTS)), click.IntRange(2), click.IntRange(1)),
    callback=_checked,
    help="A placement, ranks and tensors, in place of the usual cases; of saves and --loads.",
)
@_flags
@click.option("--output", type=click.Path(path_type=Path), help="The JSON file to add them to.")
@click.option("--here", is_flag=True, hidden=True, help="In this process; prints JSON.")
@click.option("--gathered", is_flag=True, hidden=True, help="With it: no rank knows other plans.")
def main(
    quick: bool,
    cases: tuple[tuple[str, int, int], ...],
    section: str | None,
    output: Path | None,
    here: bool,
    gathered: bool,
) -> None:
    """Simulate saves of many ranks by the real planner, wire encoding and commit."""
    if cases and section not in (None, "loads"):
        raise click.UsageError(
            "--case is of saves and --loads; the other parts have cases of their own"
        )
    if here:
        ((name, ranks, tensors),) = cases
        # Nothing is loaded: how much memory a load would take need not be said.
        warnings.filterwarnings("ignore", "memory://")
        saves = simulate(PLACEMENTS[name](ranks, tensors), gathered=gathered)
        print(json.dumps([asdict(save) for save in saves]))
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    kept = None if output is None and quick else output or RESULTS
    for name in SECTIONS if section == "all" else [section or "scale"]:
        measure, table = SECTIONS[name]
        if not cases:
            figures = measure(quick)
        elif section == "loads":
            figures = [_load(case) for case in cases]
        else:
            figures = [each for case in cases for each in _both_ways(case)]
        console.print(table(figures))
        if kept is not None:
            keep(kept, name, figures)
            console.print(f"wrote {kept}")


def keep(path: Path, section: str, figures: Figures) -> None:
    """Put a section's figures into the results; of saves, those of these cases."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if section == "scale":
        new = {_case(each): each for each in figures}
        old = {_case(each): each for each in results.get(section, [])}
        figures = list((old | new).values())
    path.write_text(json.dumps(results | {section: figures}, indent=1) + "\n")


def _case(figures: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured; the oldest figures do not say that plans were gathered."""
    about = {"gathered": True} | figures
    return tuple(about[key] for key in ("placement", "ranks", "tensors", "gathered"))


def _both_ways(case: tuple[str, int, int]) -> list[dict[str, Any]]:
    """The figures of a case whose plans are gathered, and if there are such, of ranks alone."""
    placement = PLACEMENTS[case[0]](*case[1:])
    knows = bool(placement.mesh) and len(placement.shapes) * placement.ranks <= MOST_BOXES
    return [_apart(case, gathered=True)] + ([_apart(case, gathered=False)] if knows else [])


def _apart(case: tuple[str, int, int], *, gathered: bool) -> dict[str, Any]:
    """The figures of a case, from a process of its own."""
    name, ranks, tensors = case
    how = "gathered" if gathered else "alone"
    click.echo(f"scale: {name} {ranks:,} x {tensors:,}, plans {how}", nl=False, err=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.scale", "--here", "--case", *map(str, case)]
    command += ["--gathered"] if gathered else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    click.echo(f": {time.monotonic() - began:.0f} s", err=True)
    saves = json.loads(done.stdout)
    what = {"placement": name, "ranks": ranks, "tensors": tensors, "gathered": gathered}
    return what | {"saves": saves}


if __name__ == "__main__":
    main()
