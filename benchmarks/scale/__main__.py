"""``python -m benchmarks.scale``: saves of W ranks x T tensors, as a table and in results.json.

Each case runs in a process of its own, which holds all ranks, one after the other: the seconds and
bytes are those of the real engine, and nothing is written. See `benchmarks.scale.saves`.

``--bucket`` counts requests to a bucket that is far away instead (`benchmarks.scale.bucket`), and
``--hosts`` what hosts read that want the same (`benchmarks.scale.hosts`). ``--amplification``
plans how much ranks read in vain that cut otherwise (`benchmarks.scale.amplification`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.scale.amplification import MADE_FOR, PAIRS, amplification, pairs
from benchmarks.scale.bucket import STATES, measure
from benchmarks.scale.hosts import HOSTS, RATE, loads_of
from benchmarks.scale.placements import PLACEMENTS
from benchmarks.scale.saves import simulate

RESULTS = Path(__file__).parents[1] / "results.json"
CASES = (
    ("fsdp", 1024, 1000),
    ("fsdp", 10240, 1000),
    ("mesh", 10240, 1000),
    ("hsdp", 10240, 1000),
    ("moe", 10240, 1000),
    ("ddp", 10240, 1000),
    ("ragged", 256, 1000),
    ("unlike", 1024, 1000),
)
QUICK = (("fsdp", 16, 20), ("moe", 16, 20), ("ragged", 16, 20))


@click.command()
@click.option("--quick", is_flag=True, help="Few ranks and tensors: a smoke test.")
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=(click.Choice(list(PLACEMENTS)), click.IntRange(2), click.IntRange(1)),
    help="A placement, ranks and tensors, in place of the usual cases.",
)
@click.option("--bucket", is_flag=True, help="Requests to a bucket, and round trips.")
@click.option("--hosts", is_flag=True, help="Hosts that load replicas from a slow bucket.")
@click.option("--amplification", "cuts", is_flag=True, help="What is read over what is wanted.")
@click.option("--output", type=click.Path(path_type=Path), help="The JSON file to add them to.")
@click.option("--alone", is_flag=True, hidden=True, help="In this process; prints JSON.")
def main(
    quick: bool,
    cases: tuple[tuple[str, int, int], ...],
    bucket: bool,
    hosts: bool,
    cuts: bool,
    output: Path | None,
    alone: bool,
) -> None:
    """Simulate saves of many ranks by the real planner, wire encoding and commit."""
    if alone:
        ((name, ranks, tensors),) = cases
        print(json.dumps([asdict(save) for save in simulate(PLACEMENTS[name](ranks, tensors))]))
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    if bucket:
        section = "bucket"
        names = ["medium"] if quick else list(STATES)
        figures = [call for name in names for call in measure(name)]
        table = _bucket_table(figures)
    elif hosts:
        section = "hosts"
        figures = [asdict(load) for load in loads_of((1, 3) if quick else HOSTS)]
        table = _hosts_table(figures)
    elif cuts:
        section = "amplification"
        drawn = pairs(20 if quick else PAIRS)
        figures = [asdict(amplification(readers, drawn)) for readers in MADE_FOR]
        table = _amplification_table(figures)
    else:
        section = "scale"
        figures = [_apart(case) for case in cases or (QUICK if quick else CASES)]
        table = _table(figures)
    console.print(table)
    if output is None and (quick or cases):
        return
    path = output or RESULTS
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(results | {section: figures}, indent=1) + "\n")
    console.print(f"wrote {path}")


def _apart(case: tuple[str, int, int]) -> dict[str, Any]:
    """The figures of a case, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--alone", "--case", *map(str, case)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    name, ranks, tensors = case
    saves = json.loads(done.stdout)
    return {"placement": name, "ranks": ranks, "tensors": tensors, "saves": saves}


def _table(figures: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Saves without storage: the coordinator, and any other rank (processor s)")
    for name in ("ranks x tensors", "save"):
        table.add_column(name)
    for name in ("plan s", "commit s", "MiB", "a rank s", "KiB up", "KiB down", "manifest KiB"):
        table.add_column(name, justify="right")
    for case in figures:
        what = f"{case['placement']} {case['ranks']:,} x {case['tensors']:,}"
        for number, save in enumerate(case["saves"]):
            # All but the last collective: what was written is said and answered in that.
            up, down = (sum(save[way][:-1]) / (case["ranks"] - 1) / 1024 for way in ("up", "down"))
            table.add_row(
                "" if number else what,
                ("first", "again")[min(number, 1)],
                f"{save['plan']:.2f}",
                f"{save['commit']:.2f}",
                f"{save['memory'] / (1 << 20):,.0f}",
                f"{save['rank']:.3f}",
                f"{up:.2f}",
                f"{down:.2f}",
                f"{save['manifest'] / 1024:,.0f}",
            )
        table.add_section()
    return table


def _bucket_table(calls: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Requests to a bucket that answers after 30 ms; each raw leaf is an array")
    for name in ("state", "call"):
        table.add_column(name)
    for name in ("wall s", "requests", "one after the other"):
        table.add_column(name, justify="right")
    table.add_column("of each kind")
    before = ""
    for call in calls:
        if before and call["state"] != before:
            table.add_section()
        count, size = STATES[call["state"]]
        what = "" if call["state"] == before else f"{count:,} x {size // 1024:,} KiB"
        before = call["state"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in call["kinds"].items())
        numbers = f"{call['seconds']:.2f}", f"{call['requests']:,}", f"{call['chain']:,}"
        table.add_row(what, call["call"], *numbers, kinds)
    return table


def _hosts_table(loads: Sequence[dict[str, Any]]) -> Table:
    title = f"Hosts that load one replica each from a bucket of {RATE / (1 << 20):.0f} MiB/s"
    table = _numbers_table(
        title, "hosts", "each alone: wall s", "bytes", "once in the job: wall s", "bytes"
    )
    for load in loads:
        alone = f"{load['alone_seconds']:.2f}", f"{load['alone_times']:.2f} x"
        once = f"{load['once_seconds']:.2f}", f"{load['once_times']:.2f} x"
        table.add_row(str(load["hosts"]), *alone, *once)
    return table


def _amplification_table(figures: Sequence[dict[str, Any]]) -> Table:
    title = "Bytes read over bytes wanted, by readers that cut otherwise"
    names = ("readers", "mean", "p90", "most", "8 a host: mean", "most", "chunks", "objects")
    table = _numbers_table(title, *names)
    for each in figures:
        alone = f"{each['mean']:.2f}", f"{each['p90']:.0f}", f"{each['most']:.0f}"
        host = f"{each['host_mean']:.2f}", f"{each['host_most']:.0f}"
        counts = f"{each['chunks']:.0f}", f"{each['objects']:.0f}"
        table.add_row(str(each["readers"]), *alone, *host, *counts)
    return table


def _numbers_table(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right")
    return table


if __name__ == "__main__":
    main()
