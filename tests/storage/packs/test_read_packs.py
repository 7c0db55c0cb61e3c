"""Threads that read packs do not compete for the interpreter."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.storage.array import digest_bytes
from xckpt.storage.packs import read_packs


@pytest.mark.parametrize("elements, in_turn", [(1 << 10, True), (1 << 17, False)])
def test_small_chunks_are_taken_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int, in_turn: bool
) -> None:
    leaves = {f"leaf {n}": np.full(elements, n) for n in range((8 << 20) // (8 * elements))}
    xckpt.save(tmp_path / "ckpt", leaves, options=xckpt.SaveOptions(pack_bytes=8 << 20))
    inside, most, lock = 0, 0, threading.Lock()

    def digest(content: memoryview) -> bytes:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(1e-4 if in_turn else 0.05)  # the others come meanwhile
        with lock:
            inside -= 1
        return digest_bytes(content)

    monkeypatch.setattr(read_packs, "digest_bytes", digest)
    loaded = xckpt.load(tmp_path / "ckpt", options=xckpt.LoadOptions(threads=4))
    assert all(np.array_equal(loaded[name], leaf) for name, leaf in leaves.items())
    assert (most == 1) == in_turn
