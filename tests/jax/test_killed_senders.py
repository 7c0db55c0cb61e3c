"""A JAX process that dies while it sends chunks to other hosts: all others raise, and name it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import xckpt
from tests.support.jax_jobs import run
from xckpt.errors import XckptError
from xckpt.jax.group import JaxGroup
from xckpt.storage.host.far import FarRanks, Parcel

TIMEOUT = 15.0
"""Seconds that a silent process is waited for."""
BAR = 4 * TIMEOUT
VICTIM = 1


def dying(self: FarRanks, rank: int, parcel: Parcel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while_it_sends(path: str) -> list[object]:
    """A load of which each process, on a host of its own, reads a part."""
    group = JaxGroup(timeout=60)
    if group.rank == VICTIM:
        FarRanks.send = dying
    like = {"w": np.zeros(1 << 18, np.float32)}
    options = xckpt.LoadOptions(share_reads="job", host=f"host {group.rank}", threads=1)
    began, text, ranks = time.monotonic(), "", []
    try:
        xckpt.load_into(path, like, group=group, timeout=TIMEOUT, options=options)
    except XckptError as error:
        text, ranks = str(error), [failure.rank for failure in error.failures]
    seconds = time.monotonic() - began
    Path(path, f"ended {group.rank}").touch()
    while group.rank == 0 and time.monotonic() - began < BAR and not Path(path, "ended 2").exists():
        time.sleep(0.05)  # JAX ends the others with the process of its coordination service
    return [text, ranks, seconds]


@pytest.mark.thorough
def test_a_process_that_is_killed_while_it_sends_is_named(tmp_path: Path) -> None:
    state = {"w": np.arange(1 << 18, dtype=np.float32)}
    xckpt.save(tmp_path / "old", state, options=xckpt.SaveOptions(chunk_bytes=1 << 16))
    answers = cast(
        list[Any], run(killed_while_it_sends, 3, str(tmp_path / "old"), killed=(VICTIM,))
    )
    assert answers[VICTIM] is None
    for rank in (0, 2):
        text, ranks, seconds = answers[rank]
        assert ranks == [VICTIM], (rank, text)
        assert seconds < BAR, (rank, seconds)
