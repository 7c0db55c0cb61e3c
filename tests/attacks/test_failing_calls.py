"""EIO, a quota, a full disk, a disk that turns read-only: at each call that is made.

A call of `os` fails from its n-th time on, or that once, for n = 1, 2, 3, ... until the whole
succeeds. Each is success or an error of xckpt; what was there before stays whole.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import outcome
from xckpt.convert import convert
from xckpt.policies import EverySteps, Latest

WRITING = ("pwrite", "fsync", "rename", "mkdir", "link", "ftruncate")
READING = ("preadv", "pread", "stat", "fstat", "scandir")
ERRORS = {
    "EIO": (errno.EIO, False),
    "quota": (errno.EDQUOT, True),
    "disk full": (errno.ENOSPC, True),
    "read-only": (errno.EROFS, True),
    "stale": (errno.ESTALE, True),
}
"""The code, and whether it stays so."""
ADVICE = dict.fromkeys(("quota", "disk full"), "the disk is full: free space or save elsewhere")
"""What an error has to say, beside the path."""


def state(step: int) -> dict[str, Any]:
    """Packed leaves, one of several chunks, one in pieces of its own."""
    small = {f"s{n}": np.full((3,), step, np.int16) for n in range(300)}
    return {**small, "large": np.full((128, 256), step, np.int32), "step": step}


OPTIONS = xckpt.SaveOptions(chunk_bytes=1 << 15, threads=1)


@contextlib.contextmanager
def failing(calls: tuple[str, ...], code: int, first: int, *, stays: bool) -> Iterator[list[int]]:
    """Have calls fail from the n-th of them on; the numbers of those that did."""
    kept: dict[str, Any] = {name: getattr(os, name) for name in calls}
    count, failed = itertools.count(1), list[int]()

    def unreliable(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = next(count)
            if number == first or (stays and number > first):
                failed.append(number)
                raise OSError(code, os.strerror(code))
            return kept[name](*arguments, **named)

        return call

    for name in calls:
        setattr(os, name, unreliable(name))
    try:
        yield failed
    finally:
        for name, call in kept.items():
            setattr(os, name, call)


def attacked(
    call: Callable[[], object],
    calls: tuple[str, ...],
    about: str,
    check: Callable[[bool], object],
    path: Path,
) -> int:
    """Make a call under attack again and again, later each time; how often it was refused."""
    code, stays = ERRORS[about]
    refused, first = 0, 1
    while True:
        with failing(calls, code, first, stays=stays) as failed:
            done = outcome(call)
        assert done.kind == "done" or done.xckpt, (first, done.kind, done.text)
        if done.xckpt and about in ADVICE:
            assert ADVICE[about] in done.text and str(path) in done.text, (first, done.text)
        check(done.kind == "done")
        refused += done.kind != "done"
        if not failed:
            return refused
        first = max(first + 1, first * 5 // 4)


def saves(what: str, path: Path) -> Callable[[], object]:
    """A call that writes over, or beside, what is there."""
    new, base = path / "new", path / "base"

    def managed() -> None:
        run = xckpt.CheckpointManager(
            path / "run", save=[EverySteps(1)], keep=[Latest(1)], options=OPTIONS
        )
        with run as checkpoints:
            checkpoints.save(2, state(2))

    return {
        "save": lambda: xckpt.save(new, state(2), overwrite=True, options=OPTIONS),
        "async": lambda: xckpt.save_async(new, state(2), overwrite=True, options=OPTIONS).result(),
        "with a base": lambda: xckpt.save(
            new, {**state(1), "step": 2}, overwrite=True, base=base, options=OPTIONS
        ),
        "manager": managed,
        "copy": lambda: xckpt.copy(base, path / "copy", overwrite=True),
        "convert": lambda: convert(base, path / "converted", options=OPTIONS, overwrite=True),
        **{
            name: lambda name=name: convert(
                base, path / "converted", format=name, options=OPTIONS, overwrite=True
            )
            for name in ("safetensors", "dcp", "orbax")
        },
    }[what]


WAYS = [
    *("save", "async", "with a base", "manager", "copy", "convert"),
    *(pytest.param(each, marks=pytest.mark.thorough) for each in ("safetensors", "dcp", "orbax")),
]


@pytest.mark.parametrize(
    "about", ["EIO", *(pytest.param(each, marks=pytest.mark.thorough) for each in list(ERRORS)[1:])]
)
@pytest.mark.parametrize("what", WAYS)
def test_a_call_that_writes_fails(tmp_path: Path, what: str, about: str) -> None:
    for name in ("new", "base"):
        xckpt.save(tmp_path / name, state(1), options=OPTIONS)

    def check(succeeded: bool) -> None:
        for name in ("new", "base"):
            opened = xckpt.open(tmp_path / name)
            assert opened.verify() == []
            assert opened["step"] in (1, 2)
        for name in ("run", "copy", "converted"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)

    assert attacked(saves(what, tmp_path), WRITING, about, check, tmp_path) > 0
    xckpt.save(tmp_path / "new", state(3), overwrite=True)
    xckpt.gc(tmp_path, older_than=0)
    assert sorted(os.listdir(tmp_path)) == ["base", "new"]


def reads(what: str, path: Path) -> Callable[[], object]:
    """A call that reads what is there."""
    base = path / "base"

    def loaded() -> None:
        found = xckpt.load(base, options=xckpt.LoadOptions(threads=1))
        assert found["step"] == 1 and np.all(found["large"] == 1) and np.all(found["s7"] == 1)

    return {
        "load": loaded,
        "slice": lambda: xckpt.open(base).array("large")[3:90, 7:],
        "diff": lambda: xckpt.diff(base, path / "new", values=True),
        "view": lambda: xckpt.view(base).svg("large"),
        "steps": lambda: xckpt.CheckpointManager(path / "run", save=[], keep=[]).steps,
        "gc": lambda: xckpt.gc(path, dry_run=True),
    }[what]


@pytest.mark.parametrize("about", ["EIO", "stale"])
@pytest.mark.parametrize("what", ["load", "slice", "diff", "view", "steps", "gc"])
def test_a_call_that_reads_fails(tmp_path: Path, what: str, about: str) -> None:
    for name in ("new", "base"):
        xckpt.save(tmp_path / name, state(1), options=OPTIONS)
    saves("manager", tmp_path)()
    attacked(reads(what, tmp_path), READING, about, lambda succeeded: None, tmp_path)
    assert xckpt.open(tmp_path / "base").verify() == []
