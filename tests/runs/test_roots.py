"""A run with a second root, and steps that other libraries have written."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from xckpt.api.run.saves import Rules
from xckpt.cli.commands import commands
from xckpt.policies import EverySteps, Latest, OnSteps, Temporary
from xckpt.storage.location import Location, open_store

_roots = itertools.count()


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(6, float(step)), "step": step}


def numbers(found: list[xckpt.StepRecord]) -> list[int]:
    return [record.number for record in found]


@pytest.fixture(params=["folder", "memory"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "second")
    return f"memory://manager-second-{next(_roots)}"


def two_roots(tmp_path: Path, second: str) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(
        tmp_path / "run",
        save=EverySteps(4),
        keep=Latest(2),
        temporary=Temporary(second, save=EverySteps(1), keep=Latest(2)),
    )


def train(checkpoints: xckpt.CheckpointManager, steps: range) -> None:
    for step in steps:
        assert checkpoints.save(step, state_of(step))


def test_steps_go_to_one_of_two_roots(tmp_path: Path, second: str) -> None:
    with two_roots(tmp_path, second) as checkpoints:
        train(checkpoints, range(11))
    again = two_roots(tmp_path, second)
    assert [(each.number, each.temporary) for each in again.steps()] == [
        (4, False),
        (8, False),
        (9, True),
        (10, True),
    ]
    assert again.restore(state_of(0))["step"] == 10 and again.next_step == 11
    assert again.path(9) == f"{second}/step-00000009"
    assert again.path(11) == str(tmp_path / "run" / "step-00000011")
    assert again.restore(step=4)["step"] == 4
    again.delete(9)
    # A step that a policy of the run wants is kept, though a temporary one is there.
    assert again.save(10, state_of(10), force=True)
    again.wait()
    latest = again.latest()
    assert latest is not None and (latest.number, latest.temporary) == (10, False)
    assert numbers(again.steps()) == [8, 10]


def test_a_step_that_is_done_again_is_one_step(tmp_path: Path, second: str) -> None:
    """Of a run that went back, no older content counts in the place of the newer one."""
    with two_roots(tmp_path, second) as checkpoints:
        train(checkpoints, range(6))
    with two_roots(tmp_path, second) as checkpoints:
        checkpoints.restore(step=3)
        checkpoints._saves.rules = [
            Rules((OnSteps([5]),), (Latest(1),)),
            checkpoints._saves.rules[1],
        ]
        for step in (4, 5):  # 4 was kept, and 5 temporary
            assert checkpoints.save(step, {"step": -step})
        checkpoints.wait()
        assert [(r.number, r.temporary) for r in checkpoints.steps()] == [(3, True), (5, False)]
        for step in (6, 7):
            assert checkpoints.save(step, state_of(step))
    assert [(r.number, r.temporary) for r in two_roots(tmp_path, second).steps()] == [
        (5, False),
        (6, True),
        (7, True),
    ]
    assert two_roots(tmp_path, second).restore(step=5) == {"step": -5}


def test_a_damaged_step_falls_back_to_the_other_root(tmp_path: Path) -> None:
    with two_roots(tmp_path, str(tmp_path / "second")) as checkpoints:
        train(checkpoints, range(6))
    (tmp_path / "second" / "step-00000005" / "w" / "c" / "0").write_bytes(b"")
    with pytest.warns(UserWarning, match="step 4 was restored.*step 5: "):
        assert two_roots(tmp_path, str(tmp_path / "second")).restore()["step"] == 4


def test_a_damaged_temporary_step_goes_once_it_is_kept(tmp_path: Path) -> None:
    second = tmp_path / "second"
    with two_roots(tmp_path, str(second)) as checkpoints:
        train(checkpoints, range(6))
    (second / "step-00000005" / "w" / "c" / "0").write_bytes(b"")
    with two_roots(tmp_path, str(second)) as checkpoints:
        with pytest.warns(UserWarning, match="step 4 was restored.*step 5: "):
            checkpoints.restore()
        assert checkpoints.save(6, state_of(6)) and (second / "step-00000005").exists()
        assert checkpoints.save(5, state_of(-5), force=True)
    assert not (second / "step-00000005").exists() and (second / "step-00000006").exists()
    assert two_roots(tmp_path, str(second)).restore(step=5)["step"] == -5


def test_of_equal_steps_a_temporary_one_stands_in_for_a_damaged_one(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "run" / "4", state_of(4))
    shutil.copytree(tmp_path / "run" / "4", tmp_path / "second" / "4")
    (tmp_path / "run" / "4" / "w" / "c" / "0").write_bytes(b"")
    checkpoints = two_roots(tmp_path, str(tmp_path / "second"))
    assert [each.temporary for each in checkpoints.steps()] == [False]
    for step in (None, 4):
        with pytest.warns(UserWarning, match="step 4 was restored"):
            assert checkpoints.restore(step=step)["step"] == 4
        assert [each.temporary for each in checkpoints.steps()] == [True]


def test_a_temporary_root_that_is_lost_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = tmp_path / "second"
    with two_roots(tmp_path, str(second)) as checkpoints:
        train(checkpoints, range(7))
        checkpoints.wait()
        shutil.rmtree(second)
        assert numbers(checkpoints.steps()) == [0, 4]
        assert checkpoints.restore()["step"] == 4
        train(checkpoints, range(5, 7))  # it is made again
    assert numbers(checkpoints.steps()) == [0, 4, 5, 6]
    shutil.rmtree(second)
    second.write_text("another file")
    with caplog.at_level(logging.WARNING, "xckpt"):
        assert two_roots(tmp_path, str(second)).restore()["step"] == 4
    assert f"are passed over: {second} is a file; a run takes a folder" in caplog.text
    with pytest.raises(xckpt.StorageError, match="is a file; a run takes a folder"):
        xckpt.CheckpointManager(second).latest()


def test_a_failed_kept_save_is_made_up_for_beside_temporary_ones(tmp_path: Path) -> None:
    """To the policies of the run, a temporary save is none."""
    root, second = tmp_path / "run", tmp_path / "second"
    rules = Temporary(second, save=OnSteps([5, 6]))
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(4), temporary=rules)
    checkpoints.save(0, state_of(0))
    checkpoints.wait()
    for step in (5, 6):  # 4 was not offered, so the run saves 5, and the other root 6
        checkpoints.save(step, state_of(step))
        checkpoints.wait()
    assert [(each.number, each.temporary) for each in checkpoints.steps()] == [
        (0, False),
        (5, False),
        (6, True),
    ]


def test_steps_of_other_libraries_are_restored_and_stay(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    root = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it asks for torch.distributed
        dcp.save({"w": torch.full((6,), 3.0)}, checkpoint_id=str(root / "step-3"))
    (root / "step-4").mkdir()  # not committed
    (root / "step-4" / "__0_0.distcp").write_bytes(b"")
    torch.save({"w": torch.full((6,), 5.0)}, root / "epoch=1-step=5.ckpt")
    xckpt.save(root / "2", {"w": np.full(6, 2.0)})
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1)) as checkpoints:
        found = {each.number: each.format for each in checkpoints.steps()}
        assert found == {2: "xckpt", 3: "dcp", 5: "torch"}
        like = {"w": np.zeros(6, np.float32)}
        assert checkpoints.restore(like)["w"][0] == 5 and checkpoints.next_step == 6
        assert checkpoints.restore(like, step=3)["w"][0] == 3
        with pytest.raises(ValueError, match="step 3 was written by another library"):
            checkpoints.delete(3)
        train(checkpoints, range(5, 9))
    # Of two steps 5 the run's was the newer, and has gone by the policy; the other one is there.
    assert numbers(checkpoints.steps()) == [2, 3, 5, 8]
    assert (root / "epoch=1-step=5.ckpt").is_file() and (root / "step-4").is_dir()
    result = CliRunner().invoke(commands, ["ls", str(root)]).stdout.splitlines()
    assert "dcp" in result[1] and result[1].endswith("not the run's")
    assert result[3].endswith("Latest(1)")


def test_steps_of_orbax_are_restored(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with (
        warnings.catch_warnings(),
        ocp.CheckpointManager(tmp_path / "run") as theirs,
    ):
        warnings.simplefilter("ignore")
        for step in (1, 12):
            theirs.save(step, args=ocp.args.StandardSave({"w": np.full(6, float(step))}))
        theirs.wait_until_finished()
    checkpoints = xckpt.CheckpointManager(tmp_path / "run")
    assert [(each.number, each.format) for each in checkpoints.steps()] == [
        (1, "orbax"),
        (12, "orbax"),
    ]
    assert checkpoints.restore({"w": np.zeros(6)})["w"][0] == 12
    # They are read only: a run goes on after them, and neither policies nor `delete` touch them.
    before = files_below(tmp_path / "run")
    with xckpt.CheckpointManager(
        tmp_path / "run", save=EverySteps(1), keep=lambda _: ()
    ) as checkpoints:
        state = checkpoints.restore({"w": np.zeros(6)})
        for step in range(checkpoints.next_step, 16):
            checkpoints.save(step, state)
        for step in (1, 12):
            with pytest.raises(ValueError, match=r"was written by another library .orbax."):
                checkpoints.delete(step)
        checkpoints.save(12, state, force=True)
    assert [each.number for each in checkpoints.steps()] == [1, 12, 15]
    after = files_below(tmp_path / "run")
    assert before.items() <= after.items() and "step-00000015/xckpt.json" in after


def files_below(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def test_in_a_bucket_a_step_of_orbax_needs_its_mark() -> None:
    root = f"memory://manager-orbax-{next(_roots)}"
    store = open_store(Location.parse(root))
    for key in ("3/default/_METADATA", "4/default/_METADATA", "4/commit_success.txt"):
        store.write(key, b"{}").result()
    [found] = xckpt.CheckpointManager(root).steps()
    assert (found.number, found.format) == (4, "orbax")


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_an_item_of_xckpt_in_a_step_of_orbax_is_the_step(place: str, tmp_path: Path) -> None:
    root = str(tmp_path) if place == "folder" else f"memory://manager-items-{next(_roots)}"
    store = open_store(Location.parse(root))
    for step in (3, 5, 7):
        # With what a run knows: Orbax decides all the same what stays.
        xckpt.save(f"{root}/{step}/default", state_of(step), metadata={"run": {"time": 1.0}})
        for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            store.write(f"{step}/{name}", b"{}").result()
    for name in ("metrics/metrics", "data/metadata"):  # items of JSON are no states
        store.write(f"3/{name}", b"{}").result()
    xckpt.save(f"{root}/7/other", state_of(7))  # of two items none is the state
    store.write("5/default/w/c/0", b"").result()
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=lambda _: ()) as checkpoints:
        found = checkpoints.steps()
        assert [(each.number, each.format) for each in found] == [(n, "orbax") for n in (3, 5, 7)]
        assert not any(each.managed for each in found)
        with pytest.warns(UserWarning, match=r"step 3 was restored.*step 7.*step 5"):
            assert checkpoints.restore(state_of(0))["step"] == 3
        assert checkpoints.save(4, state_of(4))
        with pytest.raises(ValueError, match=r"was written by another library .orbax."):
            checkpoints.delete(3)
    assert numbers(checkpoints.steps()) == [3, 4]
    checkpoints.reload()
    assert numbers(checkpoints.steps()) == [3, 4, 5, 7]


def test_restore_into_and_metadata(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=EverySteps(1)) as checkpoints:
        target = state_of(0)
        assert checkpoints.restore_into(target) is None and checkpoints.next_step == 0
        assert checkpoints.restore_with(xckpt.open) is None
        checkpoints.save(1, state_of(1), metadata={"data": ["v2"]})
        checkpoints.save(2, state_of(2))
        with pytest.raises(TypeError, match="a dict without the key 'run'"):
            checkpoints.save(3, state_of(3), metadata={"run": 1})
        bad: Any = {"at": object()}
        with pytest.raises(xckpt.ManifestError, match=r"metadata/at: a .* is not a JSON value"):
            checkpoints.save(3, state_of(3), metadata=bad)
        checkpoints.wait()
        (tmp_path / "step-00000002" / "w" / "c" / "0").write_bytes(b"")
        with pytest.warns(UserWarning, match="step 1 was restored"):
            report = checkpoints.restore_into(target)
        assert report is not None and len(report.loaded) == 2
        assert target["step"] == 1 and target["w"][0] == 1.0 and checkpoints.next_step == 2
        checkpoints.restore_into(target, step=1, select="w", missing="ignore")
        with pytest.warns(UserWarning, match="step 1 was restored"):
            found = checkpoints.restore_with(lambda path: (path, xckpt.load(path, at="w")[0]))
        assert found == (checkpoints.path(1), 1.0) and checkpoints.restored is not None
        assert [skipped.number for skipped in checkpoints.skipped] == [2]
        with pytest.raises(KeyError):  # no damage, so no other step is tried
            checkpoints.restore_with({}.__getitem__)
    user: Any = xckpt.open(tmp_path / "step-00000001").user_metadata
    assert user["data"] == ["v2"] and user["run"]["keep"] == ["All()"]
    listed = json.loads(CliRunner().invoke(commands, ["ls", "--json", str(tmp_path)]).stdout)
    assert listed[0]["kept_by"] == ["All()"]


def test_arguments_of_the_second_root_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Temporary\(keep=\) takes policies"):
        Temporary("second", keep=3)  # type: ignore[arg-type]
    for rate, error in ((0, ValueError), ("fast", TypeError), (True, TypeError)):
        with pytest.raises(error, match="delete_rate"):
            xckpt.CheckpointManager(tmp_path, delete_rate=rate)  # type: ignore[arg-type]
    xckpt.CheckpointManager(tmp_path, delete_rate=np.int64(3))
