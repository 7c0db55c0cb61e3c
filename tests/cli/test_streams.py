"""Standard streams that are closed, or where nothing more can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xckpt

COMMAND = [sys.executable, "-c", "from xckpt.cli import main; main()"]


def in_shell(redirected: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Run the command by a shell that redirects its streams; exit code, stdout and stderr."""
    line = ["sh", "-c", f'exec "$@" {redirected}', "sh", *COMMAND, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


OTHERS = [
    pytest.param(each, marks=pytest.mark.thorough) for each in (["--version"], ["ls", "--help"])
]
"""Each case starts the command anew."""


@pytest.mark.parametrize("arguments", [["--help"], *OTHERS])
def test_help_that_cannot_be_written(arguments: list[str]) -> None:
    said = "xckpt: the answer cannot be written: No space left on device\n"
    assert in_shell(">/dev/full", *arguments) == (2, "", said)
    assert in_shell(">&-", *arguments) == (0, "", "")


FAILING = [
    ["ls", "/nowhere"],
    ["--none"],
    *(
        pytest.param(each, marks=pytest.mark.thorough)
        for each in (["ls"], ["ls", "--none"], ["none"])
    ),
]


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize("arguments", FAILING)
def test_a_failure_that_cannot_be_said_has_its_code(redirected: str, arguments: list[str]) -> None:
    assert in_shell(redirected, *arguments) == (2, "", "")


def test_a_warning_that_cannot_be_said_ends_no_command(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "run", {"w": np.arange(3)}, metadata={"loss": 0.5})
    done = in_shell("2>/dev/full", "convert", tmp_path / "run", tmp_path / "out", "--format=dcp")
    assert done == (0, f"{tmp_path / 'out'}: 1 tensor, 24 B\n", "")


def test_who_cannot_be_asked_deletes_nothing(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "run", {"w": np.arange(3)})
    code, _, said = in_shell("<&-", "rm", tmp_path / "run")
    assert code != 0 and "Traceback" not in said
    assert xckpt.exists(tmp_path / "run")


EACH = """
import json, sys
from xckpt.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["xckpt", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code
"""


def test_characters_that_the_encoding_lacks(tmp_path: Path) -> None:
    """Each of these was a traceback; rich wrote them to a stream of ASCII too."""
    path = str(tmp_path / "c")
    xckpt.save(path, {"\N{PARTY POPPER}": np.ones(2), "note": "\N{PARTY POPPER}"})
    lines = [["ls", path], ["info", path, "note"], ["stats", path], ["ls", path, "--json"]]
    done = subprocess.run(
        [sys.executable, "-c", EACH, json.dumps(lines)],
        env=os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    text, _, document = done.stdout.partition("\n[\n")
    assert text.count("\\U0001f389") == 3
    assert json.loads(f"[{document}")[0]["name"] == "\N{PARTY POPPER}"
