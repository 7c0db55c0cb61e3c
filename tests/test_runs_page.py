"""What docs/runs.md shows is so: its code runs, and its tables name every policy."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

from click.testing import CliRunner

import xckpt
from xckpt import policies
from xckpt.cli.commands import commands

PAGE = (Path(__file__).parents[1] / "docs" / "runs.md").read_text(encoding="utf-8")
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


def test_every_policy_is_on_the_page() -> None:
    named = set(re.findall(r"`(?:xckpt\.policies\.)?([A-Z]\w+)\b", PAGE))
    others = {"StepRecord", "SavePolicy", "KeepPolicy"}
    assert set(policies.__all__) - others <= named
