"""A save in a handler of signals that interrupts another save, in the same thread."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from xckpt.staging import BlockingAsyncStager
from xckpt.storage.commit.remove import Pace

STATE = {"w": np.arange(4.0)}


def ends(call: Callable[[], object]) -> None:
    """Fail if a call never ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it waits for itself"


def saved_async(path: Path) -> None:
    xckpt.save_async(path, STATE).result()


def save(path: Path) -> None:
    xckpt.save(path, STATE)


INTERRUPTED = """
import sys, threading
import numpy as np
import xckpt

folder, state = sys.argv[1], {"w": np.zeros(1 << 18)}
start, inner, outer = threading.Thread.start, None, None
before = 0  # threads that are started before the interrupt

def interrupted(self):
    global inner, before
    if inner is not None and threading.current_thread() is threading.main_thread():
        if before == 0:
            call, inner = inner, None
            call(f"{folder}/{outer}/handler")
        before -= 1
    start(self)

def save(path):
    xckpt.save(path, state)

def save_async(path):
    xckpt.save_async(path, state).result()

save(f"{folder}/warm")
save_async(f"{folder}/warmer")
threading.Thread.start = interrupted
for outer, nth in ((save, 0), (save_async, 0), (save_async, 1)):
    for call in (save, save_async):
        inner, before, outer_path = call, nth, f"{folder}/{outer.__name__}-{call.__name__}"
        outer(outer_path)
        assert inner is None
        for path in (outer_path, f"{folder}/{outer}/handler"):
            assert np.array_equal(xckpt.load(path)["w"], state["w"])
            xckpt.delete(path)
"""


def test_a_handler_may_save_while_a_save_starts_a_thread(tmp_path: Path) -> None:
    """A handler runs in the thread that it interrupts, so a call in its place shows the same."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert ended.returncode == 0, ended.stderr


FIRST = """
import os, signal, sys
import xckpt

folder, how = sys.argv[1:]

class AsItIsLoaded:
    def find_spec(self, name, path=None, target=None):
        if name == "asyncio":  # which TensorStore imports
            os.kill(os.getpid(), signal.SIGUSR1)

def handle(*_):
    if how == "raises":
        raise KeyboardInterrupt
    xckpt.save(f"{folder}/handler", {"w": 1})

signal.signal(signal.SIGUSR1, handle)
sys.meta_path.insert(0, AsItIsLoaded())
try:
    xckpt.save(f"{folder}/first", {"w": 1})
except KeyboardInterrupt:
    xckpt.save(f"{folder}/handler", {"w": 1})
"""


@pytest.mark.parametrize("how", ["raises", "saves"])
def test_a_signal_while_tensorstore_is_loaded(tmp_path: Path, how: str) -> None:
    """The first call said ImportError, of "initialization failed"; the next ended the process."""
    command = [sys.executable, "-c", FIRST, str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert xckpt.load(tmp_path / "handler") == {"w": 1}
    assert xckpt.exists(tmp_path / "first") == (how == "saves")


@pytest.mark.parametrize("inner", [save, saved_async])
def test_a_handler_may_save_while_a_state_is_copied(
    tmp_path: Path, inner: Callable[[Path], None]
) -> None:
    """The save that it interrupts cannot go on before it, so it does not wait for that."""

    class Interrupted(BlockingAsyncStager):
        def stage(self, state_dict: Any) -> Any:
            inner(tmp_path / "handler")
            return super().stage(state_dict)

    def run() -> None:
        xckpt.save_async(tmp_path / "outer", STATE, stager=Interrupted()).result()

    ends(run)
    for name in ("handler", "outer"):
        assert np.array_equal(xckpt.load(tmp_path / name)["w"], STATE["w"])


def test_another_thread_waits_for_a_save_whose_state_is_copied(tmp_path: Path) -> None:
    order: list[str] = []
    copying, go_on = threading.Event(), threading.Event()

    class Slow(BlockingAsyncStager):
        def stage(self, state_dict: Any) -> Any:
            copying.set()
            assert go_on.wait(20)
            order.append("copied")
            return super().stage(state_dict)

    def other() -> None:
        assert copying.wait(20)
        xckpt.save(tmp_path / "second", STATE)
        order.append("saved")

    thread = threading.Thread(target=other)
    thread.start()
    threading.Timer(0.3, go_on.set).start()
    xckpt.save_async(tmp_path / "first", STATE, stager=Slow()).result()
    thread.join()
    assert order == ["copied", "saved"]


def test_a_handler_may_wait_for_deletions_while_its_thread_begins_to_wait() -> None:
    """At each line and call of the one, the other is made in its place."""
    pace, calls = Pace(10.0), 0

    def nested(frame: object, event: str, argument: object) -> Any:
        nonlocal calls
        if event in ("line", "return"):
            calls += 1
            pace.hurry()
        return nested

    def run() -> None:
        sys.settrace(nested)
        try:
            pace.hurry()
        finally:
            sys.settrace(None)
        pace.rest(30)

    ends(run)
    assert calls > 1
    pace.calm()
    began = time.monotonic()
    pace.rest(0.05)
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("place", ["xckpt.api.run.saves.save_async", "xckpt.api.run.folder.key_of"])
def test_a_handler_may_save_a_step_while_a_step_is_begun_or_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The step that the handler saved was forgotten, and never deleted."""
    run = xckpt.CheckpointManager(tmp_path, keep=[xckpt.policies.Latest(2)])
    original: Any = pkgutil.resolve_name(
        place.replace(".saves.", ".saves:").replace("der.", "der:")
    )
    steps = iter([11, 12, 13])

    def interrupted(*arguments: Any, **keywords: Any) -> Any:
        made = original(*arguments, **keywords)
        if (step := next(steps, None)) is not None:
            run.save(step, STATE, force=True)
        return made

    run.save(10, STATE, force=True)
    monkeypatch.setattr(place, interrupted)
    run.save(20, STATE, force=True)
    run.wait()
    known = [record.number for record in run._folder.records]
    run.save(21, STATE, force=True)
    run.wait()
    assert [step for step in known if step > 13] == [20]
    assert [record.number for record in run.steps()] == [20, 21]
