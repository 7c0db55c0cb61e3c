"""Saves in the background: what is committed, what becomes of failures, and how a process ends.

The storage is real; several ranks are threads here (`conformance.implementations.threads`), and
processes in `tests/torch/test_staging.py` and `tests/jax/test_staging.py`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import xckpt
from benchmarks.probe import memory_of
from conformance.implementations.threads import ThreadGroup, results
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.engine import background
from xckpt.engine.in_flight import IN_FLIGHT
from xckpt.errors import CheckpointExistsError, NotACheckpointError
from xckpt.staging import AsyncStager, BlockingAsyncStager

ROOT = Path(__file__).parents[2]
SECONDS = 30
MEBIBYTE = 1 << 20


class FailingStager(AsyncStager):
    def stage(self, state_dict: Any) -> Any:
        raise OSError("no memory to stage in")


class LateStager(AsyncStager):
    """Copies when the test lets it, and says so by a future."""

    def __init__(self, synchronise: bool) -> None:
        self._synchronize_after_execute = synchronise
        self.go_on = threading.Event()
        self.staged: Future[Any] = Future()
        self.calls: list[str] = []

    def stage(self, state_dict: Any) -> Future[Any]:
        def copy() -> None:
            self.go_on.wait(SECONDS)
            if not self.staged.done():
                self.staged.set_result(copied)

        copied = {name: np.array(leaf) for name, leaf in state_dict.items()}
        threading.Thread(target=copy, daemon=True).start()
        return self.staged

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")
        self.go_on.set()
        self.staged.result(SECONDS)


class SlowPlanner(DefaultSavePlanner):
    """Does not write before the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def resolve_data(self, write_item: Any) -> object:
        assert self.go_on.wait(SECONDS)
        return super().resolve_data(write_item)


def state(number: int) -> dict[str, Any]:
    return {"w": np.full((64, 64), number), "b": np.full(3, number, np.int8), "step": number}


def number_of(path: Path | str) -> int:
    """The number of a saved state; all of it has the same."""
    loaded = xckpt.load(path)
    numbers = {int(n) for leaf in loaded.values() for n in np.unique(np.asarray(leaf))}
    assert len(numbers) == 1, f"a mixture: {numbers}"
    return numbers.pop()


def finished(saved: object) -> None:
    """Wait for a save of either kind."""
    if isinstance(saved, xckpt.SaveFuture):
        saved.result(SECONDS)


def change(state: dict[str, Any]) -> None:
    """What the next step of a training does."""
    state["step"] += 1
    for leaf in (state["w"], state["b"]):
        leaf += 1


@pytest.mark.parametrize("stager", [None, BlockingAsyncStager(), BlockingAsyncStager(True)])
def test_every_step_is_saved_as_it_was(tmp_path: Path, stager: AsyncStager | None) -> None:
    training, savings = state(0), []
    for step in range(20):
        savings.append(xckpt.save_async(tmp_path / str(step), training, stager=stager))
        change(training)
    for step, saving in enumerate(savings):
        assert saving.result(SECONDS).state_dict_metadata.keys() == {"w", "b", "step"}
        assert number_of(tmp_path / str(step)) == step
    assert [saving.exception() for saving in savings] == [None] * 20


def test_saves_to_one_path_follow_each_other(tmp_path: Path) -> None:
    path, training = tmp_path / "latest", state(0)
    for step in range(15):
        saving = xckpt.save_async(path, training, overwrite=True, metadata={"at": step})
        change(training)
        if step % 3 == 0:
            assert saving.result(SECONDS).user_metadata == {"at": step}
            assert number_of(path) == step
    xckpt.save(tmp_path / "other", training)
    assert number_of(path) == 14
    taken = xckpt.save_async(path, training)
    with pytest.raises(CheckpointExistsError):
        taken.result(SECONDS)
    assert number_of(path) == 14


def test_what_is_given_may_change_at_once(tmp_path: Path) -> None:
    planner, training = SlowPlanner(), state(3)
    notes: dict[str, Any] = {"tags": ["a"]}
    saving = xckpt.save_async(tmp_path / "a", training, metadata=notes, planner=planner)
    assert saving.staged() is None
    change(training)
    training.clear()
    notes["tags"].append("b")
    assert not saving.done() and "in flight" in repr(saving)
    late = "a: the state was not saved within 0.01 s; the save goes on: wait longer"
    with pytest.raises(TimeoutError, match=late):
        saving.result(0.01)
    with pytest.raises(TimeoutError, match=late):
        saving.exception(0.01)
    planner.go_on.set()
    assert saving.result(SECONDS).user_metadata == {"tags": ["a"]}
    assert saving.done() and "committed" in repr(saving)
    assert number_of(tmp_path / "a") == 3


@pytest.mark.parametrize("again", ["save", "save_async", "save_state_dict"])
def test_the_next_save_waits(tmp_path: Path, again: str) -> None:
    planner = SlowPlanner()
    first = xckpt.save_async(tmp_path / "a", state(1), planner=planner)
    threading.Timer(0.1, planner.go_on.set).start()
    if again == "save_state_dict":
        from xckpt.storage import ZarrStorageWriter

        xckpt.save_state_dict(state(2), ZarrStorageWriter(tmp_path / "b"))
        second = None
    else:
        second = getattr(xckpt, again)(tmp_path / "b", state(2))
    assert first.done()
    finished(second)
    assert (number_of(tmp_path / "a"), number_of(tmp_path / "b")) == (1, 2)


def test_what_is_no_stager_is_refused_at_once(tmp_path: Path) -> None:
    """It was an AttributeError of the thread, when the result was asked for."""
    no_stager: Any = 3
    with pytest.raises(TypeError, match=r"stager= takes an instance of .*AsyncStager, not an int"):
        xckpt.save_async(tmp_path / "ckpt", {"w": 1}, stager=no_stager)
    a_class: Any = BlockingAsyncStager
    with pytest.raises(TypeError, match=r"an instance of .*AsyncStager, not BlockingAsyncStager"):
        xckpt.save_async(tmp_path / "ckpt", {"w": 1}, stager=a_class)


def test_a_stager_needs_no_base(tmp_path: Path) -> None:
    """`stage` alone was taken, and the copy then lost for the want of another attribute."""

    class Plain:
        def stage(self, state: object) -> object:
            return state

    plain: Any = Plain()
    finished(xckpt.save_async(tmp_path / "ckpt", state(1), stager=plain))
    assert number_of(tmp_path / "ckpt") == 1


def test_a_stager_that_fails_fails_the_save(tmp_path: Path) -> None:
    saving = xckpt.save_async(tmp_path / "a", state(1), stager=FailingStager())
    with pytest.raises(OSError, match="no memory to stage in"):
        saving.staged(SECONDS)
    with pytest.raises(OSError, match="no memory to stage in"):
        saving.result(SECONDS)
    assert isinstance(saving.exception(), OSError) and "failed" in repr(saving)
    assert list(tmp_path.iterdir()) == []
    xckpt.save(tmp_path / "a", state(2))


def test_leaves_that_cannot_be_saved_fail_the_save(tmp_path: Path) -> None:
    saving = xckpt.save_async(tmp_path / "a", {"w": np.array(["x"]), "o": {1, 2}})
    with pytest.raises(xckpt.UnsupportedLeafError, match="w: NumPy dtype"):
        saving.result(SECONDS)
    saving = xckpt.save_async(tmp_path / "a", {"w": np.ones(2), "o": {1, 2}})
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"o: a builtins\.set"):
        saving.result(SECONDS)
    assert list(tmp_path.iterdir()) == []


def unseen_failure(path: Path) -> xckpt.SaveFuture:
    """A save that fails, with no call that asks for its result."""
    path.write_text("a file is in the way")
    saving = xckpt.save_async(path, state(1))
    while not saving.done():
        time.sleep(0.001)
    return saving


@pytest.mark.parametrize("again", [xckpt.save, xckpt.save_async])
def test_an_unseen_failure_fails_the_next_save(tmp_path: Path, again: Callable[..., Any]) -> None:
    saving = unseen_failure(tmp_path / "a")
    with pytest.raises(CheckpointExistsError) as caught:
        again(tmp_path / "b", state(2))
    assert caught.value is saving.exception()
    [note] = caught.value.__notes__
    assert str(tmp_path / "a") in note and "not begun" in note
    assert not (tmp_path / "b").exists()
    finished(again(tmp_path / "b", state(2)))
    assert number_of(tmp_path / "b") == 2


def test_an_unseen_failure_waits_while_the_next_save_has_no_connections(tmp_path: Path) -> None:
    """It was lost: neither raised nor logged."""

    class Unconnected(xckpt.LocalGroup):
        def in_background(self) -> xckpt.LocalGroup:
            raise OSError("no connections")

    saving = unseen_failure(tmp_path / "a")
    with pytest.raises(OSError, match="no connections"):
        xckpt.save_async(tmp_path / "b", state(2), group=Unconnected())
    with pytest.raises(CheckpointExistsError) as caught:
        xckpt.save(tmp_path / "b", state(2))
    assert caught.value is saving.exception()


def test_a_timeout_of_the_user_passes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_: object, timeout: float | None) -> None:
        raise TimeoutError("the time of the job is over")  # as a signal handler may

    saving = xckpt.save_async(tmp_path / "a", state(1))
    for timeout in (None, SECONDS):
        with monkeypatch.context() as patch:
            patch.setattr(Future, "exception", wait)
            with pytest.raises(TimeoutError, match="the time of the job"):
                saving.result(timeout)
    saving.result()


@pytest.mark.parametrize("timeout", [np.float32(SECONDS), 10**9, float("inf")])
def test_a_timeout_is_any_number_of_seconds(tmp_path: Path, timeout: Any) -> None:
    saving = xckpt.save_async(tmp_path / "a", state(1))
    saving.staged(timeout)
    assert saving.exception(timeout) is None
    with pytest.raises(TypeError, match="timeout is a number of seconds, not a str"):
        saving.result("20")  # type: ignore[arg-type]


def test_a_failure_that_was_asked_for_does_not_come_again(tmp_path: Path) -> None:
    assert isinstance(unseen_failure(tmp_path / "a").exception(), CheckpointExistsError)
    xckpt.save(tmp_path / "b", state(2))


def test_a_stager_that_goes_on_copying(tmp_path: Path) -> None:
    stager = LateStager(synchronise=False)
    saving = xckpt.save_async(tmp_path / "a", state(1), stager=stager)
    with pytest.raises(TimeoutError, match=r"not copied within 0.01 s; the save goes on"):
        saving.staged(0.01)
    assert not saving.done() and stager.calls == []
    stager.go_on.set()
    saving.staged(SECONDS)
    saving.result(SECONDS)
    assert number_of(tmp_path / "a") == 1


def test_a_stager_that_is_waited_for(tmp_path: Path) -> None:
    stager = LateStager(synchronise=True)
    saving = xckpt.save_async(tmp_path / "a", state(1), stager=stager)
    assert stager.calls == ["synchronize"] and stager.staged.done()
    assert saving.staged(SECONDS) is None
    saving.result(SECONDS)
    assert number_of(tmp_path / "a") == 1


@pytest.mark.parametrize("synchronise", [False, True])
def test_a_stager_whose_copying_fails_later(tmp_path: Path, synchronise: bool) -> None:
    stager = LateStager(synchronise)
    stager.staged.set_exception(OSError("the device is gone"))
    saving = xckpt.save_async(tmp_path / "a", state(1), stager=stager)
    with pytest.raises(OSError, match="the device is gone"):
        saving.staged(SECONDS)
    with pytest.raises(OSError, match="the device is gone"):
        saving.result(SECONDS)
    cancelled = LateStager(synchronise)
    cancelled.staged.cancel()
    assert xckpt.save_async(tmp_path / "a", state(1), stager=cancelled).exception(SECONDS)
    assert list(tmp_path.iterdir()) == []


def test_a_stager_that_fails_to_synchronise(tmp_path: Path) -> None:
    class Broken(AsyncStager):
        def stage(self, state_dict: Any) -> Any:
            return state_dict

        def synchronize_staging(self) -> None:
            raise OSError("half of it was copied")

    saving = xckpt.save_async(tmp_path / "a", state(1), stager=Broken())
    with pytest.raises(OSError, match="half of it was copied"):
        saving.result(SECONDS)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_whose_stager_fails_fails_all(tmp_path: Path) -> None:
    def run(group: ThreadGroup) -> str:
        stager = FailingStager() if group.rank == 1 else None
        saving = xckpt.save_async(tmp_path / "a", state(1), stager=stager, group=group)
        with pytest.raises(OSError, match="1 rank failed") as caught:
            saving.result(SECONDS)
        done = xckpt.save_async(tmp_path / "b", state(2), group=group)
        done.result(SECONDS)
        return str(caught.value)

    for text in results(3, run):
        assert "rank 1: OSError: no memory to stage in" in text
    assert not (tmp_path / "a").exists() and number_of(tmp_path / "b") == 2


@pytest.mark.parametrize("again", [xckpt.save, xckpt.save_async])
def test_a_failure_that_one_rank_asked_for_still_fails_the_next_save_of_all(
    tmp_path: Path, again: Callable[..., Any]
) -> None:
    """No rank waits for ranks that raise."""
    (tmp_path / "a").write_text("a file is in the way")

    def run(group: ThreadGroup) -> str:
        saving = xckpt.save_async(tmp_path / "a", state(1), group=group)
        if group.rank == 1:
            assert isinstance(saving.exception(SECONDS), CheckpointExistsError)
        with pytest.raises(CheckpointExistsError) as caught:
            finished(again(tmp_path / "b", state(2), group=group))
        return str(caught.value)

    assert all("CheckpointExistsError" in text for text in results(2, run))
    assert not (tmp_path / "b").exists()


def test_memory_does_not_grow_over_many_saves(tmp_path: Path) -> None:
    size = 32 * MEBIBYTE
    array, path = np.ones(size, np.uint8), tmp_path / "a"
    for stager in (BlockingAsyncStager(cache_staged_state_dict=True), None):
        before, after = memory_of()["RssAnon"], []
        for number in range(12):
            array[:: 1 << 12] = number
            xckpt.save_async(path, {"w": array}, stager=stager, overwrite=True).result()
            after.append(memory_of()["RssAnon"])
        assert max(after) - before < 1.5 * size
        assert max(after[5:]) - max(after[:5]) < size // 4


def end_of(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)


SLOW = """
import sys, threading, time
import numpy as np
import xckpt
from xckpt.planner import DefaultSavePlanner

class Slow(DefaultSavePlanner):
    def create_local_plan(self):
        time.sleep(0.5)
        return super().create_local_plan()

state = {f"w{n}": np.full(100_000, n) for n in range(8)}
saving = xckpt.save_async(sys.argv[1], state, planner=Slow())
"""


@pytest.mark.parametrize(
    "ending, code",
    [("", 0), ("1 / 0", 1), pytest.param("sys.exit(3)", 3, marks=pytest.mark.thorough)],
)
def test_the_interpreter_waits_for_a_save(tmp_path: Path, ending: str, code: int) -> None:
    ended = end_of(SLOW + ending, tmp_path / "a")
    assert ended.returncode == code
    assert ended.stdout == ""
    assert ended.stderr == "" or (ending == "1 / 0" and "ZeroDivisionError" in ended.stderr)
    assert ended.stderr.count("Traceback") == (ending == "1 / 0")
    loaded = xckpt.load(tmp_path / "a")
    assert all((loaded[f"w{n}"] == n).all() for n in range(8))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


LATE = """
import atexit, sys, threading
import numpy as np
import xckpt

folder, how = sys.argv[1:]

def save():
    for step in range(3):  # of the last two, one has to wait for the one before
        saving = xckpt.save_async(f"{folder}/{step}", {"w": np.full(1_000_000, step)})
    print(saving.done())

def thread():
    threading.main_thread().join()
    save()

if how == "after another":
    xckpt.save_async(f"{folder}/early", {"w": 1})
if how == "in a thread":
    threading.Thread(target=thread).start()
else:
    atexit.register(save)
"""


@pytest.mark.parametrize(
    "how",
    ["as the first", "after another", pytest.param("in a thread", marks=pytest.mark.thorough)],
)
def test_the_interpreter_waits_for_a_save_that_begins_at_its_end(tmp_path: Path, how: str) -> None:
    ended = end_of(LATE, tmp_path, how)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    assert all((xckpt.load(tmp_path / str(step))["w"] == step).all() for step in range(3))


IN_A_DAEMON = """
import sys, threading, time
import numpy as np
import xckpt

begun = threading.Event()

def slow(progress):
    begun.set()
    time.sleep(0.1)  # the main thread ends meanwhile
    xckpt.load("memory://other")

def thread():
    xckpt.save("memory://other", {"w": 1})
    xckpt.save(sys.argv[1], {"w": np.ones(3)}, options=xckpt.SaveOptions(progress=slow))
    while True:
        xckpt.load(sys.argv[1])

threading.Thread(target=thread, daemon=True).start()
begun.wait()
sys.exit(7)
"""


def test_the_interpreter_waits_for_calls_in_daemon_threads(tmp_path: Path) -> None:
    """Python ends such a thread wherever it is: in C++, the process ended by a signal."""
    ended = end_of(IN_A_DAEMON, tmp_path / "a")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")
    assert xckpt.load(tmp_path / "a")["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupt_while_the_thread_is_started_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "xckpt-save":
            start(thread) if there else None
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        xckpt.save_async(tmp_path / "a", state(1))
    monkeypatch.undo()
    # What the exit and the next save wait for.
    for saving in list(IN_FLIGHT):
        assert isinstance(saving.saved.exception(5), KeyboardInterrupt)
    xckpt.save_async(tmp_path / "b", state(2)).result(SECONDS)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_no_interrupt_leaves_a_save_that_never_ends(tmp_path: Path) -> None:
    """At the beginning of each function that `begin` calls: some left a save without a thread."""
    xckpt.save_async(tmp_path / "a", state(0)).result()
    at, calls = 0, 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        caller = frame.f_back
        if event == "call" and caller and caller.f_code.co_filename == background.__file__:
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

    while at <= calls:
        at, calls = at + 1, 0
        sys.settrace(interrupt)
        try:
            saved = xckpt.save_async(tmp_path / "a", state(at), overwrite=True)
        except KeyboardInterrupt:
            saved = None
        finally:
            sys.settrace(None)
        for saving in list(IN_FLIGHT):
            assert saving.beginner is None
            saving.saved.exception(5)
        assert (saved is None) == (calls == at)
    assert at > 10
    xckpt.save(tmp_path / "b", state(1))
    assert number_of(tmp_path / "a") == at


def test_an_unseen_failure_is_logged_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file is in the way")
    ended = end_of(SLOW, tmp_path / "a")
    assert (ended.returncode, ended.stdout) == (0, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"the asynchronous save to {tmp_path / 'a'} failed")
    assert "CheckpointExistsError" in line


def test_a_failure_that_was_seen_is_not_logged_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file is in the way")
    ended = end_of(SLOW + "assert saving.exception()", tmp_path / "a")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    ending = """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=int)
child.start()
child.join(20)
assert child.exitcode == 0, child.exitcode
assert not saving.done()
goes_on.set()
"""
    slow = "import threading; goes_on = threading.Event()" + SLOW
    slow = slow.replace("time.sleep(0.5)", "goes_on.wait()")
    ended = end_of(slow + ending, tmp_path / "a")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert xckpt.load(tmp_path / "a")["w7"][0] == 7


def test_a_killed_process_leaves_nothing_that_loads(tmp_path: Path) -> None:
    ended = end_of(SLOW + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "a")
    assert ended.returncode == -9
    with pytest.raises(NotACheckpointError):
        xckpt.load(tmp_path / "a")
    xckpt.save(tmp_path / "a", state(1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
