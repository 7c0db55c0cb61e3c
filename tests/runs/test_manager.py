"""A run of checkpoints in one process: saved, kept, deleted and restored, whatever fails."""

from __future__ import annotations

import contextlib
import cProfile
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.support.fork_server import context
from tests.support.servers import environment, new_place, s3
from tests.support.stored import DOCUMENT
from xckpt.cli.commands import commands
from xckpt.policies import All, Best, EverySteps, Latest, Moment, OnPreemption, OnSteps
from xckpt.storage import run_steps
from xckpt.storage.commit.remove import Hidden
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "s3"]

ALWAYS = EverySteps(1)


@pytest.fixture(params=["folder", "memory", "s3"])
def root(request: pytest.FixtureRequest) -> str:
    return new_place(request)


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(6, float(step)), "step": step}


def numbers(found: list[xckpt.StepRecord]) -> list[int]:
    return [record.number for record in found]


def train(checkpoints: xckpt.CheckpointManager, steps: range, **losses: float) -> None:
    for step in steps:
        loss = losses.get(f"at{step}", 1.0 + step)
        checkpoints.save(step, state_of(step), {"loss": np.float32(loss)})


def damage(path: Path) -> None:
    """Change a byte of the tensor."""
    chunk = path / "w" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)


def test_a_run_is_saved_kept_and_resumed(root: str) -> None:
    keep = [Latest(2), Best("loss", 1), OnSteps([4])]
    with xckpt.CheckpointManager(root, save=[EverySteps(2)], keep=keep) as checkpoints:
        assert checkpoints.next_step == 0 and checkpoints.latest() is None
        assert checkpoints.restore(state_of(0), default={"w": 1, "step": 7})["step"] == 7
        train(checkpoints, range(13), at6=0.5)
    again = xckpt.CheckpointManager(root, save=[EverySteps(2)], keep=keep)
    assert numbers(again.steps()) == [4, 6, 10, 12]
    latest, best = again.latest(), again.best()
    assert latest is not None and best is not None
    assert (best.number, best.metrics) == (6, {"loss": 0.5})
    assert (latest.number, latest.bytes, latest.name) == (12, 48, "step-00000012")
    assert latest.time is not None and abs(time.time() - latest.time) < 60
    with again:
        assert again.restore(state_of(0))["step"] == 12 and again.next_step == 13
        assert again.restored == latest and again.skipped == ()
        assert again.restore(step=6)["step"] == 6 and again.next_step == 7
        train(again, range(14, 15))
        again.delete(4)
    assert numbers(again.steps()) == [6, 12, 14]


def test_steps_that_others_wrote_are_restored_and_stay(root: str) -> None:
    xckpt.save(f"{root}/checkpoint-3", state_of(3))
    xckpt.save(f"{root}/best", state_of(1))
    with xckpt.CheckpointManager(root, save=ALWAYS, keep=Latest(1)) as checkpoints:
        [found] = checkpoints.steps()
        assert (found.number, found.name, found.time) == (3, "checkpoint-3", None)
        assert checkpoints.restore(state_of(0))["step"] == 3
        train(checkpoints, range(4, 7))
    assert numbers(checkpoints.steps()) == [3, 6] and xckpt.exists(f"{root}/best")


def test_latest_is_what_is_there_now(root: str) -> None:
    one, other = (xckpt.CheckpointManager(root, save=ALWAYS) for _ in range(2))
    train(one, range(3))
    one.wait()
    assert numbers(other.steps()) == [0, 1, 2]
    xckpt.delete(one.path(2))
    found = one.latest()
    assert found is not None and found.number == 1
    other.delete(0)
    assert numbers(one.steps()) == [1]
    with pytest.raises(ValueError, match="the only good checkpoint"):
        one.delete(1)
    with pytest.raises(xckpt.NotACheckpointError, match="has no step 0: its steps are 1"):
        one.delete(0)


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of steps whose save fails."""
    failing: list[str] = []
    from xckpt.storage.write_checkpoint import ZarrStorageWriter

    write = ZarrStorageWriter.write_data

    def fail(self: ZarrStorageWriter, *arguments: Any) -> object:
        if os.path.basename(str(self.target)) in failing:
            raise xckpt.StorageError("the disk is full")
        return write(self, *arguments)

    monkeypatch.setattr(ZarrStorageWriter, "write_data", fail)
    return failing


def test_a_save_that_fails_is_raised_next_and_made_up_for(
    root: str, broken_disk: list[str]
) -> None:
    checkpoints = xckpt.CheckpointManager(root, save=[EverySteps(5)], keep=[Latest(1)])
    train(checkpoints, range(6))
    checkpoints.wait()
    broken_disk.append("step-00000010")
    checkpoints.save(10, state_of(10))
    while not checkpoints._saves._going[0].saving.done():
        time.sleep(0.01)
    with pytest.raises(xckpt.StorageError, match="disk is full") as caught:
        checkpoints.save(11, state_of(11))
    assert "the save of step 10 in the background" in caught.value.__notes__[-1]
    # Nothing took its place, so nothing was deleted, and the next step makes up for it.
    assert numbers(checkpoints.steps()) == [5] and checkpoints.next_step == 6
    assert checkpoints.save(12, state_of(12))
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [12]


def test_a_failure_is_raised_at_the_end_and_adds_to_another_error(
    tmp_path: Path, broken_disk: list[str]
) -> None:
    broken_disk.append("step-00000000")

    def run(error: Exception | None = None) -> None:
        with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
            checkpoints.save(0, state_of(0))
            if error is not None:
                raise error

    with pytest.raises(xckpt.StorageError, match="disk is full"):
        run()
    with pytest.raises(KeyError) as caught:
        run(KeyError("loop"))
    assert "disk is full" in caught.value.__notes__[-1]


def test_a_damaged_newest_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # it has frames of its own
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(4))
    damage(tmp_path / "step-00000003")
    (tmp_path / "step-00000002" / "xckpt.json").write_text("{")
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=Latest(1)) as again:
        with pytest.warns(UserWarning, match=r"step 1 was restored.*step 3: .*step 2: ") as warned:
            assert again.restore(state_of(0))["step"] == 1
        assert warned[0].filename == __file__
        assert [skipped.number for skipped in again.skipped] == [3, 2]
        assert isinstance(again.skipped[0].error, xckpt.CorruptCheckpointError)
        assert again.next_step == 2
        # The good one is the newest good one until the next is there, which replaces a bad one.
        assert numbers(again.steps()) == [0, 1]
        train(again, range(2, 3))
        again.wait()
        assert numbers(again.steps()) == [2]
        assert again.restore(step=2)["step"] == 2
        with pytest.raises(xckpt.CorruptCheckpointError):
            again.restore(step=3)


def test_a_step_that_is_sound_again_counts_again(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(2))
        checkpoints.wait()
        damage(tmp_path / "step-00000001")
        with pytest.warns(UserWarning, match="step 0 was restored"):
            assert checkpoints.restore(state_of(0))["step"] == 0
        assert numbers(checkpoints.steps()) == [0]
        damage(tmp_path / "step-00000001")  # the same bit again
        assert checkpoints.restore(state_of(0))["step"] == 1
        assert numbers(checkpoints.steps()) == [0, 1] and checkpoints.skipped == ()


def test_where_all_are_damaged_no_default_hides_it(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(2))
        for step in range(2):
            checkpoints.wait()
            damage(Path(checkpoints.path(step)))
        with pytest.raises(xckpt.CorruptCheckpointError, match="no step is good") as caught:
            checkpoints.restore(state_of(0), default=state_of(0))
        assert checkpoints.steps() == []
        checkpoints.reload()
        assert numbers(checkpoints.steps()) == [0, 1]
    assert len(caught.value.problems) == 2


def test_a_step_that_the_memory_does_not_hold_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older step in its place would lose the work since then, of a run that is whole."""
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        for step, notes in enumerate(["short", "long" * 20_000]):
            checkpoints.save(step, state_of(step), metadata={"notes": notes})
    for module in ("core.manifest.memory", "storage.run_steps"):
        monkeypatch.setattr(f"xckpt.{module}.LEAST_LIMIT", 1)
    small, large = (xckpt.LoadOptions(memory_bytes=size) for size in (100_000, 1 << 24))
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, load_options=small) as again:
        with pytest.raises(xckpt.MemoryLimitError, match=r"raise LoadOptions\(memory_bytes=\)"):
            again.restore(state_of(0), default=state_of(0))
        assert again.skipped == () and again.restore(step=0)["step"] == 0
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, load_options=large) as again:
        assert again.restore(state_of(0))["step"] == 1


def test_a_named_step_that_is_damaged_is_no_good_one(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(2))
    damage(tmp_path / "step-00000001")
    with pytest.raises(xckpt.CorruptCheckpointError):
        checkpoints.restore(step=1)
    assert numbers(checkpoints.steps()) == [0]
    with pytest.raises(ValueError, match="the only good checkpoint"):
        checkpoints.delete(0)


def test_a_target_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(2))
        with pytest.raises(xckpt.TreeMismatchError):
            checkpoints.restore({"w": np.zeros(5), "step": 0})
        assert checkpoints.restore(select="step") == {"step": 1}
        with pytest.raises(xckpt.NotACheckpointError, match="has no step 7: its steps are 0, 1"):
            checkpoints.restore(step=7)
    with pytest.raises(xckpt.NotACheckpointError, match="holds no step yet; pass default="):
        xckpt.CheckpointManager(tmp_path / "none").restore()


def test_what_cannot_be_deleted_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=Latest(1))
    with monkeypatch.context() as patch:

        def refused(place: object, *given: object) -> None:
            raise xckpt.StorageError(f"{place}: no permission")

        patch.setattr(run_steps, "hide_checkpoint", refused)
        with caplog.at_level(logging.ERROR, "xckpt"):
            train(checkpoints, range(2))
            checkpoints.wait()
    assert "step-00000000 could not be deleted" in caplog.text and "no permission" in caplog.text
    assert numbers(checkpoints.steps()) == [0, 1]
    train(checkpoints, range(2, 3))
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [2]


def test_each_step_is_deleted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    remove = run_steps.hide_checkpoint

    def noted(place: Location, *given: Any) -> Hidden:
        removed.append(Path(place.path).name)
        return remove(place, *given)

    monkeypatch.setattr(run_steps, "hide_checkpoint", noted)
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=Latest(1)) as checkpoints:
        train(checkpoints, range(6))
    assert removed == [f"step-0000000{step}" for step in range(5)]
    # A step that was deleted can be saved again.
    with checkpoints:
        checkpoints.save(2, state_of(2), force=True)
        checkpoints.wait()
        # It is the last one that was saved, and stays until the next is.
        assert numbers(checkpoints.steps()) == [2, 5]
        checkpoints.save(3, state_of(3), force=True)
    assert numbers(checkpoints.steps()) == [3, 5]


def killed_at_deletion(root: str, half: bool) -> None:
    """Save two steps and keep one; die before the old one goes, or when it has gone by half."""
    if half:
        Hidden.sweep = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    else:
        run_steps.hide_checkpoint = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with xckpt.CheckpointManager(root, save=ALWAYS, keep=Latest(1)) as checkpoints:
        train(checkpoints, range(2))


@pytest.mark.parametrize("half", [False, True])
def test_killed_while_it_deletes(tmp_path: Path, half: bool) -> None:
    process = context().Process(target=killed_at_deletion, args=(str(tmp_path), half))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=Latest(1)) as checkpoints:
        assert numbers(checkpoints.steps()) == ([1] if half else [0, 1])
        assert checkpoints.restore(state_of(0))["step"] == 1
        train(checkpoints, range(2, 3))
    assert numbers(checkpoints.steps()) == [2]


def test_what_a_killed_save_has_left_of_a_step_is_no_hindrance(root: str) -> None:
    checkpoints = xckpt.CheckpointManager(root, save=ALWAYS)
    store = open_store(Location.parse(checkpoints.path(1)))
    for key in ("xckpt.saving", "w/c/0"):
        store.write(key, b"{}").result()
    train(checkpoints, range(3))
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [0, 1, 2]
    assert checkpoints.restore(step=1)["step"] == 1


def test_where_no_step_is_good_each_is_due_again(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as checkpoints:
        train(checkpoints, range(1))
    damage(tmp_path / "step-00000000")
    with xckpt.CheckpointManager(tmp_path, save=[EverySteps(5)]) as again:
        with pytest.raises(xckpt.CorruptCheckpointError):
            again.restore()
        assert again.next_step == 0 and again.save(0, state_of(0))
    assert again.restore(step=0)["step"] == 0


def test_leftovers_go_when_the_next_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.api.run.root.LEFTOVERS", 0.0)
    left = tmp_path / "step-00000001"
    (left / "w" / "c").mkdir(parents=True)
    for name in ("xckpt.saving", "w/c/0"):
        (left / name).write_text("{}")
    (left / "w" / "zarr.json").write_bytes(DOCUMENT)
    with xckpt.CheckpointManager(tmp_path):
        pass  # by which clock would they be old?
    assert (left / "w" / "c" / "0").is_file()
    with xckpt.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(0, state_of(0))
    with xckpt.CheckpointManager(tmp_path):
        pass
    assert not any(path.is_file() for path in left.rglob("*"))


@pytest.mark.parametrize("entered", [False, True])
def test_a_long_run_looks_again_for_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered: bool
) -> None:
    """And one that is no context manager, once it has saved."""
    monkeypatch.setattr("xckpt.api.run.root.LEFTOVERS", 0.0)
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS)
    with checkpoints if entered else contextlib.nullcontext():
        train(checkpoints, range(1))
        checkpoints.wait()
        if entered:
            monkeypatch.setattr("xckpt.api.run.folder.COLLECT_SECONDS", 0.0)
        else:
            checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS)
        (tmp_path / "checkpoint-7").mkdir()
        for step in (1, 2):  # the newest step is younger
            train(checkpoints, range(step, step + 1))
            checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{n}" for n in range(3)]


def test_should_save_is_decided_once(tmp_path: Path) -> None:
    asked: list[Moment] = []

    def policy(moment: Moment) -> bool:
        asked.append(moment)
        return moment.step % 2 == 0

    with xckpt.CheckpointManager(tmp_path, save=policy) as checkpoints:
        for step in range(3):
            due = checkpoints.should_save(step)
            assert checkpoints.save(step, state_of(step)) == due == (step % 2 == 0)
        assert len(asked) == 3
        assert not checkpoints.should_save(3) and checkpoints.save(3, state_of(3), force=True)
        assert not checkpoints.should_save(3)
    assert numbers(checkpoints.steps()) == [0, 2, 3]


def test_a_last_step_that_was_deleted_is_saved_again(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=EverySteps(2))
    for step in (0, 2, 4):
        assert checkpoints.save(step, {"w": step})
    checkpoints.delete(2)
    assert checkpoints.next_step == 5 and not checkpoints.save(4, {"w": 4})
    checkpoints.delete(4)
    assert checkpoints.next_step == 1 and checkpoints.save(4, {"w": 5})
    assert checkpoints.restore() == {"w": 5}


def test_a_policy_that_raises_deletes_nothing(tmp_path: Path) -> None:
    def keep(records: object) -> list[int]:
        raise ZeroDivisionError("a mistake")

    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=[keep])
    train(checkpoints, range(1))
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        checkpoints.wait()
    assert numbers(checkpoints.steps()) == [0]


def loop(root: str, ready: Any) -> None:
    """Train until it is asked to end; a second signal comes while it saves."""
    with xckpt.CheckpointManager(root, save=[OnPreemption()], keep=[All()]) as checkpoints:
        for step in range(10_000):
            if checkpoints.save(step, state_of(step)):
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.preempted:
                break
            if step == 3:
                ready.set()
            time.sleep(0.002)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_saves_and_stops(tmp_path: Path) -> None:
    ready = context().Event()
    process = context().Process(target=loop, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(30)
    process.terminate()
    process.join(30)
    assert process.exitcode == 0
    [saved] = xckpt.CheckpointManager(tmp_path).steps()
    assert saved.number >= 3
    assert xckpt.open(tmp_path / saved.name).verify() == []


def test_the_handler_that_was_there_is_called_at_the_end(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with xckpt.CheckpointManager(tmp_path, save=[OnPreemption()]) as checkpoints:
            checkpoints.save(0, state_of(0))
            signal.raise_signal(signal.SIGTERM)
            assert checkpoints.save(1, state_of(1)) and checkpoints.preempted and not called
            # It is saved: the steps after it are not.
            assert not checkpoints.save(2, state_of(2))
        assert called == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert numbers(checkpoints.steps()) == [1]


def test_a_save_that_is_not_due_makes_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where torch's compiler was imported it makes calls of its own.
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    checkpoints = xckpt.CheckpointManager(tmp_path, save=[EverySteps(10**9), OnPreemption()])
    state, steps = state_of(1), 20
    assert not checkpoints.save(1, state)
    profile = cProfile.Profile()
    profile.enable()
    for step in range(2, 2 + steps):
        checkpoints.save(step, state)
    profile.disable()
    calls = sum(each.callcount for each in profile.getstats())
    assert calls <= 40 * steps, calls / steps


@pytest.mark.thorough
def test_a_save_that_is_not_due_costs_little(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=[EverySteps(10**9), OnPreemption()])
    state = state_of(1)
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        for step in range(1, 101):
            checkpoints.save(step, state)
        best = min(best, (time.process_time() - start) / 100)
    assert best < 50e-6, f"{best * 1e6:.0f} us of processor time"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"save": [3]}, "save=.*takes policies"),
        ({"keep": 3}, "keep=.*takes policies"),
        ({"options": {}}, "xckpt.SaveOptions"),
        ({"load_options": {}}, "xckpt.LoadOptions"),
    ],
)
def test_arguments_that_make_no_sense(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        xckpt.CheckpointManager(tmp_path, **arguments)
    checkpoints = xckpt.CheckpointManager(tmp_path)
    for step, error in ((-1, ValueError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(error, match="a step is"):
            checkpoints.save(step, {})  # type: ignore[arg-type]
    for metric, words in (("low", "has to be a number"), (np.ones(2), "is not a number")):
        with pytest.raises(TypeError, match=rf"metrics\['loss'\] .*{words}"):
            checkpoints.save(0, {}, metrics={"loss": metric})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="name a metric"):
        checkpoints.best()


def test_the_printed_form_says_where_it_saves(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path / "a", temporary=tmp_path / "b") as checkpoints:
        assert repr(checkpoints) == (
            f"<CheckpointManager {tmp_path}/a, temporary steps in {tmp_path}/b>"
        )
        checkpoints.save(3, {"step": 3}, force=True)
        checkpoints.wait()
        assert repr(checkpoints).endswith(", last step 3>")


def test_ls_lists_the_steps_of_a_run(root: str) -> None:
    with xckpt.CheckpointManager(root, save=ALWAYS) as checkpoints:
        train(checkpoints, range(2), at1=float("nan"))
    xckpt.save(f"{root}/7", {"w": np.zeros(1024)})
    result = CliRunner().invoke(commands, ["ls", root])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 3
    assert lines[0].startswith("step-00000000  20") and lines[0].endswith(
        "Z     48 B  loss=1    All()"
    )
    assert lines[1].endswith("loss=nan  All()")
    assert lines[2].split() == ["7", "8.0", "KiB", "not", "the", "run's"]
    listed = json.loads(CliRunner().invoke(commands, ["ls", "--reverse", "--json", root]).stdout)
    assert [(step["number"], step["bytes"]) for step in listed] == [(7, 8192), (1, 48), (0, 48)]
    assert [step["kept_by"] for step in listed] == [["not the run's"], ["All()"], ["All()"]]
    # Leaves of a step are listed as ever, and a root has none.
    assert CliRunner().invoke(commands, ["ls", f"{root}/7"]).stdout.startswith("w  ")
    assert CliRunner().invoke(commands, ["ls", root, "w"]).exit_code == 2


def test_a_listing_names_what_cannot_be_read_and_no_rule_counts_it(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=[Latest(1), OnSteps([0])])
    with checkpoints:
        train(checkpoints, range(2))
    xckpt.save(tmp_path / "2", state_of(2))
    (tmp_path / "2" / "xckpt.json").write_bytes(b"{")
    lines = CliRunner().invoke(commands, ["ls", str(tmp_path)]).stdout.splitlines()
    assert lines[1].endswith("Latest(1)")
    assert lines[2].split() == ["2", "unreadable", "see", "xckpt", "verify"]
