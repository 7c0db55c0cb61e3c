"""What the demo prints at its end: tensors and their shardings, bytes and seconds, the verdict."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples import phase
from examples.phase import Check, Layout, Report

MIB = 2**20


def sharding_table(start: Report, reshard: Report, resume: Report, *, every: bool) -> Table:
    """Each tensor before, between and after; alike ones share a row unless `every`."""
    table = Table(title="Tensors and their shardings", title_justify="left", show_lines=not every)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("MiB", justify="right")
    for mesh in (
        "4 torch ranks\nmesh dp 2, tp 2",
        "8 JAX devices\nmesh data 2, model 4",
        "3 torch ranks\nmesh dp 3",
    ):
        table.add_column(f"{mesh}\nsharding, shards")
    reports = (start, reshard, resume)
    for names in _rows(reports, every=every):
        first = start.layouts[names[0]]
        more = f"\n… and {len(names) - 1} like it" if len(names) > 1 else ""
        table.add_row(
            names[0] + more,
            _size(first.shape) or "scalar",
            f"{sum(start.layouts[name].nbytes for name in names) / MIB:.2f}",
            *(_cell(report.layouts.get(names[0])) for report in reports),
        )
    table.caption = (
        f"{len(start.layouts)} tensors, {_nbytes(start) / MIB:.1f} MiB, all float32. "
        "S(0): cut by rows; S(1): by columns; _S(0, 2): the rows of each tp half cut again; "
        "R: a copy each."
    )
    table.caption_justify = "left"
    return table


def _rows(reports: tuple[Report, ...], *, every: bool) -> list[list[str]]:
    """Names of tensors, together where shape and all three shardings agree."""
    names = list(reports[0].layouts)
    if every:
        return [[name] for name in names]
    rows: dict[str, list[str]] = {}
    for name in names:
        alike = str([report.layouts.get(name) for report in reports])
        rows.setdefault(alike, []).append(name)
    return list(rows.values())


def _cell(layout: Layout | None) -> str:
    if layout is None:
        return "[red]missing[/red]"
    shards = ", ".join(_size(shard) or "1" for shard in layout.shards)
    uneven = " [yellow]uneven[/]" if len(layout.shards) > 1 else ""
    return f"{layout.sharding}\n{shards}{uneven}"


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _nbytes(report: Report) -> int:
    return sum(layout.nbytes for layout in report.layouts.values())


def time_table(folder: Path, start: Report, reshard: Report, resume: Report) -> Table:
    """Bytes of the tensors, bytes of the checkpoint's files, and seconds, per save and load."""
    table = Table(title="Bytes and seconds", title_justify="left")
    for header in ("", "state, MiB", "files, MiB", "seconds", "MiB/s"):
        table.add_column(header, justify="right" if header else "left")
    for who, report, verb, checkpoint in (
        ("4 torch ranks save", start, "save", phase.FROM_TORCH),
        ("JAX loads", reshard, "load", phase.FROM_TORCH),
        ("JAX saves", reshard, "save", phase.FROM_JAX),
        ("3 torch ranks load", resume, "load", phase.FROM_JAX),
    ):
        state = _nbytes(report) / MIB
        files = _file_bytes(folder / checkpoint) / MIB
        seconds = report.seconds[verb]
        figures = f"{state:.1f}", f"{files:.1f}", f"{seconds:.2f}", f"{state / seconds:.0f}"
        table.add_row(who, *figures)
    return table


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def loss_table(start: Report, resume: Report) -> Table:
    """The loss of each step, in the run that went on and in the one that was resumed."""
    table = Table(title="Loss of the global batch", title_justify="left")
    for header in ("step", "4 torch ranks, uninterrupted", "3 torch ranks, resumed", "difference"):
        table.add_column(header, justify="right")
    for step, loss in start.losses.items():
        resumed = resume.losses.get(step)
        further = ("", "") if resumed is None else (f"{resumed:.9f}", f"{abs(resumed - loss):.1e}")
        table.add_row(str(step), f"{loss:.9f}", *further)
    return table


def print_verdict(console: Console, checks: Iterable[Check]) -> bool:
    """Print each check and the verdict; True if all passed."""
    passed = True
    for check in checks:
        passed &= check.passed
        word = "[bold green]PASS[/]" if check.passed else "[bold red]FAIL[/]"
        console.print(f"{word}  {check.claim}\n      {check.detail}")
    return passed
