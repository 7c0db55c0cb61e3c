"""Saves and loads do without what Linux alone has; Windows is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import xckpt
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
WITHOUT_LINUX = """
import sys
import numpy as np
from tests.support.other_system import take_away
take_away()
import xckpt

path = sys.argv[1]
large = np.arange(1 << 20, dtype=np.float64)
state = {"large": large, "w": np.arange(12.0).reshape(3, 4), "step": 1}
xckpt.save(path, state)
with open(f"{path}/config.json", "w") as file:
    file.write("{}")
xckpt.save(path, state | {"step": 2}, overwrite=True)
for step in (3, 4):
    xckpt.save_async(path, state | {"step": step}, overwrite=True).result(60)
into = {"large": np.zeros_like(large), "w": np.zeros((3, 4)), "step": 0}
loaded = xckpt.load(path, into)
assert loaded["step"] == 4
assert (loaded["large"] == large).all() and (loaded["w"] == state["w"]).all()
opened = xckpt.open(path)
assert opened["large"][5:9].tolist() == [5, 6, 7, 8]
assert list(opened.verify()) == []
assert opened.manifest.root.startswith(".generations/")
with open(f"{path}/config.json") as file:
    print(file.read())
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh process that runs a script."""
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_what_linux_alone_has(tmp_path: Path) -> None:
    ended = run(WITHOUT_LINUX, str(tmp_path / "ckpt"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "{}\n", "")
    assert os.listdir(tmp_path) == ["ckpt"]


def on_a_rank(rank: int, path: Path) -> int:
    from tests.support.other_system import take_away

    take_away()
    state = {"w": np.arange(1 << 18), "step": 1}
    xckpt.save(path, state, overwrite=True)
    loaded = xckpt.load(path, {"w": np.zeros(1 << 18, np.int64), "step": 0})
    assert (loaded["w"] == state["w"]).all()
    return int(loaded["w"].sum() % 1000)


def test_ranks_of_one_host_share_what_they_read(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert len(set(ranks.run(on_a_rank, tmp_path / "ckpt"))) == 1


def test_windows_is_refused_when_it_is_imported() -> None:
    ended = run("import sys; sys.platform = 'win32'; import xckpt")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: xckpt does not run on Windows itself; use it in WSL 2, on Linux or on macOS"
    )
