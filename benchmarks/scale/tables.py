"""The tables that ``python -m benchmarks.scale`` prints, one for each section of the results."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.scale import line as lines
from benchmarks.scale.bucket import STATES
from benchmarks.scale.hosts import RATE


def saves(figures: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Saves without storage: the coordinator, and any other rank (processor s)")
    for name in ("ranks x tensors", "plans", "save"):
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
                "" if number else ("gathered" if case.get("gathered", True) else "alone"),
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


def loads(figures: Sequence[dict[str, Any]]) -> Table:
    title = "Loads without storage, as saved: the coordinator, and any other rank (processor s)"
    names = ("plan s", "a rank s", "manifest sent, KiB", "its plan up, bytes", "down")
    table = _numbers(title, "ranks x tensors", *names)
    for case in figures:
        # Of arguments, the manifest, the plans, and whether all have read.
        (_, up, _), (_, manifest, down, _) = (
            [moved / (case["ranks"] - 1) for moved in case[way]] for way in ("up", "down")
        )
        table.add_row(
            f"{case['placement']} {case['ranks']:,} x {case['tensors']:,}",
            *(f"{case['plan']:.2f}", f"{case['rank']:.3f}"),
            *(f"{manifest / 1024:,.0f}", f"{up:,.0f}", f"{down:,.0f}"),
        )
    return table


def bucket(calls: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Requests to a bucket that answers after 30 ms; each raw leaf is an array")
    for name in ("state", "call"):
        table.add_column(name)
    for name in ("wall s", "requests", "one after the other", "rounds", "without limits"):
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
        waits = call["rounds"], call["rounds_without_limits"]
        numbers += tuple(f"{count:,}" if count else "" for count in waits)
        table.add_row(what, call["call"], *numbers, kinds)
    return table


def hosts(loads: Sequence[dict[str, Any]]) -> Table:
    title = f"Hosts that load one replica each from a bucket of {RATE / (1 << 20):.0f} MiB/s"
    table = _numbers(
        title, "hosts", "each alone: wall s", "bytes", "once in the job: wall s", "bytes"
    )
    for load in loads:
        alone = f"{load['alone_seconds']:.2f}", f"{load['alone_times']:.2f} x"
        once = f"{load['once_seconds']:.2f}", f"{load['once_times']:.2f} x"
        table.add_row(str(load["hosts"]), *alone, *once)
    return table


def amplification(figures: Sequence[dict[str, Any]]) -> Table:
    title = "Bytes read over bytes wanted, by readers that cut otherwise"
    names = ("readers", "mean", "p90", "most", "8 a host: mean", "most", "chunks", "objects")
    table = _numbers(title, *names)
    for each in figures:
        alone = f"{each['mean']:.2f}", f"{each['p90']:.0f}", f"{each['most']:.0f}"
        host = f"{each['host_mean']:.2f}", f"{each['host_most']:.0f}"
        counts = f"{each['chunks']:.0f}", f"{each['objects']:.0f}"
        table.add_row(str(each["readers"]), *alone, *host, *counts)
    return table


def _numbers(title: str, *names: str) -> Table:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right")
    return table


def line(turns: Sequence[dict[str, Any]]) -> Table:
    """Medians of the rounds, and of what each round took over the same round of another."""
    title = f"{lines.COUNT} x {lines.SIZE >> 20} MiB to and from a bucket that answers after 30 ms"
    table = Table(title=title)
    for name in ("line", "call", "contender"):
        table.add_column(name)
    for name in ("wall s", "processor s", "over xckpt's wall"):
        table.add_column(name, justify="right")
    before = None
    for each in turns:
        if before is not None and each["line"] != before:
            table.add_section()
        what = "" if each["line"] == before else f"{each['line']} MiB/s" if each["line"] else "free"
        before = each["line"]
        ours = next(o for o in turns if _beside(o) == (each["line"], each["call"], lines.XCKPT))
        over = [a / b for a, b in zip(each["seconds"], ours["seconds"], strict=True)]
        medians = f"{median(each['seconds']):.2f}", f"{median(each['processor']):.2f}"
        table.add_row(what, each["call"], each["contender"], *medians, f"{median(over):.2f} x")
    return table


def _beside(turns: dict[str, Any]) -> tuple[int, str, str]:
    return turns["line"], turns["call"], turns["contender"]


def dtensors(figures: Sequence[dict[str, Any]]) -> Table:
    """What a rank takes to describe its state."""
    title = "DTensors described by torch's adapter, and what the rank knows of all plans (ms)"
    table = _numbers(title, "ranks x tensors", "first save", "later saves, median", "least")
    for each in figures:
        spent = (f"{each[which] * 1e3:.1f}" for which in ("first", "again", "least"))
        table.add_row(f"{each['ranks']:,} x {each['tensors']:,}", *spent)
    return table


def dcp_plans(figures: Sequence[dict[str, Any]]) -> Table:
    """What torch's own plans take."""
    table = Table(title="DCP's plans: the coordinator (processor s)")
    for name in ("ranks x tensors", "cache", "save"):
        table.add_column(name)
    for name in ("plan s", "KiB up", "KiB down", "metadata KiB"):
        table.add_column(name, justify="right")
    for each in figures:
        table.add_row(
            f"{each['ranks']:,} x {each['tensors']:,}",
            ("no", "yes")[each["cache"]],
            ("first", "again")[each["again"]],
            f"{each['plan']:.2f}",
            *(f"{each[way] / 1024:.2f}" for way in ("up", "down")),
            f"{each['manifest'] / 1024:,.0f}",
        )
    return table


def leaves(figures: Sequence[dict[str, Any]]) -> Table:
    """What many small leaves take."""
    table = Table(title="Leaves of 1 to 4 KiB (processor s)")
    table.add_column("contender")
    for name in ("leaves", "save", "load", "open", "ls", "files", "extra MiB"):
        table.add_column(name, justify="right")
    for each in figures:
        seconds = (each[call] for call in ("save", "load", "open", "ls"))
        table.add_row(
            each["contender"],
            f"{each['count']:,}",
            *("" if spent < 0 else f"{spent:.1f}" for spent in seconds),
            f"{each['files']:,}",
            f"{each['memory'] / (1 << 20):,.0f}",
        )
    return table
