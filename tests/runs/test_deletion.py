"""What a run deletes: how fast, what readers see of it, what is left where the storage refuses."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.time_limit import ALLOWANCE
from xckpt.api.load import load
from xckpt.core.manifest.own_keys import GENERATIONS
from xckpt.policies import EverySteps, Latest, OnSteps
from xckpt.storage import run_steps
from xckpt.storage.commit import file_system, remove
from xckpt.storage.commit.remove import Pace, hide_checkpoint
from xckpt.storage.location import Location, open_store

CHUNK = 8192
PLAIN = xckpt.SaveOptions(chunk_bytes=CHUNK)


def many(step: int, chunks: int = 128) -> dict[str, Any]:
    """A tensor of so many files, each large enough to be one."""
    return {"w": np.full((chunks, CHUNK // 8), float(step))}


def numbers(found: list[xckpt.StepRecord]) -> list[int]:
    return [record.number for record in found]


def files_in(folder: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(folder))


def test_deletion_is_out_of_sight_first_and_throttled(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(
        tmp_path, save=EverySteps(1), keep=Latest(1), delete_rate=10, options=PLAIN
    )
    for step in range(3):
        checkpoints.save(step, many(step))
    checkpoints._saves.settle()
    start = time.monotonic()
    while any((tmp_path / f"step-0000000{step}" / "xckpt.json").exists() for step in (0, 1)):
        time.sleep(0.005)
        assert time.monotonic() - start < 20 * ALLOWANCE
    # Both are gone at once, though the files of the first take seconds.
    assert numbers(checkpoints.steps()) == [2] and files_in(tmp_path / "step-00000001") > 120
    checkpoints.wait()  # from here on without a rate
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_a_pace_holds() -> None:
    pace = Pace(1000.0)
    start = time.monotonic()
    for _ in range(4):
        pace.after(25)
    assert 0.09 < time.monotonic() - start < 5 * ALLOWANCE


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_reader_finishes_or_learns_that_the_step_was_deleted(kind: str, tmp_path: Path) -> None:
    """At each point of a deletion, for a reader that has the step open and for a new load."""
    root = str(tmp_path) if kind == "folder" else "memory://manager-readers"
    step = f"{root}/step-00000001"
    xckpt.save(step, many(1, 3), options=PLAIN)
    reader = xckpt.open(step)
    stored = reader["w"]
    assert isinstance(stored, xckpt.StoredArray) and stored[0, 0] == 1.0
    hidden = hide_checkpoint(Location.parse(step))
    assert stored[1, 0] == 1.0  # its files are there yet
    with pytest.raises(xckpt.NotACheckpointError, match="no committed checkpoint"):
        xckpt.load(step)
    hidden.sweep(Pace())
    with pytest.raises(xckpt.CheckpointReplacedError, match="replaced or removed while it was"):
        stored[2, 0]
    with pytest.raises(xckpt.NotACheckpointError, match="no committed checkpoint"):
        xckpt.load(step)


def test_a_load_during_which_its_step_goes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xckpt.storage.read_checkpoint import ZarrStorageReader

    xckpt.save(tmp_path / "step-1", many(1, 3))
    read = ZarrStorageReader.read_data

    def late(self: ZarrStorageReader, *arguments: Any) -> None:
        if xckpt.exists(self.location):
            xckpt.delete(self.location)
        read(self, *arguments)

    monkeypatch.setattr(ZarrStorageReader, "read_data", late)
    with pytest.raises(xckpt.XckptError, match="was deleted while it was read"):
        xckpt.load(tmp_path / "step-1")


@pytest.mark.parametrize("kept", [[], [0]])
def test_a_newest_that_goes_while_it_is_restored_has_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[int]
) -> None:
    keep = [Latest(1), OnSteps(kept)]
    with xckpt.CheckpointManager(tmp_path, save=EverySteps(1), keep=keep) as training:
        training.save(0, {"step": 0})
        training.save(1, {"step": 1})
        training.wait()

        def late(path: Path, *arguments: Any, **options: Any) -> Any:
            if str(path).endswith("1"):
                training.save(2, {"step": 2})
                training.wait()
            return load(path, *arguments, **options)

        monkeypatch.setattr("xckpt.api.run.reading.load", late)
        evaluation = xckpt.CheckpointManager(tmp_path)
        assert evaluation.restore()["step"] == 2 and evaluation.skipped == ()
    assert numbers(evaluation.steps()) == [*kept, 2]


def test_what_the_storage_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remove, "DELAYS", (0.0, 0.0))
    refusals = [0]
    delete = file_system.delete_entry

    def refused(entry: str, folder: int | None) -> None:
        if refusals[0] > 0 and entry in ("w/c/0/0", "w/c/1/0"):
            refusals[0] -= 1
            raise PermissionError(13, "no permission")
        delete(entry, folder)

    monkeypatch.setattr(file_system, "delete_entry", refused)
    checkpoints = xckpt.CheckpointManager(
        tmp_path, save=EverySteps(1), keep=Latest(1), options=PLAIN
    )

    def save(step: int) -> None:
        checkpoints.save(step, many(step, 2))
        checkpoints.wait()

    save(0)
    refusals[0] = 3  # both files once, one of them twice
    save(1)
    assert os.listdir(tmp_path) == ["step-00000001"] and not caplog.text
    refusals[0] = 6  # in all three tries
    with caplog.at_level(logging.ERROR, "xckpt"):
        save(2)
    assert "files of a checkpoint that was deleted are left" in caplog.text
    assert numbers(checkpoints.steps()) == [2] and refusals[0] == 0
    assert files_in(tmp_path / "step-00000001") == 3  # and the claim
    save(3)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_step_is_saved_again_once_it_is_gone(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(
        tmp_path, save=EverySteps(1), keep=Latest(1), delete_rate=50, options=PLAIN
    )
    for step in (0, 1):
        checkpoints.save(step, many(step))
    checkpoints._saves.settle()
    assert checkpoints.save(0, many(7), force=True)
    checkpoints.wait()
    assert xckpt.load(tmp_path / "step-00000000")["w"][0, 0] == 7.0


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_step_that_goes_just_now_is_saved_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the policies, when the save that was running at the decision has ended."""
    root = str(tmp_path) if kind == "folder" else "memory://goes-just-now"

    def slow(step: Location, *given: Any) -> remove.Hidden:
        time.sleep(0.2)
        return hide_checkpoint(step, *given)

    monkeypatch.setattr(run_steps, "hide_checkpoint", slow)
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1)) as checkpoints:
        for step in (5, 6, 5):
            assert checkpoints.save(step, many(step, 2))
    assert xckpt.CheckpointManager(root).restore(step=5)["w"][0, 0] == 5


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_step_that_another_process_has_saved_again_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a run had chosen it for deletion: the new one went."""
    root = str(tmp_path) if kind == "folder" else "memory://saved-again"
    again = [7]

    def late(step: Location, *given: Any) -> remove.Hidden:
        if again and step.path.endswith("5"):
            with xckpt.CheckpointManager(root, save=EverySteps(1)) as other:
                other.save(5, many(again.pop(), 2), force=True)
        return hide_checkpoint(step, *given)

    monkeypatch.setattr(run_steps, "hide_checkpoint", late)
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1)) as checkpoints:
        for step in (5, 6):
            checkpoints.save(step, many(step, 2))
        checkpoints.wait()
        assert numbers(checkpoints.steps()) == [5, 6]
        assert checkpoints.restore(step=5)["w"][0, 0] == 7
        assert "could not be deleted" not in caplog.text
        checkpoints.save(7, many(7, 2))  # the policies see it by then
        checkpoints.wait()
        assert numbers(checkpoints.steps()) == [7]


def test_a_deletion_that_was_killed_is_finished_by_the_next_run(tmp_path: Path) -> None:
    """Its claim says which process deleted, and that one is dead."""
    step = tmp_path / "step-00000001"
    xckpt.save(step, many(1, 3), options=PLAIN)
    xckpt.save(tmp_path / "step-00000002", many(2, 3))
    dead = subprocess.Popen(["true"])
    dead.wait()
    pid = dead.pid
    hide_checkpoint(Location.parse(step))
    claim = step / "xckpt.saving"
    [left] = xckpt.gc(tmp_path, dry_run=True)
    assert left.owner == "alive" and not xckpt.gc(tmp_path)[0].removed
    claim.write_text(claim.read_text().replace(f'"process":{os.getpid()}', f'"process":{pid}'))
    with xckpt.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.wait()
    assert files_in(step) == 0 and numbers(checkpoints.steps()) == [2]


def test_in_a_bucket_leftovers_go_once_the_run_has_saved_for_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xckpt.storage.commit.collect_keys.let_arrive", lambda: None)
    root = "memory://manager-old-leftovers"
    with xckpt.CheckpointManager(root) as checkpoints:
        checkpoints.save(1, many(1, 1))
    store = open_store(Location.parse(root))
    ages = {"old": time.time() - 90_000, "young": time.time() - 60}
    for name, at in ages.items():
        key = f"step-00000001/{GENERATIONS}/{int(at):08x}{0:08x}/{name}/c/0"
        store.write(key, b"x").result()
    with xckpt.CheckpointManager(root) as checkpoints:
        checkpoints.wait()
    keys = b" ".join(store.list().result())
    assert b"young" in keys and b"old" not in keys and numbers(checkpoints.steps()) == [1]


def test_a_corrupt_newest_of_twenty_costs_its_bytes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found, reported, fallen back from: of the other steps nothing but manifests is read."""

    state = {"w": np.zeros(1 << 16), "step": 0}
    for step in range(20):
        xckpt.save(tmp_path / str(step), {**state, "step": step})
    chunk = tmp_path / "19" / "w" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with xckpt.CheckpointManager(tmp_path / "other") as other:  # the modules are read by now
        other.save(0, state)
        other.restore(state)
    start = _read_bytes()
    checkpoints = xckpt.CheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match="step 18 was restored.*step 19: "):
        assert checkpoints.restore(state)["step"] == 18
    read = _read_bytes() - start
    one = sum(path.stat().st_size for path in (tmp_path / "19").rglob("*") if path.is_file())
    manifests = sum(path.stat().st_size for path in tmp_path.glob("*/xckpt.json"))
    assert one <= read < 2.2 * one + 3 * manifests, f"{read:,} of {one:,} and {manifests:,}"


def _read_bytes() -> int:
    """What this process has read by system calls."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


AT_THE_END = """
import atexit, sys, threading
import numpy as np
import xckpt
from xckpt.policies import EverySteps, Latest

folder, how = sys.argv[1:]

def run():
    with xckpt.CheckpointManager(folder, save=EverySteps(1), keep=Latest(1)) as checkpoints:
        for step in range(3):
            checkpoints.save(step, {"w": np.full(9, step)})
            checkpoints.wait()
    print(checkpoints.restore()["w"][0])

def thread():
    threading.main_thread().join()
    run()

if how == "in a thread":
    threading.Thread(target=thread).start()
else:
    atexit.register(run)
"""


@pytest.mark.parametrize("how", ["at exit", "in a thread"])
def test_steps_go_while_the_interpreter_ends(tmp_path: Path, how: str) -> None:
    """Its threads take no more tasks then; the run ended by a RuntimeError."""
    command = [sys.executable, "-c", AT_THE_END, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


SLOWLY = """
import sys
import numpy as np
import xckpt
from xckpt.policies import EverySteps, Latest

checkpoints = xckpt.CheckpointManager(
    sys.argv[1], save=EverySteps(1), keep=Latest(1), delete_rate=1
)
for step in range(4):
    checkpoints.save(step, {"w": np.full(9, step)})
"""


def test_a_program_that_ends_without_its_manager_does_not_delete_slowly(tmp_path: Path) -> None:
    """Its exit waited for the rate: half an hour for 100,000 files, each 1,000 of them a second."""
    command = [sys.executable, "-c", SLOWLY, str(tmp_path)]
    began = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert time.monotonic() - began < 5
