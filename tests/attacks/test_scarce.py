"""Processes that lack open files, threads or address space: success, or an error that says so.

`tests.attacks.scarce` makes the calls, each in a process that has imported xckpt and nothing else:
what is imported late is imported there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ADVICE = {"files": "ulimit -n", "threads": "threads", "memory": "ulimit -v"}
"""A part of what an error has to say."""


def outcomes(kind: str, amounts: Sequence[int], folder: Path, calls: str = "") -> list[Any]:
    command = [sys.executable, "-m", "tests.attacks.scarce", kind, calls]
    command += [",".join(map(str, amounts))]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(folder)}
    run = subprocess.run(command, capture_output=True, env=environment, timeout=500, check=False)
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(kind: str, amounts: Sequence[int], folder: Path, calls: str = "") -> list[Any]:
    """Each is success or an error of xckpt with advice, and afterwards all is whole."""
    seen = outcomes(kind, amounts, folder, calls)
    assert seen
    for call, amount, outcome, text in seen:
        fair = outcome == "done" or (outcome == "xckpt" and ADVICE[kind] in text)
        assert fair, (call, amount, outcome, text)
    return seen


@pytest.mark.parametrize("calls", ["save", "delete", "manager.restore", "convert,xckpt convert"])
def test_few_files(tmp_path: Path, calls: str) -> None:
    seen = check("files", [0, 1 + ("convert" not in calls)], tmp_path, calls)
    assert seen[0][2] == "xckpt"


def test_no_thread(tmp_path: Path) -> None:
    seen = check("threads", [0], tmp_path, "load,save_async")
    assert {outcome for _, _, outcome, _ in seen} == {"xckpt"}


def test_no_room_for_tensorstore(tmp_path: Path) -> None:
    """To load it there would end the process, or raise an ImportError."""
    seen = check("memory", [50], tmp_path, "save,save_async,load")
    assert {outcome for _, _, outcome, _ in seen} == {"xckpt"}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "amounts"),
    [
        ("files", [*range(9), 10, 13, 20, 40]),
        ("threads", range(12)),
        ("memory", [20, 50, 100, 130, 150, 200, 400, 1200]),
    ],
)
def test_every_call(tmp_path: Path, kind: str, amounts: Sequence[int]) -> None:
    seen = check(kind, amounts, tmp_path)
    assert {outcome for _, _, outcome, _ in seen} == {"done", "xckpt"}
