"""No thread is the first to have msgspec look at a struct's annotations."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, tempfile, threading
import numpy as np
import xckpt, xckpt.engine.save
import xckpt.storage.checkpoint, xckpt.storage.read_checkpoint, xckpt.storage.write_checkpoint
looked = []
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looked.append(frame.f_back.f_code.co_name)
threading.setprofile(note)
sys.setprofile(note)
state = {"w": np.arange(6), "text": "x" * 100_000, "step": 1}
for path in (tempfile.mkdtemp() + "/ckpt", "memory://described-in-child/ckpt"):
    for overwrite in (False, True):
        xckpt.save(path, state, overwrite=overwrite)
        xckpt.load(path)
        xckpt.open(path).verify()
sys.setprofile(None)
print(looked)
"""


RUN = """
import sys, tempfile, threading
import numpy as np
import xckpt.manager, xckpt.api.run.restore, xckpt.engine.save, xckpt.storage.run_steps
from tests.runs.life import on_threads
looked = []
# A module is imported by one thread, and others wait.
safe = ("<module>", "prepare_structs")
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        if (caller := frame.f_back.f_code.co_name) not in safe:
            looked.append((threading.current_thread().name, caller))
folder = tempfile.mkdtemp()
def rank(place):
    run = xckpt.CheckpointManager(folder, group=place.group)
    for step in range(3):
        run.save(step, {"w": np.arange(6)}, {"loss": 1.0}, force=True)
    run.wait()
    run.reload()
    assert run.restore()["w"].tolist() == [*range(6)]
    assert [record.metrics for record in run.steps()] == [{"loss": 1.0}] * 3
threading.setprofile(note)
on_threads(2, rank)
print(looked)
"""


@pytest.mark.parametrize("script", [SCRIPT, RUN], ids=["saves and loads", "a run on two ranks"])
def test_they_look_at_no_type(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stdout + done.stderr
