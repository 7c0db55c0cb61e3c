"""Runs whose root this user may read and not write, or that lies where no folder can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.support.unprivileged import permissions_hold
from xckpt.cli.commands import commands
from xckpt.policies import All, Best, EverySteps, Latest, Temporary

ALWAYS = EverySteps(1)


def state_of(step: int) -> dict[str, object]:
    return {"w": np.full(6, float(step)), "step": step}


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    """A run of three steps that may be read, and not be written."""
    root = tmp_path / "run"
    with xckpt.CheckpointManager(root, save=ALWAYS) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state_of(step), {"loss": 1.0 + step})
    for each in [root, *filter(Path.is_dir, root.rglob("*"))]:
        each.chmod(0o555)
    with permissions_hold():
        yield root
    for each in [root, *filter(Path.is_dir, root.rglob("*"))]:
        each.chmod(0o755)


def test_a_run_that_may_only_be_read_is_listed_and_restored(saved: Path) -> None:
    with xckpt.CheckpointManager(saved, save=ALWAYS, keep=[Latest(1), Best("loss")]) as run:
        assert [each.number for each in run.steps()] == [0, 1, 2]
        latest, best = run.latest(), run.best()
        assert latest is not None and latest.number == 2
        assert best is not None and best.number == 0
        assert run.restore()["step"] == run.restore(state_of(9))["step"] == 2
        state = state_of(9)
        run.restore_into({"w": state["w"]}, step=1, unexpected="ignore")
        assert np.all(np.asarray(state["w"]) == 1)
    listed = CliRunner().invoke(commands, ["ls", str(saved), "--json"], catch_exceptions=False)
    assert listed.exit_code == 0
    assert [each["number"] for each in json.loads(listed.output)] == [0, 1, 2]


def test_a_first_save_names_the_root_that_may_not_be_written(saved: Path) -> None:
    run = xckpt.CheckpointManager(saved, save=ALWAYS, keep=Latest(1))
    words = f"{saved}: no step can be saved: this user may not write to {saved}: check its"
    for step in (3, 4):
        with pytest.raises(xckpt.StorageError) as raised:
            run.save(step, state_of(step))
        assert str(raised.value).startswith(words)
    run.wait()
    assert [each.number for each in run.steps()] == [0, 1, 2]
    below = xckpt.CheckpointManager(saved / "a" / "run", save=ALWAYS)
    with pytest.raises(xckpt.StorageError, match=f"{saved}/a/run: no step .* write to {saved}:"):
        below.save(0, state_of(0))


def test_a_temporary_root_that_may_not_be_written_is_named(saved: Path, tmp_path: Path) -> None:
    second = Temporary(saved, save=ALWAYS, keep=All())
    run = xckpt.CheckpointManager(tmp_path / "kept", save=EverySteps(2), temporary=second)
    assert run.save(4, state_of(4))
    with pytest.raises(xckpt.StorageError, match=f"{saved}: no step can be saved"):
        run.save(5, state_of(5))
    run.wait()
    assert [each.number for each in run.steps()] == [0, 1, 2, 4]


def test_a_step_that_may_be_written_is_saved_in_a_root_that_may_not(saved: Path) -> None:
    for folder in [saved / "step-00000002", *(saved / "step-00000002").rglob("*")]:
        folder.chmod(0o755)
    run = xckpt.CheckpointManager(saved, save=ALWAYS)
    assert run.save(2, state_of(7), force=True)
    run.wait()
    assert run.restore(step=2)["step"] == 7


@pytest.mark.parametrize("below", ["file", "file/run", "file/a/run"])
def test_a_root_at_or_below_a_file_is_refused_when_the_manager_is_made(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").write_text("mine")
    is_it = "is" if below == "file" else f"lies below {tmp_path}/file, which is"
    words = f"^{tmp_path}/{below} {is_it} a file; a run takes a folder"
    with pytest.raises(xckpt.StorageError, match=words):
        xckpt.CheckpointManager(tmp_path / below)


def test_a_save_below_a_file_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(xckpt.StorageError, match=r"Not a directory.*choose another path"):
        xckpt.save(tmp_path / "file" / "a" / "ckpt", state_of(0))


def test_a_second_root_that_becomes_a_file_during_the_run_is_named(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    second = Temporary(fast, save=ALWAYS, keep=Latest(1))
    checkpoints = xckpt.CheckpointManager(tmp_path / "run", save=EverySteps(9), temporary=second)
    fast.write_text("mine")
    with pytest.raises(xckpt.StorageError, match=f"^{fast} is a file; a run takes a folder"):
        checkpoints.save(1, state_of(1))
    fast.unlink()
    assert checkpoints.save(1, state_of(1))
    checkpoints.wait()
    assert checkpoints.restore()["step"] == 1
