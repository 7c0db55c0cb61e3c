"""Attacks on a manager: roots that lead elsewhere, odd numbers, interrupts, forks, full disks.

Each works, or is an error with a name; no step goes that is to be kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import xckpt
from tests.support.forked import IN_A_CHILD
from tests.support.servers import environment, gcs, new_place, s3
from xckpt.core.run.keeping import kept
from xckpt.core.run.record import StepRecord
from xckpt.policies import All, EverySteps, KeepPolicy, Latest, Temporary
from xckpt.storage.commit import remove
from xckpt.storage.commit.remove import Pace
from xckpt.storage.location import Location, open_store
from xckpt.storage.run_steps import Remover
from xckpt.storage.write_checkpoint import ZarrStorageWriter

__all__ = ["environment", "gcs", "s3"]

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(params=["folder", "s3", "gcs"])
def root(request: pytest.FixtureRequest) -> str:
    return new_place(request)


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(6, float(step)), "own": xckpt.PerRank(np.full(3, step))}


def numbers(found: list[StepRecord]) -> list[int]:
    return [record.number for record in found]


def train(
    root: Path | str, steps: Sequence[int], keep: KeepPolicy | None = None
) -> xckpt.CheckpointManager:
    """A process of a run, from its beginning to its end."""
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=keep or All())
    with checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step))
    return checkpoints


@pytest.mark.parametrize("alias", ["", "link", "."])
def test_a_temporary_root_that_is_the_root_is_refused(tmp_path: Path, alias: str) -> None:
    root = tmp_path / "run"
    train(root, range(3))
    (tmp_path / "link").symlink_to("run")
    second = {"": root, "link": tmp_path / "link", ".": tmp_path / "." / "run" / ".." / "run"}
    with pytest.raises(ValueError, match="is the root of the run itself"):
        xckpt.CheckpointManager(root, temporary=Temporary(second[alias], keep=Latest(1)))
    with pytest.raises(ValueError, match="is the root of the run itself"):
        xckpt.CheckpointManager("memory://both", temporary="memory://both/")
    # Inside of it is another place.
    assert numbers(xckpt.CheckpointManager(root, temporary=root / "fast").steps()) == [0, 1, 2]


def test_a_step_is_no_root(root: str) -> None:
    """With a `default`, a run would begin anew in it."""
    step = train(root, [3]).path(3)
    with pytest.raises(xckpt.PathError, match="is a checkpoint; a run takes the folder in which"):
        xckpt.CheckpointManager(step)


def test_a_second_name_of_a_step_is_no_step(tmp_path: Path) -> None:
    train(tmp_path, range(3))
    for name in ("1000", "best-step=7", "0"):
        (tmp_path / name).symlink_to("step-00000001")
    checkpoints = train(tmp_path, [3], Latest(3))
    assert numbers(checkpoints.steps()) == [1, 2, 3]
    assert checkpoints.restore(step=1)["w"][0] == 1.0
    assert (tmp_path / "1000").is_symlink()


def test_a_step_behind_a_link_is_restored_and_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    train(elsewhere, [1, 9])
    root = tmp_path / "run"
    train(root, [0])
    (root / "step-00000001").symlink_to(elsewhere / "step-00000001")
    checkpoints = train(root, [2, 3], Latest(1))
    assert numbers(checkpoints.steps()) == [1, 3]
    assert [record.linked for record in checkpoints.steps()] == [True, False]
    with pytest.raises(ValueError, match=r"step 1 is a symbolic link: remove the link .*/step-0"):
        checkpoints.delete(1)
    (root / "7").symlink_to(elsewhere / "step-00000009")
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1)) as checkpoints:
        assert checkpoints.save(7, state_of(7), force=True)
    assert xckpt.load(elsewhere / "step-00000009")["w"][0] == 9.0
    assert xckpt.load(elsewhere / "step-00000001")["w"][0] == 1.0
    assert checkpoints.restore()["w"][0] == 7.0


@pytest.mark.parametrize("leads_to", ["elsewhere/step-00000001", "run/step-00000000", "nowhere"])
def test_a_save_writes_through_no_link(tmp_path: Path, leads_to: str) -> None:
    """Of the name that the new step would have: to a step elsewhere, to one of the run, to none."""
    train(tmp_path / "elsewhere", [1])
    root = tmp_path / "run"
    train(root, [0])
    link = root / "step-00000005"
    link.symlink_to(tmp_path / leads_to)
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1))
    with pytest.raises(xckpt.PathError, match=r"is a symbolic link to .* remove the link"):
        checkpoints.save(5, state_of(5), force=True)
    assert checkpoints.save(6, state_of(6))
    checkpoints.wait()
    assert xckpt.load(tmp_path / "elsewhere" / "step-00000001")["w"][0] == 1.0
    assert xckpt.load(root / "step-00000000")["w"][0] == 0.0
    assert link.is_symlink() and not (tmp_path / "nowhere").exists()


def test_a_policy_that_spoils_its_list_deletes_no_more(root: str) -> None:
    def spoils(records: Any) -> list[int]:
        records.clear()
        return []

    def sorts(records: Any) -> list[int]:
        records.sort(key=lambda record: -record.number)
        return [records[-1].number]

    for step in (1, 2):  # written by no manager
        xckpt.save(f"{root}/{step}", state_of(step))
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=[spoils, sorts])
    with checkpoints:
        for step in (3, 4, 5):
            checkpoints.save(step, state_of(step))
    assert numbers(checkpoints.steps()) == [1, 2, 5]
    run = [StepRecord(step, time=60.0) for step in (1, 2, 3)]
    assert kept(run, [sorts, spoils]) == {1, 3}


def test_a_run_that_goes_back_says_so_once(root: str, caplog: pytest.LogCaptureFixture) -> None:
    train(root, range(10), Latest(3))
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(3))

    def warned() -> list[str]:  # the server of the test logs too
        return [record.getMessage() for record in caplog.records if record.name == "xckpt"]

    with caplog.at_level(logging.WARNING, "xckpt"), checkpoints:
        for step in range(4, 7):
            checkpoints.save(step, state_of(step))
        assert warned() == [
            f"{Location.parse(root)}: step 4 is saved though newer steps are there, up to step 9: "
            f"restore() finds that one, and keep= counts it as the newest; to go on from step 4 "
            f"for good, delete the newer ones: checkpoints.delete(9)"
        ]
        for step in (7, 8, 9):
            checkpoints.delete(step)
        for step in range(7, 9):
            checkpoints.save(step, state_of(step))
    assert len(warned()) == 1
    assert numbers(checkpoints.steps()) == [6, 7, 8]


def test_steps_that_no_name_can_say_are_refused(root: str) -> None:
    checkpoints = xckpt.CheckpointManager(root)
    for step in (10**18, 2**64, -1):
        with pytest.raises(ValueError, match=r"a step is a number from 0 to 10\*\*18 - 1"):
            checkpoints.save(step, {})
    last = 10**18 - 1
    assert checkpoints.save(last, state_of(1)) and numbers(checkpoints.steps()) == []
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [last] and checkpoints.restore()["w"][0] == 1.0


def test_metrics_that_are_none_are_named(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path)
    wrong: list[tuple[Any, str]] = [
        ({"loss": 10**400}, r"metrics\['loss'\] is not a number: int too large"),
        ([("loss", 1)], "metrics= is a mapping from names to numbers, .* not a list"),
        ({1: 2.0}, r"metrics\[1\] has no name: a name is a str"),
    ]
    for metrics, words in wrong:
        with pytest.raises(TypeError, match=words):
            checkpoints.save(0, {}, metrics)
    assert checkpoints.steps() == []


@pytest.mark.parametrize("metrics", ["loss", [("loss", 1)], {1: 2.0}, {"loss": "0.5"}])
def test_wrong_metrics_are_named_at_a_step_that_is_not_saved(tmp_path: Path, metrics: Any) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=[EverySteps(10)])
    assert checkpoints.save(0, state_of(0), {"loss": np.float32(1)})
    with pytest.raises(TypeError, match="metrics"):
        checkpoints.save(1, state_of(1), metrics)
    assert not checkpoints.save(2, state_of(2), {"loss": 1})
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [0]


def test_a_root_holds_what_only_looks_like_a_step(tmp_path: Path) -> None:
    train(tmp_path, range(2))
    (tmp_path / "5").mkdir()
    with open(tmp_path / "5" / "xckpt.json", "wb") as file:
        file.truncate(1 << 40)  # takes no room, and no memory holds it
    (tmp_path / "6").mkdir()
    os.mkfifo(tmp_path / "6" / "xckpt.json")
    (tmp_path / "7" / "xckpt.json").mkdir(parents=True)
    (tmp_path / ("8" * 250)).mkdir()
    checkpoints = train(tmp_path, [8], Latest(1))
    assert numbers(checkpoints.steps()) == [8] and checkpoints.restore()["w"][0] == 8.0


@contextlib.contextmanager
def slow_writes(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves wait in the middle until the event is set."""
    write, goes_on = ZarrStorageWriter.write_data, threading.Event()

    def wait(self: ZarrStorageWriter, *arguments: Any) -> object:
        assert goes_on.wait(30)
        return write(self, *arguments)

    patch.setattr(ZarrStorageWriter, "write_data", wait)
    yield goes_on
    goes_on.set()


def interrupted(wait: Callable[[], object]) -> None:
    """Call something that waits, and be interrupted there."""
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        wait()


def test_an_interrupt_ends_no_save(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(1))
    with slow_writes(monkeypatch) as goes_on:
        with checkpoints:
            checkpoints.save(0, state_of(0))
            interrupted(checkpoints.wait)
            interrupted(lambda: checkpoints.save(1, state_of(1)))
            threading.Timer(0.2, goes_on.set).start()
        assert numbers(checkpoints.steps()) == [0]  # the end has waited
    assert checkpoints.next_step == 1


def test_an_interrupt_of_the_end_leaves_the_pace(tmp_path: Path) -> None:
    remover = Remover(Location.parse(tmp_path), 10.0)
    goes_on = threading.Event()
    remover.run(goes_on.wait)
    interrupted(remover.wait)
    assert not remover._pace._hurried
    goes_on.set()
    remover.wait()
    assert isinstance(remover._pace, Pace)


FORKING = (
    IN_A_CHILD
    + """
import threading
import numpy as np
from xckpt.policies import EverySteps, Latest
from xckpt.storage.write_checkpoint import ZarrStorageWriter

write, goes_on = ZarrStorageWriter.write_data, threading.Event()
def wait(self, *arguments):
    goes_on.wait()
    return write(self, *arguments)

checkpoints = xckpt.CheckpointManager(sys.argv[1], save=EverySteps(1), keep=Latest(3))
try:
    with checkpoints:
        for step in range(3):
            checkpoints.save(step, {"w": np.full(6, float(step))})
        checkpoints.delete(0)  # so there are threads
        in_a_child("steps", checkpoints.steps)
        in_a_child("delete", lambda: checkpoints.delete(1))
        in_a_child("save", lambda: checkpoints.save(9, {"w": np.ones(6)}))
        ZarrStorageWriter.write_data = wait
        checkpoints.save(3, {"w": np.full(6, 3.0)})
        in_a_child("wait", checkpoints.wait)
        process = os.fork()
        if process == 0:
            raise SystemExit(7)
        print("left", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        goes_on.set()
except SystemExit as error:
    print("the child's end:", *error.__notes__, flush=True)
    raise
print([record.number for record in checkpoints.steps()])
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_of_a_run_waits_for_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    steps, delete, save, wait, end, left, found = ended.stdout.splitlines()
    assert (steps, delete, save) == ("steps done", "delete StorageError", "save StorageError")
    assert wait.startswith("wait ") and "in the process that this one was forked from" in wait
    assert end.startswith("the child's end: The last save of the run failed as well:")
    assert (left, found) == ("left 7", "[1, 2, 3]")


@pytest.fixture
def no_byte_goes() -> Iterator[None]:
    """Every byte that is written to a file is refused, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_steps_are_deleted_where_no_byte_can_be_written(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checkpoints = train(tmp_path, range(4))
    request.getfixturevalue("no_byte_goes")
    checkpoints.save(4, state_of(4))
    with pytest.raises(xckpt.StorageError):
        checkpoints.wait()
    checkpoints.delete(0)
    xckpt.delete(tmp_path / "step-00000001")
    assert numbers(checkpoints.steps()) == [2, 3]
    assert {"step-00000000", "step-00000001"}.isdisjoint(os.listdir(tmp_path))


@dataclass
class WithoutRoom:
    """A store of a disk that has room for few more files, be they empty, to lock others."""

    store: Any
    files: int
    """How many there is room for in all."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def write(self, *arguments: object, **options: object) -> Any:
        if len(self.store.list().result()) < self.files:
            return self.store.write(*arguments, **options)
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device [os_error_code='28']")


@pytest.mark.parametrize("more", [0, 1])
def test_steps_are_deleted_where_no_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    checkpoints = train(tmp_path, range(3))
    files = len(open_store(Location.parse(tmp_path / "step-00000000")).list().result()) + more
    monkeypatch.setattr(remove, "open_store", lambda where: WithoutRoom(open_store(where), files))
    checkpoints.delete(0)
    assert numbers(checkpoints.steps()) == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_root_that_goes_while_it_is_used_is_begun_anew(root: str) -> None:
    checkpoints = xckpt.CheckpointManager(root, save=EverySteps(1), keep=Latest(2))
    for step in range(3):
        checkpoints.save(step, state_of(step))
    checkpoints.wait()
    if "://" in root:
        open_store(Location.parse(root)).delete_range(ts.KvStore.KeyRange()).result()
    else:
        shutil.rmtree(root)
    for step in range(3, 6):
        checkpoints.save(step, state_of(step))
    checkpoints.wait()
    assert numbers(checkpoints.steps()) == [4, 5] == numbers(xckpt.CheckpointManager(root).steps())
    assert checkpoints.restore(state_of(0))["own"].value.tolist() == [5] * 3


@pytest.mark.parametrize("root", ["s3", "gcs"], indirect=True)
def test_a_bucket_holds_what_only_looks_like_a_step(root: str) -> None:
    train(root, range(2))
    store = open_store(Location.parse(root))
    keys = {
        b"5/xckpt.json/deeper": b"{}",  # a manifest that is a prefix
        b"6/xckpt.json": b"",
        b"7/xckpt.json": b"[" * 100_000,
        b"8/xckpt.json": b'{"digest":"","checkpoint":{"leaves":[],"user":null}}',
        "9/\u00e4/xckpt.json".encode(): b"{}",
        b"10": b"a file",
        b"11//xckpt.json": b"{}",
        b"12/.generations/0/xckpt.json": b"{}",
        b"13/../xckpt.json": b"{}",
    }
    for key, content in keys.items():
        store.write(key, content).result()
    checkpoints = train(root, [20], Latest(1))
    assert numbers(checkpoints.steps()) == [20]
    assert checkpoints.restore()["w"][0] == 20.0 and checkpoints.skipped == ()
    assert {store.read(key).result().value for key in keys} == set(keys.values())
