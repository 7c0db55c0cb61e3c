"""A process forked after a save gets an error that explains it, and is not aborted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import IN_A_CHILD

ROOT = Path(__file__).parent.parent.parent
FORKING = (
    IN_A_CHILD
    + """
import numpy as np

path = sys.argv[1]
state = {"w": np.arange(1000), "v": np.ones((100, 100))}

def save():
    xckpt.save(f"{path}/b", state)

in_a_child("before", save)
xckpt.save(f"{path}/a", state)
opened = xckpt.open(f"{path}/a")
in_a_child("save", lambda: xckpt.save(f"{path}/c", state))
in_a_child("overwrite", lambda: xckpt.save(f"{path}/a", state, overwrite=True))
in_a_child("save_async", lambda: xckpt.save_async(f"{path}/c", state))
in_a_child("load", lambda: xckpt.load(f"{path}/a"))
in_a_child("load_into", lambda: xckpt.load_into(f"{path}/a", state))
in_a_child("open", lambda: xckpt.open(f"{path}/a"))
in_a_child("slice", lambda: opened["w"][10:20])
in_a_child("verify", lambda: opened.verify())
in_a_child("grandchild", lambda: in_a_child("load", lambda: xckpt.load(f"{path}/a")))
"""
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_forked_child_gets_an_error_that_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    refused = "save overwrite save_async load load_into open slice verify load"
    expected = [f"{what} StorageError" for what in refused.split()]
    assert ended.stdout.splitlines() == ["before done", *expected, "grandchild done"]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
