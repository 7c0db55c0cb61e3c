"""Chunks that another process cuts off while they are loaded or verified: an error, or the data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.support.states import LAYOUTS

CUTTING = """
import os, random, sys, threading, time
from pathlib import Path
import numpy as np
import xckpt

path, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
files = [file for file in path.rglob("*") if file.is_file() and "c" in file.relative_to(path).parts]
pick = random.Random(seed)
expected = {name: np.asarray(stored[...]) for name, stored in xckpt.open(path).items()}
into = {name: np.empty_like(array) for name, array in expected.items()}
across = {name: np.empty_like(array.T).T for name, array in expected.items()}


def verify(threads):
    problems = xckpt.open(path, options=xckpt.LoadOptions(threads=threads)).verify()
    if problems:
        raise xckpt.CorruptCheckpointError(str(problems[0]))


def load_into(target, threads):
    xckpt.load_into(path, target, options=xckpt.LoadOptions(threads=threads))
    for name, array in expected.items():
        assert (target[name] == array).all(), "wrong data"


def load(threads):
    loaded = xckpt.load(path, options=xckpt.LoadOptions(threads=threads))
    for name, array in expected.items():
        assert (loaded[name] == array).all(), "wrong data"


reads = [verify, load, lambda t: load_into(into, t), lambda t: load_into(across, t)]
refused = 0
for number in range(rounds):
    file = pick.choice(files)
    content = file.read_bytes()
    wait, size = pick.random() * 0.02, pick.randrange(len(content))

    def cut():
        time.sleep(wait)
        os.truncate(file, size)

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        reads[number % len(reads)](pick.choice([None, 1, 3]))
    except xckpt.CorruptCheckpointError as error:
        refused += 1
        assert str(file) in str(error) or str(file.parent) in str(error), error
        assert any(f"{name}: [" in str(error) for name in expected), error
    cutting.join()
    file.write_bytes(content)
print(refused)
"""


def _cut(folder: Path, layout: str, rounds: int) -> int:
    """How many of some reads were refused; the process lives through all of them."""
    random = np.random.default_rng(3)
    state = {name: random.random((1200, 2000), np.float32) for name in ("v", "w")}
    state["narrow"] = random.random((5003, 100), np.float32)
    saving = LAYOUTS[layout]
    large = xckpt.SaveOptions(
        chunk_bytes=1 << 20, shard_bytes=4 << 20 if saving.shard_bytes else 0, crc32c=saving.crc32c
    )
    xckpt.save(folder / "c", state, options=large)
    command = [sys.executable, "-c", CUTTING, str(folder / "c"), str(rounds), "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])
    return int(run.stdout)


def test_a_file_is_cut_off_during_reads(tmp_path: Path) -> None:
    assert _cut(tmp_path, "plain", 12) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_cut_off_hundreds_of_times(tmp_path: Path, layout: str) -> None:
    assert _cut(tmp_path, layout, 500) > 50
