"""`xckpt diff`: its lines, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import xckpt
from xckpt.cli.commands import commands


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    first, second = folder / "first", folder / "second"
    xckpt.save(first, {"w": np.zeros((4, 2), np.float32), "step": 3, "old": None})
    xckpt.save(second, {"w": np.ones((4, 2), np.float32), "step": 3, "new": np.zeros(2)})
    return first, second


def test_equal(two: tuple[Path, Path]) -> None:
    result = run("diff", two[0], two[0])
    assert (result.exit_code, result.stderr) == (0, "")
    assert (
        result.stdout == "equal in structure, dtypes and shapes; --values compares contents too\n"
    )
    assert run("diff", two[0], two[0], "--values").stdout == "equal, values included\n"


def test_different(two: tuple[Path, Path]) -> None:
    result = run("diff", *two, "--values")
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [
        "- old: only in the first (None)",
        "+ new: only in the second (float64 [2])",
        "~ w: other elements in 1 of 1 chunks, first in [0, 4) x [0, 2)",
        "3 differences: 1 missing, 1 added, 1 content",
    ]


def test_as_json(two: tuple[Path, Path]) -> None:
    result = run("diff", *two, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["equal"], document["values_compared"]) == (1, False, False)
    assert document["differences"] == [
        {"name": "old", "kind": "missing", "first": "None", "second": ""},
        {"name": "new", "kind": "added", "first": "", "second": "float64 [2]"},
    ]
    assert json.loads(run("diff", two[0], two[0], "--json").stdout)["equal"] is True


def test_a_question_without_an_answer(two: tuple[Path, Path], tmp_path: Path) -> None:
    result = run("diff", two[0], tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"xckpt: {tmp_path} ")
