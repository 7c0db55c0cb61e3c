"""What docs/runs.md shows is so: its code runs, and its tables name every policy."""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import xckpt
from xckpt import policies
from xckpt.cli.commands import commands

PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    with chdir(tmp_path):
        for language, code in BLOCKS:
            if language == "python":
                exec(compile(code, "docs/runs.md", "exec"), names)
            elif language == "sh":
                _, *arguments = shlex.split(code)
                result = CliRunner().invoke(commands, arguments)
                assert result.exit_code == 0 and result.stdout.count("loss=") == 5
        exec(compile(BLOCKS[0][1], "docs/runs.md", "exec"), names)
        assert names["checkpoints"].next_step == 96
        user: Any = xckpt.open("run/step-00000095").user_metadata
    [example] = [json.loads(code) for language, code in BLOCKS if language == "json"]
    assert user.keys() == example.keys() and user["run"].keys() == example["run"].keys()


def the_loop() -> ast.With:
    """The training loop of the page, without what stands before it."""
    code = next(code for language, code in BLOCKS if language == "python")
    [loop] = [each for each in ast.parse(code).body if isinstance(each, ast.With)]
    return loop


def test_the_loop_takes_six_lines() -> None:
    statements = [each for each in ast.walk(the_loop()) if isinstance(each, ast.stmt)]
    own = [each for each in statements if ast.unparse(each) == "loss = train(state)"]
    assert len(own) == 1 and len(statements) - len(own) == 6


def test_the_six_lines_end_at_a_signal_and_go_on_where_they_ended(tmp_path: Path) -> None:
    code = compile(ast.Module([the_loop()], []), "docs/runs.md", "exec")
    trained: list[float] = []

    def train(state: dict[str, Any]) -> float:
        state["w"] += 1
        trained.append(float(state["w"][0]))
        if len(trained) == 13:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    names = {each: getattr(policies, each) for each in policies.__all__}
    before = signal.signal(signal.SIGTERM, lambda number, _: None)
    try:
        with chdir(tmp_path):
            for last in (12, 99):
                names |= {"xckpt": xckpt, "train": train, "state": {"w": np.zeros(2)}}
                exec(code, names)
                latest = names["checkpoints"].latest()
                assert latest.number == (12 if last == 12 else 95)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trained == [*range(1, 101)]


def test_every_policy_is_on_the_page() -> None:
    named = set(re.findall(r"`(?:xckpt\.policies\.)?([A-Z]\w+)\b", PAGE))
    others = {"StepRecord", "SavePolicy", "KeepPolicy"}
    assert set(policies.__all__) - others <= named
