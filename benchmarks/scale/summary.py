"""The short table of scale in the pages: rows for those sections of the results that are there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.scale.hosts import RATE

Figures = Sequence[Mapping[str, Any]]

SPENT = (("commit", ".2f"), ("rank", ".3f"))
"""What of a save by ranks that plan alone is shown besides, and its digits."""


def table(results: Mapping[str, Any]) -> str:
    """The table, Markdown; empty without any of its sections."""
    rows = [row for what, make in _ROWS.items() if what in results for row in make(results)]
    if not rows:
        return ""
    head = "How it grows (processor seconds of one process, where nothing else is said):"
    return "\n".join([head, "", "| | **xckpt** | beside it |", "|---|---|---|", *rows, ""])


def _row(what: str, ours: str, beside: str) -> str:
    return f"| {what} | {ours} | {beside} |"


def _plans(results: Mapping[str, Any]) -> Iterator[str]:
    cases = [case for case in results["scale"] if case["placement"] == "fsdp"]
    for case in sorted(cases, key=lambda case: case["ranks"] * case["tensors"]):
        size = case["ranks"], case["tensors"]
        others = [
            each
            for each in results.get("dcp_plans", [])
            if (each["ranks"], each["tensors"]) == size
        ]
        beside = (
            f"DCP {_each(others, False, 'plan')}; its plan cache {_each(others, True, 'plan')}"
            if others
            else ""
        )
        ours = ", ".join(f"{save['plan']:.2f}" for save in case["saves"])
        alone = case.get("gathered") is False
        who = "each rank alone" if alone else "the coordinator"
        what = f"plan {size[0]:,} ranks x {size[1]:,} tensors, {who}: first save, again"
        yield _row(f"{what}, s", ours, beside)
        if alone:
            commits, ranks = (", ".join(f"{s[k]:{f}}" for s in case["saves"]) for k, f in SPENT)
            yield _row("its commit, s", commits, "")
            yield _row("any other rank's part of these saves, but for its writing, s", ranks, "")
        if others:
            moved = ", ".join(f"{_moved(case, save):.1f}" for save in case["saves"])
            beside = "; its plan cache ".join(_each(others, kept, "up") for kept in (False, True))
            yield _row(
                "the same: sent and received by each other rank, KiB", moved, f"DCP {beside}"
            )


def _each(figures: Figures, cache: bool, what: str) -> str:
    """DCP's first and second save, with its cache or without: seconds, or KiB both ways."""
    found = [each for each in figures if each["cache"] == cache]
    if what == "plan":
        return ", ".join(f"{each['plan']:.2f}" for each in found)
    return ", ".join(f"{(each['up'] + each['down']) / 1024:.1f}" for each in found)


def _moved(case: Mapping[str, Any], save: Mapping[str, Any]) -> float:
    """KiB of a rank; without the last collective, in which is said what was written."""
    return sum(sum(save[way][:-1]) for way in ("up", "down")) / (case["ranks"] - 1) / 1024


def _loads(results: Mapping[str, Any]) -> Iterator[str]:
    most = max(results["loads"], key=lambda load: load["ranks"] * load["tensors"])
    size = f"{most['ranks']:,} ranks x {most['tensors']:,} tensors"
    yield _row(f"plan a load by {size}: the coordinator, s", f"{most['plan']:.2f}", "")
    yield _row("any other rank's part, but for its reading, s", f"{most['rank']:.3f}", "")


def _dtensors(results: Mapping[str, Any]) -> Iterator[str]:
    most = max(results["dtensors"], key=lambda each: each["ranks"] * each["tensors"])
    what = f"describe {most['tensors']:,} DTensors of {most['ranks']:,} ranks: first save, again, s"
    yield _row(what, f"{most['first']:.3f}, {most['again']:.3f}", "")


def _leaves(results: Mapping[str, Any]) -> Iterator[str]:
    ours, *others = results["leaves"]
    what = f"{ours['count']:,} leaves of 1 to 4 KiB"
    beside = [
        f"{_name(each)} {each['save']:.1f}, {each['load']:.1f}{_fewer(each, ours)}"
        for each in others
    ]
    yield _row(
        f"save, load {what}, s", f"{ours['save']:.1f}, {ours['load']:.1f}", "; ".join(beside)
    )
    files = [f"{_name(each)} {each['files']:,}{_fewer(each, ours)}" for each in others]
    yield _row("files of them", f"{ours['files']:,}", "; ".join(files))


def _name(figure: Mapping[str, Any]) -> str:
    return str(figure["contender"]).partition(",")[0]


def _fewer(figure: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    return "" if figure["count"] == ours["count"] else f" ({figure['count']:,} leaves)"


def _requests(results: Mapping[str, Any]) -> Iterator[str]:
    for state, what in (("small", "3,000 leaves of 2 KiB"), ("large", "100 x 4 MiB")):
        calls = {each["call"]: each for each in results["bucket"] if each["state"] == state}
        if not calls:
            continue
        ours, raw = (
            ", ".join(f"{calls[before + call]['requests']:,}" for call in ("save", "load"))
            for before in ("", "raw ")
        )
        yield _row(f"save, load {what} in a bucket: requests", ours, f"raw TensorStore {raw}")
        raw = _rounds(calls, "raw save", "raw load")
        beside = f"raw TensorStore {raw}" if raw else ""
        yield _row("its round trips, one after the other", _rounds(calls, "save", "load"), beside)


def _rounds(calls: Mapping[str, Any], *names: str) -> str:
    """How often some calls wait, and how often they would without limits, if that is less."""
    by_limits = [
        ", ".join(f"{calls[name][key]:,}" for name in names if calls[name][key])
        for key in ("rounds", "rounds_without_limits")
    ]
    default, free = by_limits
    return default if free in ("", default) else f"{default} (without limits {free})"


def _line(results: Mapping[str, Any]) -> Iterator[str]:
    """Wall seconds where the line is the limit, else processor seconds: the machine is it there."""
    for line in sorted({each["line"] for each in results["line"]}, reverse=True):
        turns = [each for each in results["line"] if each["line"] == line]
        clock, unit = ("seconds", "wall s") if line else ("processor", "s")
        where = f"a bucket of {line} MiB/s" if line else "a bucket on the same machine"
        spent = {(each["call"], each["contender"]): median(each[clock]) for each in turns}
        ours, raw = (
            ", ".join(f"{spent[call, name]:.2f}" for call in ("save", "load into memory"))
            for name in ("xckpt", "raw TensorStore")
        )
        yield _row(f"save, load 100 x 4 MiB in {where}, {unit}", ours, f"raw TensorStore {raw}")
        new = {name: took for (call, name), took in spent.items() if call == "load new arrays"}
        mine = new.pop("xckpt")
        if new:
            best = min(new, key=lambda name: new[name])
            beside = f"the best of {len(new)} readers of safetensors, {best}: {new[best]:.2f}"
            yield _row(f"load them into new arrays, {unit}", f"{mine:.2f}", beside)


def _hosts(results: Mapping[str, Any]) -> Iterator[str]:
    most = max(results["hosts"], key=lambda load: load["hosts"])
    what = f"bytes that {most['hosts']} hosts read, one replica each, over the state's"
    yield _row(what, f"{most['once_times']:.2f}", f"each alone {most['alone_times']:.2f}")
    what = f"their wall s, from a bucket of {RATE / (1 << 20):.0f} MiB/s"
    yield _row(what, f"{most['once_seconds']:.2f}", f"each alone {most['alone_seconds']:.2f}")


_ROWS = {
    "scale": _plans,
    "loads": _loads,
    "dtensors": _dtensors,
    "leaves": _leaves,
    "bucket": _requests,
    "line": _line,
    "hosts": _hosts,
}
"""Section of the results -> its rows."""
