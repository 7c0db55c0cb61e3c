"""The figures of a run as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.async_saves import CONTENDERS, AsyncSaves
from benchmarks.bars import Bar
from benchmarks.conversion import CONTENDERS as WAYS
from benchmarks.conversion import Conversion
from benchmarks.dcp import RowShard
from benchmarks.deltas import Delta
from benchmarks.imports import Import
from benchmarks.memory import Extra
from benchmarks.oracle_loader import LOADERS, ORACLES
from benchmarks.planning import Planning
from benchmarks.reshard import Resharding
from benchmarks.speed import Times

GIB = 1 << 30
MIB = 1 << 20
PACKAGES = (
    "numpy",
    "torch",
    "jax",
    "tensorstore",
    "orbax-checkpoint",
    "safetensors",
    "transformers",
    "xckpt",
)


def _table(title: str, first: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in first:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def speed_table(times: Mapping[str, Times], size: int) -> Table:
    """Seconds and GiB/s of each save and load; ``size`` is the state's bytes."""
    table = _table(
        f"Save and load {size / GIB:.2f} GiB (medians)",
        ("contender", "what"),
        ("seconds", "of it fsync after", "GiB/s", "lowest to highest s"),
    )
    for name, each in times.items():
        saved = [s + f for s, f in zip(each.save, each.flush, strict=True)]
        flush = sorted(each.flush)[len(each.flush) // 2]
        table.add_row(name, "save", *_row(each.saved(), f"{flush:.3f}", size, saved))
        for load, seconds in each.loads.items():
            table.add_row("", f"load {load}", *_row(each.loaded(load), "", size, seconds))
        table.add_section()
    return table


def _row(median: float, flush: str, size: int, seconds: Sequence[float]) -> tuple[str, ...]:
    spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
    return f"{median:.3f}", flush, f"{size / GIB / median:.2f}", spread


def memory_table(extras: Sequence[Extra]) -> Table:
    """Memory above the state or the targets."""
    table = _table(
        "Extra memory: above the state (save), above the targets or the new arrays (load)",
        ("contender", "what"),
        ("allocated, MiB", "mapped files included, MiB"),
    )
    for extra in extras:
        allocated, total = f"{extra.anonymous / MIB:.0f}", f"{extra.total / MIB:.0f}"
        table.add_row(extra.contender, extra.work, allocated, total)
    return table


def resharding_table(figures: Mapping[str, Resharding]) -> Table:
    """Seconds and bytes of the resharding."""
    table = _table(
        "4 gloo ranks save rows, load rows, load columns (medians; the most of any rank)",
        ("contender",),
        (
            "save s",
            "rows s",
            "columns s",
            "wanted MiB",
            "read MiB",
            "mapped MiB",
            "read / wanted",
            "read / checkpoint",
        ),
    )
    for name, each in figures.items():
        seconds = each.seconds()
        read = sum(each.read_per_rank())
        table.add_row(
            name,
            *(f"{seconds[key]:.3f}" for key in ("save", "load_rows", "load_columns")),
            *(f"{max(b) / MIB:.1f}" for b in (each.wanted, each.read, each.mapped)),
            f"{read / sum(each.wanted):.2f}",
            f"{read / each.stored:.2f}",
        )
    return table


def row_shard_table(figures: Mapping[str, RowShard]) -> Table:
    """Bytes that a quarter of the rows of every matrix takes to read."""
    table = _table(
        "One of 4 row shards of what was saved whole, through DCP",
        ("contender",),
        ("wanted MiB", "of chunks touched MiB", "read MiB", "read / wanted", "load s"),
    )
    for name, each in figures.items():
        table.add_row(
            name,
            *(f"{b / MIB:.1f}" for b in (each.wanted, each.touched, each.read)),
            f"{each.read / each.wanted:.2f}",
            f"{each.seconds:.3f}",
        )
    return table


def async_table(figures: AsyncSaves) -> Table:
    """How long saves in the background block, in copies of the state."""
    table = _table(
        f"Blocking of a save in the background, {figures.size / GIB:.2f} GiB (medians)",
        ("contender",),
        ("first, ms", "later, ms", "a copy, ms", "first, copies", "later, copies"),
    )
    for name in CONTENDERS:
        mine = [each for each in figures.torch if each.contender == name]
        copies = [copied for each in mine for copied in each.later_copies]
        later = [seconds for each in mine for seconds in each.later]
        milliseconds = (
            statistics.median(values) * 1e3
            for values in ([each.first for each in mine], later, copies)
        )
        table.add_row(
            name,
            *(f"{value:.0f}" for value in milliseconds),
            *(f"{ratio:.2f}" for ratio in figures.ratios(name)),
        )
    first, *later = (seconds * 1e3 for seconds in figures.jax)
    table.add_row("xckpt, JAX", f"{first:.0f}", f"{statistics.median(later):.0f}", "", "", "")
    return table


def deltas_table(figures: Sequence[Delta]) -> Table:
    """What a save with a base writes, beside one without."""
    table = _table(
        "A save with the checkpoint before as its base (medians)",
        ("what a step changes",),
        ("state, MiB", "written, MiB", "without a base, s", "with it, s", "part of the time"),
    )
    for each in figures:
        seconds = (f"{statistics.median(values):.3f}" for values in (each.full, each.based))
        sizes = f"{each.state_bytes / MIB:.0f}", f"{each.written_bytes / MIB:.2f}"
        table.add_row(each.case, *sizes, *seconds, f"{each.time_ratio:.2f}")
    return table


def conversion_memory_table(figures: Conversion) -> Table:
    """What conversions allocate."""
    table = _table(
        "Converting a model on disk: allocated memory at its peak",
        ("model",),
        ("above imports, MiB", "above the interpreter, MiB", "seconds"),
    )
    for each in figures.memory:
        memory = (each.above_imports, each.above_interpreter)
        found = (f"{value / (1 << 20):.0f}" for value in memory)
        table.add_row(f"{each.size / GIB:.2f} GiB, bfloat16", *found, f"{each.seconds:.1f}")
    return table


def conversion_table(figures: Conversion) -> Table:
    """Seconds of a conversion and of plain copies."""
    table = _table("Converting a model in memory: median seconds", ("model",), (*WAYS, "ratio"))
    for each in figures.speed:
        seconds = (f"{each.median(way):.2f}" for way in WAYS)
        table.add_row(f"{each.size / GIB:.2f} GiB, {each.dtype}", *seconds, f"{each.ratio():.2f}")
    return table


def loading_table(figures: Conversion) -> Table:
    """Seconds of BERT into Flax arrays, ours and transformers'."""
    size = figures.loading[0].size
    table = _table(
        f"BERT from a Hugging Face folder into Flax arrays, {size / GIB:.2f} GiB: median seconds",
        ("file",),
        (*LOADERS, "ratios"),
    )
    for each in figures.loading:
        seconds = (f"{each.median(loader):.3f}" for loader in LOADERS)
        ratios = ", ".join(f"{each.over(oracle):.2f}" for oracle in ORACLES)
        table.add_row(each.file, *seconds, ratios)
    return table


def conversion_json(figures: Conversion) -> dict[str, Any]:
    """Every figure, the medians and the ratios."""
    return {
        "memory": [asdict(each) for each in figures.memory],
        "speed": [
            {"median": {way: each.median(way) for way in WAYS}, "ratio": each.ratio()}
            | asdict(each)
            for each in figures.speed
        ],
        "loading": [
            {
                "median": {loader: each.median(loader) for loader in LOADERS},
                "over": {oracle: each.over(oracle) for oracle in ORACLES},
            }
            | asdict(each)
            for each in figures.loading
        ],
    }


def async_json(figures: AsyncSaves) -> dict[str, Any]:
    """Every figure, and the medians."""
    ratios = {
        name: dict(zip(("first", "later"), figures.ratios(name), strict=True))
        for name in CONTENDERS
    }
    return {"copies": ratios, **asdict(figures)}


def planning_table(figures: Sequence[Planning]) -> Table:
    """Seconds and memory of planning."""
    table = _table(
        "Planning a save of 500 tensors, one process",
        ("planner",),
        ("ranks", "plan s", "carry s", "us an item", "peak MB", "stored MB"),
    )
    for each in figures:
        table.add_row(
            each.planner,
            f"{each.ranks:,}",
            f"{each.plan:.3f}",
            f"{each.carry:.3f}",
            f"{each.plan / each.ranks / 500 * 1e6:.2f}",
            f"{each.memory / 1e6:.0f}",
            f"{each.encoded / 1e6:.2f}",
        )
    return table


def bars_table(bars: Iterable[Bar]) -> Table:
    """Which bars are met."""
    table = _table("Bars", ("what",), ("reached", "bar", ""))
    for bar in bars:
        unit = bar.unit if bar.unit == "x" else f" {bar.unit}".rstrip()
        sign = "at least" if bar.at_least else "at most"
        verdict = "[green]met[/]" if bar.met else "[red]missed[/]"
        table.add_row(bar.what, f"{bar.reached:.2f}{unit}", f"{sign} {bar.bar:g}{unit}", verdict)
    return table


def machine(memory_backed: bool) -> dict[str, Any]:
    """What the figures depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory / GIB, 1),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "files": "memory-backed" if memory_backed else "disk, reads from the page cache",
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def speed_json(times: Mapping[str, Times]) -> dict[str, Any]:
    """Every round's seconds, and their medians."""
    return {
        name: {
            "median": {
                "save": each.saved(),
                **{f"load {load}": each.loaded(load) for load in each.loads},
            },
            "rounds": asdict(each),
        }
        for name, each in times.items()
    }


def resharding_json(figures: Mapping[str, Resharding]) -> dict[str, Any]:
    """Every round's seconds, their medians and the bytes."""
    return {name: {"median": each.seconds(), **asdict(each)} for name, each in figures.items()}


def import_line(figure: Import) -> str:
    """The import in words."""
    frameworks = ", ".join(figure.frameworks) or "no framework"
    return f"import xckpt: {figure.seconds:.3f} s, brings {frameworks}"


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def with_part(whole: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run of everything, with those of a later run of some sections in place.

    Example:
        >>> whole = {"state": 1, "speed": 2, "bars": [{"what": "a", "met": False}]}
        >>> with_part(whole, {"state": 9, "speed": 3, "bars": [{"what": "a", "met": True}]})
        {'state': 1, 'speed': 3, 'bars': [{'what': 'a', 'met': True}]}
    """
    described = {"machine", "state"} & whole.keys()
    new = {name: figures for name, figures in part.items() if name not in described}
    bars = {bar["what"]: bar for results in (whole, part) for bar in results.get("bars", ())}
    return {**whole, **new, "bars": list(bars.values())}


def show(console: Console, *parts: Table | str) -> None:
    """Print tables and lines."""
    for part in parts:
        console.print(part)
        console.print()
