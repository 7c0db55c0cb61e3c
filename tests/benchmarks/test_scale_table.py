"""The table of scale in the pages has rows for the sections that are there, whatever they hold."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import readme
from benchmarks.scale import __main__ as scale
from benchmarks.scale import readers, tables
from benchmarks.scale.__main__ import SECTIONS, keep
from benchmarks.scale.summary import table

RANK = {"up": [2048 * 9, 50], "down": [1024 * 9, 70], "memory": 1 << 20, "manifest": 2048}
TURNS = [
    {"line": 9, "contender": name, "call": call, "seconds": seconds, "processor": [0.1, 0.3, 0.2]}
    for name, call, seconds in (
        ("xckpt", "save", [1, 2, 3]),
        ("raw TensorStore", "save", [1, 3, 3]),
        ("xckpt", "load into memory", [1, 1, 4]),
        ("raw TensorStore", "load into memory", [2, 2, 2]),
        ("xckpt", "load new arrays", [1, 1, 1]),
        ("a reader", "load new arrays", [2, 2, 9]),
        ("another", "load new arrays", [3, 3, 3]),
    )
]
RESULTS: dict[str, Any] = {
    "scale": [
        {
            "placement": "fsdp",
            "ranks": 10,
            "tensors": 1000,
            "saves": [RANK | {"plan": plan, "commit": 1, "rank": 0.1} for plan in (0.25, 0.01)],
        }
    ],
    "dcp_plans": [
        {"ranks": 10, "tensors": 1000, "cache": cache, "again": again, "plan": 2.5 - cache * again}
        | {"up": 1024.0, "down": 512.0, "manifest": 99}
        for cache in (False, True)
        for again in (False, True)
    ],
    "loads": [
        {"placement": "fsdp", "ranks": 10, "tensors": 1000, "plan": 0.5, "rank": 0.01}
        | {"up": [9, 900, 9], "down": [9, 9 << 20, 99, 9]}
    ],
    "dtensors": [{"ranks": 10240, "tensors": 1000, "first": 0.02, "again": 0.007, "least": 0.006}],
    "leaves": [
        {"contender": name, "count": count, "save": 1.26, "load": 2.0, "open": 0.5, "ls": -1.0}
        | {"files": 1234, "memory": 1 << 20}
        for name, count in (("xckpt, torch", 9), ("DCP, 1 thread", 9), ("Orbax", 3))
    ],
    "bucket": [
        {"state": state, "call": call, "requests": 9000, "chain": 4, "seconds": 1, "kinds": {}}
        | {"rounds": rounds, "rounds_without_limits": rounds and 3}
        for state, rounds in (("small", 3), ("large", 5))
        for call in ("save", "load", "raw save", "raw load")
    ],
    "line": TURNS,
    "hosts": [
        {"hosts": 16, "alone_seconds": 7, "alone_times": 16, "once_seconds": 2, "once_times": 1}
    ],
}


def printed(shown: Table) -> str:
    console = Console(width=120)
    with console.capture() as said:
        console.print(shown)
    return said.get()


def test_a_case_that_is_measured_again_takes_the_place_of_its_figures(tmp_path: Path) -> None:
    path, (old,) = tmp_path / "results.json", RESULTS["scale"]
    path.write_text(json.dumps({"scale": [old], "leaves": []}))
    gathered, alone = ({**old, "gathered": known, "saves": []} for known in (True, False))
    for figures in (gathered, alone, alone):
        keep(path, "scale", [figures])
    assert json.loads(path.read_text()) == {"scale": [gathered, alone], "leaves": []}


def test_ranks_that_plan_alone_have_rows_of_their_own() -> None:
    (case,) = RESULTS["scale"]
    said = table({"scale": [case, case | {"gathered": False, "tensors": 2000}]})
    assert "plan 10 ranks x 2,000 tensors, each rank alone: first save, again, s" in said
    assert said.count("commit") == 1 and "| its commit, s | 1.00, 1.00 |" in said
    assert "but for its writing, s | 0.100, 0.100 |" in said


def test_all_rows() -> None:
    said = table(RESULTS)
    plan = "| plan 10 ranks x 1,000 tensors, the coordinator: first save, again, s | 0.25, 0.01 "
    assert f"{plan}| DCP 2.50, 2.50; its plan cache 2.50, 1.50 |\n" in said
    assert "KiB | 3.0, 3.0 | DCP 1.5, 1.5; its plan cache 1.5, 1.5 |\n" in said
    assert "a load by 10 ranks x 1,000 tensors: the coordinator, s | 0.50 |  |\n" in said
    assert "9 leaves of 1 to 4 KiB, s | 1.3, 2.0 | DCP 1.3, 2.0; Orbax 1.3, 2.0 (3 leaves)" in said
    assert "requests | 9,000, 9,000 | raw TensorStore 9,000, 9,000 |\n" in said
    assert "one after the other | 3, 3 | raw TensorStore 3, 3 |\n" in said
    assert "| 5, 5 (without limits 3, 3) | raw TensorStore 5, 5 (without limits 3, 3) |" in said
    assert "wall s | 2.00, 1.00 | raw TensorStore 3.00, 2.00 |\n" in said
    assert "| 1.00 | the best of 2 readers of safetensors, a reader: 2.00 |\n" in said
    assert "over the state's | 1.00 | each alone 16.00 |\n" in said


def test_a_section_that_is_not_there_has_no_rows() -> None:
    assert table({"amplification": []}) == ""
    for some in combinations(RESULTS, 2):
        rows = table({name: RESULTS[name] for name in some} | {"other": 1}).splitlines()
        assert all(row.count("|") == 4 for row in rows[2:])
    without = {**RESULTS, "dcp_plans": [], "line": TURNS[:5]}
    assert "first save, again, s | 0.25, 0.01 |  |\n" in table(without)
    assert "readers of safetensors" not in table(without)
    free = [turns | {"line": 0} for turns in TURNS]
    assert "on the same machine, s | 0.20, 0.20 | raw" in table({"line": free})


@pytest.mark.parametrize("section", RESULTS)
def test_each_section_has_a_table_for_the_terminal(section: str) -> None:
    assert len(printed(SECTIONS[section][1](RESULTS[section])).splitlines()) > 4


def test_a_ratio_of_each_round_is_taken() -> None:
    lines = printed(tables.line(TURNS)).splitlines()
    [raw] = [line for line in lines if "load into memory" in line and "raw" in line]
    assert "2.00 x" in raw


def test_what_is_kept_is_what_the_readme_says() -> None:
    kept = json.loads(readme.RESULTS.read_text())
    said = readme.README.read_text()
    assert table(kept) in said
    assert readme.updated_readme(said, kept | {"hosts": RESULTS["hosts"]}) != said


def test_readers_that_are_not_installed_are_named() -> None:
    assert not set(readers.absent()) & set(readers.installed())
    assert len(readers.absent()) + len(readers.installed()) == 5


def test_ranks_plan_alone_where_they_know_all_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last case they know too many boxes: there the simulator ended in a PlanError."""

    def apart(case: tuple[str, int, int], *, gathered: bool) -> dict[str, object]:
        return {"case": case, "gathered": gathered}

    monkeypatch.setattr(scale, "_apart", apart)
    ways = {case: [each["gathered"] for each in scale._both_ways(case)] for case in scale.CASES}
    alone = {case for case, gathered in ways.items() if gathered == [True, False]}
    assert alone == {case for case in scale.CASES if case[0] in ("fsdp", "mesh", "hsdp", "ddp")}
    assert ways["unlike", 1024, 1000] == [True]
