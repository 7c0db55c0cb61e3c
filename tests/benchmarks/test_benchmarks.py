"""The figures of the pages are those kept, and the part on conversions runs and compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bars, oracle_loader, readme, report, run
from benchmarks.conversion import CONTENDERS, Conversion, Memory, Speed
from benchmarks.deletions import Saves
from benchmarks.oracle_loader import FILES, LOADERS, PRETRAINED, XCKPT, Loading

GIB = 1 << 30
FIGURES = Conversion(
    [Memory(4 * GIB, 90 << 20, 100 << 20, 9.0), Memory(8 * GIB, 95 << 20, 600 << 20, 18.0)],
    [Speed("float32", GIB, dict(zip(CONTENDERS, ([1.0], [0.5], [0.8]), strict=True)))],
    [
        Loading(kind, GIB // 2, dict(zip(LOADERS, ([0.2, 0.5, 0.3], [0.1], [1.2]), strict=True)))
        for kind in FILES
    ],
)
"""Invented ones: 300 ms for ours, 100 and 1,200 for the oracle's."""


@pytest.fixture
def kept() -> dict[str, Any]:
    return json.loads(readme.RESULTS.read_text())


def test_the_pages_show_the_results_that_are_kept(kept: dict[str, Any]) -> None:
    text = readme.PAGE.read_text()
    assert readme.updated(text, kept) == text
    short = readme.README.read_text()
    assert readme.updated_readme(short, kept) == short


def test_a_changed_figure_changes_the_pages(kept: dict[str, Any]) -> None:
    kept["speed"]["xckpt, torch"]["median"]["save"] *= 2
    text = readme.PAGE.read_text()
    assert readme.updated(text, kept) != text
    short = readme.README.read_text()
    assert readme.updated_readme(short, kept) != short


def test_figures_of_conversions_are_shown_if_there_are_any(kept: dict[str, Any]) -> None:
    kept.pop("conversion", None)
    without = readme.updated(readme.PAGE.read_text(), kept)
    assert f"{readme.BEGIN_CONVERSION}{readme.END}" in without
    kept["conversion"] = report.conversion_json(FIGURES)
    shown = readme.updated(without, json.loads(json.dumps(kept)))
    assert "| | `model.safetensors` | `pytorch_model.bin` |\n|---|---|---|\n" in shown
    assert "| **xckpt** | 0.30 | 0.30 |\n" in shown
    assert "600 MiB of memory above the interpreter for a model of 8.0 GiB" in shown
    assert "at 0.50 of the speed of a plain copy" in shown
    kept.pop("conversion")
    assert readme.updated(shown, kept) == without


def test_bars_of_conversions_are_held_one_by_one() -> None:
    found = list(bars.conversion(FIGURES))
    assert [bar.met for bar in found] == [True, False, False, *[False, True] * len(FILES)]
    assert [round(bar.reached, 2) for bar in found] == [100, 600, 0.5, 0.33, 4.0, 0.33, 4.0]


def test_the_bar_of_deletions_is_for_the_rate_of_a_manager() -> None:
    found = [Saves(1000.0, [1.0, 2.0, 2.0], [2.1], 5), Saves(None, [1.0], [9.0], 5)]
    [bar] = bars.deletions(found)
    assert bar.met and round(bar.reached, 2) == 1.05
    assert "1.05 x; beside them 2 files/s" in str(found[0])


def test_a_run_of_everything_keeps_the_figures_of_scale(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert run.with_others(path, {"speed": 1}, whole=True) == {"speed": 1}
    path.write_text('{"machine": 1, "speed": 1, "scale": 2, "bars": []}')
    new = {"machine": 3, "speed": 4, "bars": [{"what": "a"}]}
    assert run.with_others(path, new, whole=True) == {**new, "scale": 2}
    assert run.with_others(path, new, whole=False) == {**new, "machine": 1, "scale": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", FILES)
def test_ours_and_the_oracle_load_the_same(kind: str, tmp_path: Path) -> None:
    config = oracle_loader.config_of(quick=True)
    found = Loading(**oracle_loader.measure(tmp_path, kind, config, 2))
    assert [len(found.seconds[loader]) for loader in LOADERS] == [2, 2, 2]
    layer = 4 * (64 * 64 + 64) + 2 * 64 * 128 + 64 + 128 + 4 * 64
    embeddings = (500 + 512 + 2) * 64 + 2 * 64
    assert found.size == 4 * (embeddings + 2 * layer + 64 * 64 + 64)
    assert found.over(PRETRAINED) > 0


def test_a_loader_of_other_arrays_is_named() -> None:
    arrays = {"a": np.ones(3, np.float32), "b": np.zeros(2, np.float32)}
    other = arrays | {"b": -arrays["b"]}
    assert oracle_loader.verify({XCKPT: lambda: arrays, PRETRAINED: lambda: arrays}) == 20
    for wrong in (other, {"a": arrays["a"]}):
        loaders = {XCKPT: lambda: arrays, PRETRAINED: lambda wrong=wrong: wrong}
        with pytest.raises(RuntimeError, match=f"{PRETRAINED} and {XCKPT} differ: b$"):
            oracle_loader.verify(loaders)


@pytest.mark.thorough
def test_the_part_on_conversions_runs(tmp_path: Path) -> None:
    """Small models, as ``python -m benchmarks.run`` has it."""
    output = tmp_path / "results.json"
    output.write_text(json.dumps({"speed": "of a run before", "conversion": "too"}))
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--section", "conversion"]
    places = ["--directory", str(tmp_path), "--output", str(output)]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert results["speed"] == "of a run before"
    figures = results["conversion"]
    assert [set(each["median"]) for each in figures["loading"]] == [set(LOADERS)]
    assert [set(each["median"]) for each in figures["speed"]] == [set(CONTENDERS)]
    [memory] = figures["memory"]
    assert memory["above_interpreter"] > memory["above_imports"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
