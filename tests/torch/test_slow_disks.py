"""Ranks whose disks are slow: the others wait as long as they get on, and no longer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.slow_disk import slow_disk
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import convert
from xckpt.errors import XckptError

SLABS = 12
SLAB = 1 << 19
STATE = {f"w{number}": np.full(2 * SLAB, number, np.uint8) for number in range(SLABS // 2)}
ONE = {"w": np.arange(SLABS * SLAB // 8)}
"""A single chunk, of as many slabs."""
SECOND = min(2.5, ALLOWANCE)
"""Longer where other jobs share the machine: there a rank may not run for a second."""
WHOLE = xckpt.SaveOptions(threads=1, chunk_bytes=1 << 24)
"""No array is cut."""
CALLS = [
    (what, victim)
    for what in (
        *("save", "one large chunk", "many files", "async"),
        *("load", "shared load", "load between hosts", "convert"),
    )
    for victim in (0, 2)
    if (what, victim) not in (("many files", 2), ("convert", 2))  # it has little to write
]
SHARING: Any = {"shared load": "host", "load between hosts": "job"}


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def on_one(rank: int, victim: int, what: str) -> dict[str, Any]:
    """A state of which one rank writes all."""
    if what == "one large chunk":
        return ONE if rank == victim else {}
    if what == "many files":
        return {f"{n}": {f"{m}": np.ones(3)} for n in range(6) for m in range(2)}
    return STATE if rank == victim else {"small": 1}


def call(rank: int, victim: int, what: str, path: Path, group: Any, timeout: float) -> None:
    if what == "convert":
        convert(path / "old", path / "new", group=group, timeout=timeout, options=WHOLE)
    elif what == "async":
        state = on_one(rank, victim, what)
        saving = xckpt.save_async(path / "new", state, group=group, timeout=timeout, options=WHOLE)
        saving.result(60)
    elif what in ("save", "one large chunk", "many files"):
        state = on_one(rank, victim, what)
        xckpt.save(path / "new", state, group=group, timeout=timeout, options=WHOLE)
    else:
        like = {name: np.zeros_like(array) for name, array in STATE.items()}
        host = f"host {rank}" if what == "load between hosts" else None
        reading = xckpt.LoadOptions(threads=1, share_reads=SHARING.get(what, False), host=host)
        if what == "load" and rank != victim:
            like = {}
        xckpt.load_into(
            path / "old", like, group=group, timeout=timeout, options=reading, strict=False
        )
        assert all(np.array_equal(array, STATE[name]) for name, array in like.items())


def on_rank(rank: int, victim: int, what: str, path: Path, timeout: float, disk: Any) -> Any:
    group: Any = dist.new_group()
    dist.barrier()
    everywhere = what in (*SHARING, "convert")
    slow = rank == victim or (everywhere and not disk.get("hangs_from"))
    began = time.monotonic()
    text, ranks = "", []
    with slow_disk(**disk) if slow else contextlib.nullcontext():
        try:
            call(rank, victim, what, path, group, timeout)
        except XckptError as error:
            text, ranks = str(error), [failure.rank for failure in error.failures]
    ended = time.monotonic()
    left = [each.name for each in threading.enumerate() if each.name == "xckpt-alive"]
    return text, ranks, ended - began, ended, left


def succeeds(ranks: Ranks, path: Path, what: str, victim: int, timeout: float, slab: float) -> None:
    xckpt.save(path / "old", STATE, options=WHOLE, no_dist=True)
    if what in SHARING:
        slab *= ranks.size  # each reads a part
    answers = ranks.run(on_rank, victim, what, path, timeout, {"seconds": slab})
    for text, _, seconds, _, left in answers:
        assert text == ""
        assert left == []
        assert seconds > 1.3 * timeout
    if "load" not in what:
        assert xckpt.open(path / "new").verify() == []


@pytest.mark.parametrize("what, victim, slab", [("save", 1, 0.03), ("shared load", 0, 0.07)])
def test_a_slow_rank_is_waited_for(
    three_ranks: Ranks, tmp_path: Path, what: str, victim: int, slab: float
) -> None:
    succeeds(three_ranks, tmp_path, what, victim, SECOND, slab * SECOND)


@pytest.mark.thorough
@pytest.mark.parametrize("what, victim", CALLS)
def test_six_seconds_of_work_within_a_timeout_of_two(
    three_ranks: Ranks, tmp_path: Path, what: str, victim: int
) -> None:
    succeeds(three_ranks, tmp_path, what, victim, 2.0, 0.25)


@pytest.mark.thorough
@pytest.mark.parametrize("what, victim", CALLS)
def test_a_disk_that_does_not_answer_any_more(
    three_ranks: Ranks, tmp_path: Path, what: str, victim: int
) -> None:
    """The rank is named on all others in time, though it got on for longer than the timeout."""
    timeout, note = 2.0, tmp_path / "hung"
    xckpt.save(tmp_path / "old", STATE, no_dist=True, options=WHOLE)
    disk = {"seconds": 0.4, "hangs_from": 5, "hangs_for": timeout + 3, "note": note}
    answers = three_ranks.run(on_rank, victim, what, tmp_path, timeout, disk)
    hung = float(note.read_text())
    for rank, (text, ranks, _, ended, left) in enumerate(answers):
        assert left == []
        assert text, rank
        if rank != victim:
            assert ranks == [victim], (rank, text)
            assert f"rank {victim}: sent nothing for {timeout:g} s" in text
            assert ended - hung < timeout + 2 * ALLOWANCE, (rank, ended - hung)
    assert not (tmp_path / "new").exists()
    left = {name for name in os.listdir(tmp_path) if not name.startswith(".new.")}
    assert left == {"old", "hung"}


def on_rank_alone(rank: int) -> int:
    """Threads that were started for a save of one process."""
    started: list[str] = []
    kept = threading.Thread.start

    def start(self: threading.Thread) -> None:
        started.append(self.name)
        kept(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        xckpt.save(f"memory://slow-disks-alone-{rank}", {"w": torch.ones(3)}, no_dist=True)
    return started.count("xckpt-alive")


def test_a_process_alone_says_nothing(three_ranks: Ranks) -> None:
    assert three_ranks.run(on_rank_alone) == [0, 0, 0]
