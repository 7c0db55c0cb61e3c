"""No thread is the first to have msgspec look at a struct's annotations."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, tempfile, threading
import numpy as np
import xckpt, xckpt.storage, xckpt.engine.save
looked = []
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looked.append(frame.f_back.f_code.co_name)
threading.setprofile(note)
sys.setprofile(note)
state = {"w": np.arange(6), "text": "x" * 100_000, "step": 1}
for path in (tempfile.mkdtemp() + "/ckpt", "memory://described/ckpt"):
    for overwrite in (False, True):
        xckpt.save(path, state, overwrite=overwrite)
        xckpt.load(path)
        xckpt.open(path).verify()
sys.setprofile(None)
print(looked)
"""


def test_saves_and_loads_look_at_no_type() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n", done.stdout
