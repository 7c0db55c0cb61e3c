"""JAX processes whose disks are slow: the others wait as long as they get on, and no longer."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from tests.support.slow_disk import slow_disk
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import XckptError
from xckpt.jax.group import JaxGroup

STATE = {f"w{number}": np.full(1 << 20, number, np.uint8) for number in range(6)}
SECOND = min(2.5, ALLOWANCE)
"""Longer where other jobs share the machine: there a process may not run for a second."""
WHOLE = xckpt.SaveOptions(threads=1, chunk_bytes=1 << 24)
"""No array is cut."""


def called(what: str, victim: int, folder: str, timeout: float, disk: dict[str, Any]) -> Any:
    """A call in which one process has a slow disk: what it raised, its seconds, when it ended."""
    path, group = Path(folder), JaxGroup(timeout=60)
    others = {} if group.rank != victim else STATE
    group.broadcast(b"" if group.rank == 0 else None)
    note = path / "hung"
    began = time.monotonic()
    text, ranks = "", []
    is_slow = group.rank == victim
    with slow_disk(**disk, note=note) if is_slow else contextlib.nullcontext():
        try:
            if what == "save":
                xckpt.save(path / "new", others, group=group, timeout=timeout, options=WHOLE)
            else:
                like = {name: np.zeros_like(array) for name, array in others.items()}
                options = xckpt.LoadOptions(threads=1, share_reads=False)
                xckpt.load_into(
                    path / "old", like, group=group, timeout=timeout, options=options, strict=False
                )
        except XckptError as error:
            text, ranks = str(error), [failure.rank for failure in error.failures]
    ended = time.monotonic()
    hangs_for = disk.get("hangs_for", 0.0)
    time.sleep(hangs_for)  # all live until the one that hung goes on
    return [text, ranks, ended - began, ended]


def waited_for(what: str, victim: int, path: Path, timeout: float, slab: float) -> None:
    xckpt.save(path / "old", STATE, options=WHOLE, no_dist=True)
    answers = run(called, 2, what, victim, str(path), timeout, {"seconds": slab})
    for text, _, seconds, _ in cast(list[Any], answers):
        assert text == ""
        assert seconds > 1.3 * timeout


def test_a_slow_process_is_waited_for(tmp_path: Path) -> None:
    waited_for("save", 1, tmp_path, SECOND, 0.07 * SECOND)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["save", "load"])
def test_six_seconds_of_work_within_a_timeout_of_two(
    tmp_path: Path, what: str, victim: int
) -> None:
    waited_for(what, victim, tmp_path, 2.0, 0.25)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["save", "load"])
def test_a_disk_that_does_not_answer_any_more(tmp_path: Path, what: str, victim: int) -> None:
    timeout = 2.0
    xckpt.save(tmp_path / "old", STATE, options=WHOLE, no_dist=True)
    disk = {"seconds": 0.4, "hangs_from": 7, "hangs_for": timeout + 3}
    answers = cast(list[Any], run(called, 2, what, victim, str(tmp_path), timeout, disk))
    text, ranks, _, ended = answers[1 - victim]
    assert ranks == [victim], text
    assert ended - float((tmp_path / "hung").read_text()) < timeout + 2 * ALLOWANCE
    assert not (tmp_path / "new").exists()
