"""The steps of a run share what did not change, and each is whole by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from xckpt.cli.commands import commands
from xckpt.policies import EverySteps, Latest


def links(step: Path) -> int:
    return (step / "frozen/c/0").stat().st_nlink


def test_a_run_shares_frozen_weights(tmp_path: Path) -> None:
    frozen = np.random.default_rng(0).standard_normal(100_000)
    with xckpt.CheckpointManager(
        tmp_path, save=[EverySteps(1)], keep=[Latest(3)], full_every=5
    ) as run:
        for step in range(8):
            run.save(step, {"frozen": frozen, "lora": np.full(8, step)})
    steps = [Path(run.path(record.number)) for record in run.steps()]
    # 0 to 4 and 5 to 7 are two files each; 5, which was written in full, is shared by two more.
    assert [links(step) for step in steps] == [3, 3, 3]
    shutil.rmtree(steps[0])
    for number, step in ((6, steps[1]), (7, steps[2])):
        assert xckpt.open(step).verify() == [] and links(step) == 2
        assert xckpt.load(step)["lora"][0] == number


def test_the_first_save_shares_with_what_was_restored(tmp_path: Path) -> None:
    state = {"frozen": np.arange(100_000)}
    with xckpt.CheckpointManager(tmp_path, save=[EverySteps(1)]) as first:
        first.save(0, state)
    with xckpt.CheckpointManager(tmp_path, save=[EverySteps(1)]) as unread:
        unread.save(1, state)
    assert links(Path(unread.path(1))) == 1, "what this process has not read is not a base"
    with xckpt.CheckpointManager(tmp_path, save=[EverySteps(1)]) as second:
        second.save(2, second.restore(state))
        second.wait()
        shutil.rmtree(second.path(2))
        second.save(3, state)
    assert links(Path(second.path(1))) == 1 and links(Path(second.path(3))) == 1


def test_all_saves_may_be_full(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=[EverySteps(1)], full_every=1) as run:
        for step in range(3):
            run.save(step, {"frozen": np.arange(10)})
    assert [links(Path(run.path(step))) for step in range(3)] == [1, 1, 1]


def test_the_commands_show_what_is_shared(tmp_path: Path) -> None:
    state = {"frozen": np.arange(4096.0), "scalar": np.float64(1), "own": np.arange(8)}
    xckpt.save(tmp_path / "1", state)
    xckpt.save(tmp_path / "2", {**state, "own": np.arange(8, 16)}, base=tmp_path / "1")
    listed = CliRunner().invoke(commands, ["ls", str(tmp_path)]).stdout.splitlines()
    assert [line.count("32.1 KiB, 32.0 KiB shared") for line in listed] == [1, 1], listed
    found = json.loads(CliRunner().invoke(commands, ["ls", "--json", str(tmp_path)]).stdout)
    assert [step["shared"] for step in found] == [4096 * 8 + 8] * 2
    info = CliRunner().invoke(commands, ["info", str(tmp_path / "2")]).stdout
    assert "32.1 KiB in 3 chunks, 32.0 KiB shared" in info
    xckpt.delete(tmp_path / "1")
    assert "shared" not in CliRunner().invoke(commands, ["info", str(tmp_path / "2")]).stdout


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (True, TypeError), ("2", TypeError)])
def test_no_number_of_saves(tmp_path: Path, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="full_every"):
        xckpt.CheckpointManager(tmp_path, full_every=value)  # type: ignore[arg-type]
