"""The bars that xckpt has set itself, computed from the figures of one run.

Each bar is a pure function of the figures; a bar whose figures were not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.async_saves import PREPARED, XCKPT, AsyncSaves
from benchmarks.conversion import Conversion
from benchmarks.dcp import RowShard
from benchmarks.deletions import Saves
from benchmarks.deltas import LORA, ON_DISK, UNCHANGED, Delta
from benchmarks.imports import Import
from benchmarks.memory import SAVE, Extra
from benchmarks.oracle_loader import ORACLES
from benchmarks.planning import UNLIKE, Planning
from benchmarks.reshard import Resharding
from benchmarks.speed import Times

MIB = 1 << 20
DCP = ("DCP, 1 thread", "DCP, 2 threads")
RAW = ("TensorStore, 8 MiB chunks", "TensorStore, a chunk a tensor")
THROUGH = "DCP through xckpt"
TORCH = "xckpt, torch"
JAX = "xckpt, JAX"
LIMIT = "plain files, 2 threads"
INTO = "into memory"
MAPPED = "into memory, mapped"
NEW = "new arrays"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar and how far xckpt comes."""

    what: str
    reached: float
    bar: float
    unit: str
    """``x`` for a ratio; otherwise what is counted."""
    at_least: bool
    """Whether more is better."""

    @property
    def met(self) -> bool:
        """Whether the bar is reached."""
        return self.reached >= self.bar if self.at_least else self.reached <= self.bar


def _ratio(what: str, reached: float, bar: float) -> Bar:
    return Bar(what, reached, bar, "x", True)


def _most(what: str, reached: float, bar: float, unit: str) -> Bar:
    return Bar(what, reached, bar, unit, False)


def speed(times: Mapping[str, Times]) -> Iterator[Bar]:
    """Saves and loads against DCP, Orbax, raw TensorStore and the limit."""
    if times.keys() >= {TORCH, *DCP}:
        best = min(times[name].saved() for name in DCP)
        yield _ratio("save: speed over the better DCP", best / times[TORCH].saved(), 1.25)
        best = min(times[name].loaded(INTO) for name in DCP)
        yield _ratio(
            "load into memory: speed over the better DCP", best / times[TORCH].loaded(INTO), 2.5
        )
    yield from through_xckpt(times)
    if times.keys() >= {JAX, "Orbax"}:
        orbax, mine = times["Orbax"], times[JAX]
        yield _ratio("save JAX arrays: speed over Orbax", orbax.saved() / mine.saved(), 4.0)
        yield _ratio(
            "load new JAX arrays: speed over Orbax", orbax.loaded(NEW) / mine.loaded(NEW), 4.0
        )
    if times.keys() >= {TORCH, *RAW}:
        best = min(times[name].saved() for name in RAW)
        yield _ratio("save: share of raw TensorStore's speed", best / times[TORCH].saved(), 1.0)
        best = min(times[name].loaded(way) for name in RAW for way in (INTO, MAPPED))
        yield _ratio(
            "load into memory: share of raw TensorStore's speed",
            best / times[TORCH].loaded(INTO),
            0.85,
        )
    if times.keys() >= {TORCH, LIMIT}:
        limit = times[LIMIT]
        yield _ratio("save: share of the limit's speed", limit.saved() / times[TORCH].saved(), 0.95)
        yield _ratio(
            "load into memory: share of the limit's speed",
            limit.loaded(INTO) / times[TORCH].loaded(INTO),
            0.85,
        )


def through_xckpt(times: Mapping[str, Times]) -> Iterator[Bar]:
    """DCP with xckpt's storage against DCP with its own."""
    if times.keys() >= {THROUGH, *DCP}:
        mine = times[THROUGH]
        best = min(times[name].saved() for name in DCP)
        yield _ratio("DCP through xckpt, save: over the better DCP", best / mine.saved(), 1.25)
        best = min(times[name].loaded(INTO) for name in DCP)
        yield _ratio("DCP through xckpt, load: over the better DCP", best / mine.loaded(INTO), 2.5)


def row_shard(figures: Mapping[str, RowShard]) -> Iterator[Bar]:
    """What a row shard reads through DCP, over the chunks that it touches."""
    if THROUGH in figures:
        mine = figures[THROUGH]
        what = "DCP through xckpt, a row shard: bytes read over chunks touched"
        yield _most(what, mine.read / mine.touched, 1.02, "x")


def resharding(figures: Mapping[str, Resharding]) -> Iterator[Bar]:
    """Rows to columns against DCP, and the bytes read."""
    if "xckpt" not in figures:
        return
    mine = figures["xckpt"]
    if figures.keys() >= set(DCP):
        best = min(figures[name].seconds()["load_columns"] for name in DCP)
        yield _ratio(
            "rows to columns: speed over the better DCP",
            best / mine.seconds()["load_columns"],
            1.0,
        )
    read = mine.read_per_rank()
    worst = max(r / w for r, w in zip(read, mine.wanted, strict=True))
    yield _most("rows to columns: bytes read over wanted, worst rank", worst, 1.1, "x")
    yield _most(
        "rows to columns: bytes read over wanted, host", sum(read) / sum(mine.wanted), 1.1, "x"
    )


def memory(extras: Sequence[Extra]) -> Iterator[Bar]:
    """Memory over the state or the targets."""
    for extra in extras:
        if extra.contender in (TORCH, JAX):
            over = "the state" if extra.work == SAVE else "the targets"
            what = f"extra memory over {over}: {extra.contender}, {extra.work}"
            yield _most(what, extra.anonymous / MIB, 256, "MiB")


def planning(figures: Sequence[Planning]) -> Iterator[Bar]:
    """Planning for 1,024 ranks where no tensor is like another, and its growth."""
    mine = {figure.ranks: figure for figure in figures if figure.planner == UNLIKE}
    if 1024 in mine:
        seconds = mine[1024].plan + mine[1024].carry
        yield _most("planning, 1,024 ranks x 500 tensors", seconds, 1.0, "s")
        yield _most("planning, 1,024 ranks: memory", mine[1024].memory / 1e6, 300, "MB")
    if {1024, 4096} <= mine.keys():
        growth = (mine[4096].plan / mine[1024].plan) / 4
        yield _most("planning: time a rank at 4,096 ranks over that at 1,024", growth, 1.25, "x")


def imports(figure: Import) -> Iterator[Bar]:
    """The import of the package."""
    yield _most("import xckpt", figure.seconds, 0.3, "s")
    yield _most("frameworks that the import brings", len(figure.frameworks), 0, "")


def deletions(figures: Sequence[Saves]) -> Iterator[Bar]:
    """Saves beside a deletion, at the rate of a manager."""
    for each in figures:
        if each.rate is not None:
            yield _most("a save beside a deletion, in saves alone", each.ratio, 1.1, "x")


def conversion(figures: Conversion) -> Iterator[Bar]:
    """Memory and speed of converting a model, and speed over the oracle's own loader."""
    for each in figures.memory:
        what = f"converting {each.size / (1 << 30):.1f} GiB: memory above the interpreter"
        yield _most(what, each.above_interpreter / MIB, 512, "MiB")
    for each in figures.speed:
        yield _ratio(f"converting {each.dtype}: speed of the faster plain copy", each.ratio(), 0.7)
    for each in figures.loading:
        for oracle in ORACLES:
            what = f"BERT from {each.file} into Flax: speed over {oracle}"
            yield _ratio(what, each.over(oracle), 1.0)


def async_saves(figures: AsyncSaves) -> Iterator[Bar]:
    """Blocking in copies of the state, and the memory of a stager that keeps it."""
    for contender in (XCKPT, PREPARED):
        first, later = figures.ratios(contender)
        label = "save_async" if contender == XCKPT else "save_async, prepared stager"
        yield _most(f"{label}: copies that the first save blocks for", first, 1.2, "x")
        yield _most(f"{label}: copies that a later save blocks for", later, 1.2, "x")
    worst = max(figures.jax) * 1e3
    yield _most("save_async of JAX arrays: blocking, the first save too", worst, 20, "ms")
    yield _most(
        "cached stager: copies of the state that it holds", figures.copies_held(), 1.05, "x"
    )
    yield _most("cached stager: growth over 20 saves", figures.growth() / MIB, 16, "MiB")


def deltas(figures: Sequence[Delta]) -> Iterator[Bar]:
    """An unchanged state, and an adapter beside a frozen model."""
    for each in figures:
        if each.case in (UNCHANGED, ON_DISK):
            what = "unchanged state" + (" on a disk" if each.case == ON_DISK else "")
            yield _most(f"{what}: part of a full save's time", each.time_ratio, 0.1, "x")
            part = 100 * each.written_bytes / each.state_bytes
            yield _most(f"{what}: part of its bytes written", part, 1, "%")
        if each.case == LORA:
            more = 100 * (each.written_bytes - each.changed_bytes) / each.state_bytes
            yield _most("adapter: written beyond its own bytes, of the state", more, 1, "%")
