"""Processes that lack open files, threads or address space: success, or an error that says so.

`tests.attacks.scarce` makes the calls, each in a process that has imported xckpt and nothing else:
what is imported late is imported there. `tests.attacks.scarce_ranks` makes those of two ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attacks import scarce
from tests.attacks.scarce_ranks import TIMEOUT
from tests.support.time_limit import ALLOWANCE
from xckpt.storage.host.peer import Peer

ADVICE = {"files": "ulimit -n", "threads": "threads", "memory": "ulimit -v"}
"""A part of what an error has to say."""


def outcomes(
    kind: str, amounts: Sequence[int], folder: Path, calls: str = "", of: Sequence[str] = ()
) -> list[Any]:
    """What `tests.attacks.scarce` prints, or `scarce_ranks` for ``of`` a framework and ranks."""
    module = "tests.attacks.scarce_ranks" if of else "tests.attacks.scarce"
    command = [sys.executable, "-m", module, *of[:1], kind, *of[1:], calls]
    command += [",".join(map(str, amounts))]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": str(folder)}
    run = subprocess.run(command, capture_output=True, env=environment, timeout=1700, check=False)
    assert run.returncode == 0, run.stderr.decode()[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(kind: str, amounts: Sequence[int], folder: Path, calls: str = "") -> list[Any]:
    """Each is success or an error of xckpt with advice, and afterwards all is whole."""
    seen = outcomes(kind, amounts, folder, calls)
    assert seen
    for call, amount, outcome, text in seen:
        fair = outcome == "done" or (outcome == "xckpt" and ADVICE[kind] in text)
        assert fair, (call, amount, outcome, text)
    return seen


def check_ranks(
    framework: str, kind: str, rank: int, amounts: Sequence[int], folder: Path, calls: str = ""
) -> list[Any]:
    """The same of two ranks, of which one lacks something: the other names it, in time."""
    seen = outcomes(kind, amounts, folder, calls, (framework, str(rank)))
    assert seen
    for call, amount, where, outcome, text, seconds in seen:
        named = ADVICE[kind] in text or (
            where != rank and f"rank {rank}" in text and "[Errno" not in text
        )
        fair = outcome == "done" or (outcome == "xckpt" and named)
        assert fair, (call, amount, where, outcome, text)
        assert seconds < TIMEOUT + 2 * ALLOWANCE, (call, amount, where, outcome, text, seconds)
    return seen


@pytest.mark.parametrize(
    ("framework", "calls", "amounts"),
    [
        ("torch", "manager.restore", [1]),
        pytest.param("torch", "manager.restore", [4], marks=pytest.mark.thorough),
        pytest.param("jax", "save", [1], marks=pytest.mark.thorough),
    ],
)
def test_a_rank_with_few_files(
    tmp_path: Path, framework: str, calls: str, amounts: Sequence[int]
) -> None:
    seen = check_ranks(framework, "files", 1, amounts, tmp_path, calls)
    assert [outcome for *_, outcome, _, _ in seen[:2]] == ["xckpt", "xckpt"]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "amounts"),
    [("files", [0, 1, 2, 4]), ("threads", [0, 1, 2, 4, 6]), ("memory", [20, 1200])],
)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_call_of_ranks(
    tmp_path: Path, framework: str, kind: str, amounts: Sequence[int], rank: int
) -> None:
    seen = check_ranks(framework, kind, rank, amounts, tmp_path)
    assert "xckpt" in {outcome for *_, outcome, _, _ in seen}


@pytest.mark.parametrize(
    "calls, few", [("save,delete,manager.restore", 2), ("convert,xckpt convert", 1)]
)
def test_few_files(tmp_path: Path, calls: str, few: int) -> None:
    seen = check("files", [0, few], tmp_path, calls)
    assert {outcome for _, amount, outcome, _ in seen if amount == 0} == {"xckpt"}


def test_no_thread(tmp_path: Path) -> None:
    seen = check("threads", [0], tmp_path, "load,save_async")
    assert {outcome for _, _, outcome, _ in seen} == {"xckpt"}


def test_no_room_for_tensorstore(tmp_path: Path) -> None:
    """To load it there would end the process, or raise an ImportError."""
    seen = check("memory", [50], tmp_path, "save,save_async,load")
    assert {outcome for _, _, outcome, _ in seen} == {"xckpt"}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "amounts"),
    [
        ("files", [*range(9), 10, 13, 20, 40]),
        ("threads", range(12)),
        ("memory", [20, 50, 100, 130, 150, 200, 400, 1200]),
    ],
)
def test_every_call(tmp_path: Path, kind: str, amounts: Sequence[int]) -> None:
    seen = check(kind, amounts, tmp_path)
    assert {outcome for _, _, outcome, _ in seen} == {"done", "xckpt"}


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # from JAX, if imported
def test_shared_memory_comes_where_no_descriptor_is_left() -> None:
    here, there = socket.socketpair()
    with here, there, open(os.memfd_create("slots"), "r+b") as memory:
        memory.truncate(64)
        Peer(0, there, 5).send_slots(memory.fileno(), np.zeros((1, 64), np.uint8))
        outcome, text = scarce.forked(lambda: Peer(1, here, 5).receive_slots(), "files", 0)
    assert outcome == "xckpt" and ADVICE["files"] in text and "rank 1 shares" in text
