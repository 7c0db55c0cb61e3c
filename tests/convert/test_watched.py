"""What a conversion takes: a line in the log, the metrics function, and the progress bar."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.api.test_progress_bar import Terminal
from xckpt.convert import Mapping, Rule
from xckpt.convert.run import convert

STATE = {"w": np.zeros((512, 256), np.float32), "step": 3}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("ckpt", ["check", "describe", "plan", "write", "commit"]),
        ("model.safetensors", ["check", "plan", "write", "commit"]),
    ],
)
def test_a_conversion_is_a_line_and_has_its_metrics(
    name: str, steps: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = tmp_path / "source", tmp_path / name
    xckpt.save(source, {"w": STATE["w"]})
    seen: list[xckpt.Metrics] = []
    with caplog.at_level(logging.INFO, "xckpt"):
        convert(source, target, options=xckpt.SaveOptions(metrics=seen.append))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"convert {target}: rank 0 of 1 wrote 0.50 MiB in ")
    assert [(took.operation, took.bytes, took.error) for took in seen] == [("convert", 1 << 19, "")]
    assert list(seen[0].steps) == steps


def test_each_rank_has_its_metrics_whether_or_not_others_have(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "source", STATE)
    seen: list[xckpt.Metrics] = []

    def run(group: ThreadGroup) -> None:
        for name, listens in (("all", True), ("one", group.rank == 1)):
            options = xckpt.SaveOptions(metrics=seen.append if listens else None)
            convert(tmp_path / "source", tmp_path / name, group=group, options=options)

    results(2, run)
    everywhere = [took for took in seen if took.path.endswith("all")]
    assert sorted((took.rank, took.ranks) for took in everywhere) == [(0, 2), (1, 2)]
    assert sum(took.bytes for took in everywhere) == 1 << 19
    assert [took.rank for took in seen if took.path.endswith("one")] == [1]


def test_a_failure_has_its_metrics(tmp_path: Path) -> None:
    seen: list[xckpt.Metrics] = []
    options = xckpt.SaveOptions(metrics=seen.append)
    with pytest.raises(xckpt.NotACheckpointError):
        convert(tmp_path / "none", tmp_path / "ckpt", options=options)
    assert [took.error for took in seen] == ["NotACheckpointError"]


def test_a_bar_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xckpt.save(tmp_path / "source", STATE)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    options = xckpt.SaveOptions(progress=True)
    convert(tmp_path / "source", tmp_path / "ckpt", options=options)
    assert "convert ckpt" in terminal.getvalue() and "KiB" in terminal.getvalue()


def test_a_mapping_of_many_leaves_is_counted_in_leaves_before_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.convert.conversion.MANY_LEAVES", 10)
    xckpt.save(tmp_path / "source", {f"w{n}": np.full(2, n) for n in range(20)})
    seen: list[xckpt.Progress] = []
    rules = [Rule("w{n}", "layers/{n}")]
    options = xckpt.SaveOptions(progress=seen.append)
    convert(tmp_path / "source", tmp_path / "ckpt", mapping=Mapping(rules), options=options)
    leaves = [now.done for now in seen if now.unit == "leaves"]
    assert leaves == sorted(leaves)
    assert leaves[-1] == 20
    assert [now.unit for now in seen[len(leaves) :]] == ["bytes"] * (len(seen) - len(leaves))
    assert seen[-1] == xckpt.Progress(320, 320)
