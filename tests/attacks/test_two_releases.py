"""A later release of xckpt uses the same folders and jobs: what it wrote is named, and stays.

Its manifest has another version, or fields that this release does not know; so have its claims.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import xckpt
from tests.attacks.victim import outcome
from xckpt.convert import convert
from xckpt.policies import EverySteps, Latest
from xckpt.storage.commit.folder import ClaimText

STATE = {"w": np.arange(4096, dtype=np.int32), "step": 1}
LATER: dict[str, dict[str, Any]] = {
    "version 2": {"version": 2},
    "an unknown field": {"more": {"shards": 3}},
    "both": {"version": 99, "more": 1},
}


def make_later(path: Path, how: str) -> dict[Path, bytes]:
    """Turn a checkpoint into one of a later release; its files."""
    manifest = json.loads((path / "xckpt.json").read_bytes())
    manifest.update(LATER[how])
    (path / "xckpt.json").write_text(json.dumps(manifest))
    return files(path)


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def manager(root: Path) -> xckpt.CheckpointManager:
    return xckpt.CheckpointManager(root, save=[EverySteps(1)], keep=[Latest(1)])


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "a base of a save": lambda later, new: xckpt.save(new, STATE, base=later),
    "a diff": lambda later, new: xckpt.diff(later, later),
    "a view": lambda later, new: xckpt.view(later).svg("w"),
    "a conversion": lambda later, new: convert(later, new),
    "a load into": lambda later, new: xckpt.load_into(later, {**STATE}),
    "an asynchronous save": lambda later, new: xckpt.save_async(later, STATE).result(),
    "gc": lambda later, new: xckpt.gc(later.parent, older_than=0),
}


@pytest.mark.parametrize(
    "how", ["both", *(pytest.param(each, marks=pytest.mark.thorough) for each in list(LATER)[:2])]
)
@pytest.mark.parametrize("what", CALLS)
def test_what_a_later_release_wrote(tmp_path: Path, what: str, how: str) -> None:
    """An error that says so, or success; the later one's files stay as they are."""
    later = tmp_path / "later"
    xckpt.save(later, STATE)
    before = make_later(later, how)
    done = outcome(CALLS[what], later, tmp_path / "new")
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)
    if what in ("a diff", "a view", "a conversion", "a load into"):
        assert done.kind in ("VersionError", "ManifestError"), (done.kind, done.text)
    assert files(later) == before
    assert not [name for name in os.listdir(tmp_path) if ".saving-" in name]


@pytest.mark.parametrize("how", LATER)
def test_a_run_that_a_later_release_goes_on_with(tmp_path: Path, how: str) -> None:
    """Its step is not deleted, and what this release saves beside it can be restored."""
    with manager(tmp_path) as run:
        run.save(1, {**STATE, "step": 1})
        run.wait()
    (first,) = [path for path in tmp_path.iterdir() if (path / "xckpt.json").exists()]
    before = make_later(first, how)

    def goes_on() -> object:
        with manager(tmp_path) as run:
            run.save(2, {**STATE, "step": 2})
            run.wait()
            run.save(3, {**STATE, "step": 3})
            run.wait()
        return manager(tmp_path).restore({**STATE})

    done = outcome(goes_on)
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)
    assert files(first) == before
    if done.kind == "done":
        assert int(done.value["step"] if isinstance(done.value, dict) else 3) == 3


@pytest.mark.parametrize("seconds", [-1e6, -100.0, 0.0, 100.0, 1e6])
def test_claims_of_hosts_whose_clocks_differ(tmp_path: Path, seconds: float) -> None:
    """One that may live elsewhere is left alone unless it is older than was asked for."""
    identity = f"{int(time.time() + seconds):08x}01234567"
    staging = tmp_path / f".ckpt.saving-{identity}"
    staging.mkdir()
    (staging / "data").write_bytes(b"x" * 100)
    claim = tmp_path / f"{staging.name}.claim"
    text = ClaimText("elsewhere", 1, identity, False, "another boot", "1-1", "ckpt")
    claim.write_bytes(msgspec.json.encode({**msgspec.to_builtins(text), "later": [1]}))
    then = time.time() + seconds
    for path in (staging / "data", staging, claim):
        os.utime(path, (then, then))
    done = outcome(xckpt.save, tmp_path / "ckpt", STATE)
    assert done.kind == "done", done.text
    assert staging.exists() and claim.exists()
    found = outcome(xckpt.gc, tmp_path, older_than=3600)
    assert found.kind == "done", (found.kind, found.text)
    assert staging.exists() is (seconds > -3600)
    assert xckpt.open(tmp_path / "ckpt").verify() == []
