"""`xckpt cat`, `head` and `stats`: what a leaf holds."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

import xckpt
from xckpt.cli.commands import commands

W = np.arange(40 * 60, dtype=np.float32).reshape(40, 60)
HALF = np.arange(7).astype(ml_dtypes.bfloat16)
TEXT = "naïve\n\x1b[31m"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("elements") / "ckpt"
    state = {
        "model": {"w": W, "half": HALF, "none": np.zeros((0, 3)), "one": np.int8(5)},
        "nan": np.array([np.nan, 1.0, np.inf]),
        "text": TEXT,
        "raw": b"\x00\xff",
        "step": 7,
    }
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=256))
    return path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model/w"], W),
        (["model/w", "--box", "3:9, -5:"], W[3:9, -5:]),
        (["model/half", "--box", "2"], HALF[2]),
        (["model/none"], W[:0]),
        (["model/one"], np.int8(5)),
    ],
)
def test_a_pipe_gets_the_bytes(saved: Path, arguments: list[str], expected: np.ndarray) -> None:
    result = run("cat", saved, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == expected.tobytes()


def test_values_as_bytes_and_as_text(saved: Path) -> None:
    assert run("cat", saved, "text").stdout_bytes == TEXT.encode()
    assert run("cat", saved, "raw").stdout_bytes == b"\x00\xff"
    assert run("cat", saved, "step").stdout == "7\n"
    assert run("cat", saved, "text", "--text").stdout == "'naïve\\n\\x1b[31m'\n"


def test_text_shows_the_edges(saved: Path) -> None:
    lines = run("cat", saved, "model/w", "--text").stdout.splitlines()
    assert len(lines) == 8 and lines[3] == " ..." and lines[-1] == "float32 [40, 60]"
    assert [float(word) for word in lines[6].strip(" []").split() if word != "..."] == [
        *W[39, :3],
        *W[39, -3:],
    ]
    assert run("head", saved, "model/half", "-n", "2").stdout == "[0 1]\nbfloat16 [2]\n"
    assert run("head", saved, "model/one").stdout == "5\nint8 []\n"
    assert run("head", saved, "model/none").stdout.endswith("float64 [0, 3]\n")


def test_a_terminal_gets_text(saved: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "xckpt", "cat", str(saved), "model/half"]
    subprocess.run(command, stdout=theirs, stdin=subprocess.DEVNULL, check=True)
    os.close(theirs)
    assert os.read(ours, 1000).split() == [b"[0", *b"1 2 3 4 5 6]".split(), b"bfloat16", b"[7]"]
    os.close(ours)


def test_what_cannot_be_shown(saved: Path) -> None:
    result = run("cat", saved, "model/v")
    assert result.exit_code == 2
    assert "has no leaf 'model/v'" in result.stderr
    assert run("cat", saved, "model/w", "--box", "1:2:3").exit_code == 2
    assert run("cat", saved, "step", "--box", "1").exit_code == 2
    assert "no tensor" in run("stats", saved, "step").stderr


def test_stats(saved: Path) -> None:
    result = run("stats", saved, "model/w", "model/h*", "nan", "step")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows == [
        ["leaf", "dtype", "elements", "min", "max", "mean", "NaN", "infinite"],
        ["model/w", "float32", "2,400", "0", "2399", "1199.5", "0", "0"],
        ["model/half", "bfloat16", "7", "0", "6", "3", "0", "0"],
        ["nan", "float64", "3", "1", "1", "1", "1", "1"],
    ]
    [row] = json.loads(run("stats", saved, "nan", "--json").stdout)
    assert row["shape"] == [3]
    assert (row["nans"], row["infinities"], row["least"], row["mean"]) == (1, 1, 1.0, 1.0)


def test_an_int_of_any_length_is_shown(tmp_path: Path) -> None:
    """Python refuses to write an int of more than 4,300 digits in decimal."""
    long, longer = (1 << 20_000) - 1, (1 << 400_000) - 1
    for path, numbers in (
        (tmp_path / "a", (long, longer)),
        (tmp_path / "b", (long + 1, longer - 1)),
    ):
        xckpt.save(path, dict(zip(("long", "longer"), numbers, strict=True)))
    for command in ("cat", "head", "info"):
        for name in ("long", "longer"):
            result = run(command, tmp_path / "a", name)
            assert result.exit_code == 0 and "0xffff" in result.stdout, result.exception
    result = run("diff", "--values", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1 and "longer: 0xffff" in result.stdout
    with pytest.raises(xckpt.TreeMismatchError, match="long: the checkpoint holds 0xffff"):
        xckpt.load(tmp_path / "a", {"long": np.zeros((), np.int8), "longer": 0}, cast=True)
