"""Reads that fail: what a failed load leaves behind."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from xckpt.storage.chunk import ChunkSource, PendingRead


class Slow:
    """A future that says when somebody has waited for it."""

    def __init__(self, future: Any) -> None:  # TensorStore's, of either kind
        self.future = future
        self.ended = False

    def result(self) -> object:
        time.sleep(0.05)
        try:
            return self.future.result()
        finally:
            self.ended = True


def test_after_a_failed_load_nothing_writes_into_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{i}": np.full((1024, 2048), i, np.float32) for i in range(8)}
    xckpt.save(tmp_path / "ckpt", state)
    (tmp_path / "ckpt" / "w0" / "c" / "0" / "0").unlink()
    begun: list[Slow] = []
    begin = ChunkSource.begin

    def recorded(*args: Any) -> PendingRead:  # as they come
        pending = begin(*args)
        begun.append(Slow(pending.future))
        return dataclasses.replace(pending, future=begun[-1])  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(ChunkSource, "begin", recorded)
    targets = {name: np.zeros_like(array) for name, array in state.items()}
    with pytest.raises(xckpt.CorruptCheckpointError, match="w0"):
        xckpt.load_into(tmp_path / "ckpt", targets)
    assert len(begun) > 1
    assert all(slow.ended for slow in begun)
