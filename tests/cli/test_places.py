"""`xckpt cp`, `xckpt rm` and `xckpt gc`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import xckpt
from xckpt.cli.commands import commands
from xckpt.convert import convert


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "ckpt", {"w": np.ones((4, 2)), "step": 3})
    return tmp_path / "ckpt"


def test_a_copy(saved: Path, tmp_path: Path) -> None:
    result = run("cp", saved, tmp_path / "copy")
    assert (result.exit_code, result.stderr) == (0, "")
    assert xckpt.diff(saved, tmp_path / "copy", values=True) == []
    again = run("cp", saved, tmp_path / "copy")
    assert again.exit_code == 2
    assert again.stderr == (
        f"xckpt: {tmp_path / 'copy'} holds a checkpoint already; pass --overwrite to replace it\n"
    )
    assert run("cp", saved, tmp_path / "copy", "--overwrite").exit_code == 0
    assert run("cp", saved, saved).exit_code == 2
    assert run("cp", tmp_path / "none", tmp_path / "other").exit_code == 2


def test_nothing_is_deleted_unasked(saved: Path) -> None:
    result = run("rm", saved)
    assert result.exit_code == 2
    assert "1 tensor and 1 value, 64 B in 1 chunk; pass --yes" in result.stderr
    assert xckpt.exists(saved)


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 2), ("\x04", 130)])
def test_a_terminal_is_asked(saved: Path, answer: str, code: int) -> None:
    """Ctrl-D, which ends the input, is no answer."""
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    command = [sys.executable, "-m", "xckpt", "rm", str(saved)]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False)
    os.close(theirs)
    os.close(ours)
    assert f"delete {saved}, which holds 1 tensor" in done.stderr
    assert (done.returncode, xckpt.exists(saved)) == (code, code != 0)


def test_deleted_with_yes_but_not_what_is_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    result = run("rm", saved, "--yes")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [path.name for path in saved.iterdir()] == ["notes.txt"]
    for path in (saved, tmp_path, tmp_path / "none"):
        refused = run("rm", path, "--yes")
        assert refused.exit_code == 2 and (saved / "notes.txt").exists()


@pytest.mark.parametrize("name", ["w.safetensors", "."])
def test_which_files_of_another_format_would_go_is_said(saved: Path, name: str) -> None:
    """They may lie among the user's, and the path may be the folder's."""
    mine = saved.parent / "mine"
    mine.mkdir()
    convert(saved, mine / "w.safetensors")
    (mine / "notes.txt").write_text("mine")
    said = "64 B in 1 chunk (format safetensors, 1 file: w.safetensors)"
    assert f"{said}; pass --yes" in run("rm", mine / name).stderr
    deleted = run("rm", mine / name, "--yes")
    assert said in deleted.stdout.replace("\n", " ")
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]


def test_what_was_left_is_listed_and_removed(saved: Path, tmp_path: Path) -> None:
    left = tmp_path / "runs" / ".step.saving-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "data").write_bytes(b"x" * 2048)
    listed = run("gc", tmp_path, "--dry-run", "--older-than", "0s")
    assert listed.exit_code == 0 and left.exists()
    first, last = listed.stdout.splitlines()
    assert re.fullmatch(
        re.escape(str(left)) + r": 2\.0 KiB in 1 file, \d s old: perhaps alive", first
    )
    assert last == f"{tmp_path}: 0 B removed, 2.0 KiB left"
    assert run("gc", tmp_path, "--older-than", "12h").stdout.endswith("0 B removed, 2.0 KiB left\n")
    found = json.loads(run("gc", tmp_path, "--json").stdout)
    assert [(each["path"], each["bytes"]) for each in found] == [(str(left), 2048)]
    removed = run("gc", tmp_path, "--older-than", "0s")
    assert removed.stdout.endswith("2.0 KiB removed, 0 B left\n")
    assert not left.exists() and xckpt.exists(saved)
    wrong = run("gc", tmp_path, "--older-than", "soon")
    assert wrong.exit_code == 2 and "'soon' is not a time: give 90s" in wrong.stderr
    for path in (tmp_path / "nowhere", (tmp_path / "nowhere").as_uri()):
        missing = run("gc", path)
        assert (
            missing.exit_code == 2 and "holds no checkpoints: it does not exist" in missing.stderr
        )
        assert missing.stderr.endswith("check the path\n")
