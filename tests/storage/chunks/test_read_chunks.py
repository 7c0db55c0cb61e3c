"""Reads that fail: what a failed load leaves behind."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import xckpt
from xckpt.numpy import ArrayTarget
from xckpt.storage.chunks.chunk import ChunkSource, PendingRead


class Slow:
    """A wait for a chunk that records when it has ended."""

    def __init__(self, wait: Callable[[], object], *, interrupted: bool) -> None:
        self.wait = wait
        self.interrupted = interrupted
        self.ended = False

    def __call__(self) -> object:
        time.sleep(0.05)
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt
        try:
            return self.wait()
        finally:
            self.ended = True


@pytest.mark.parametrize("interrupted", [False, True])
def test_after_a_failed_load_nothing_writes_into_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    state = {f"w{i}": np.full((1024, 2048), i, np.float32) for i in range(8)}
    # What has a checksum is read by TensorStore's threads, which go on by themselves.
    xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(crc32c=True))
    if not interrupted:
        (tmp_path / "ckpt" / "w0" / "c" / "0" / "0").unlink()
    begun: list[Slow] = []
    begin = ChunkSource.begin

    def recorded(*args: Any) -> PendingRead:  # as they come
        pending = begin(*args)
        begun.append(Slow(pending.wait, interrupted=interrupted and not begun))
        return dataclasses.replace(pending, wait=begun[-1])

    monkeypatch.setattr(ChunkSource, "begin", recorded)
    targets = {name: np.zeros_like(array) for name, array in state.items()}
    error = KeyboardInterrupt if interrupted else xckpt.CorruptCheckpointError
    with pytest.raises(error, match=None if interrupted else "w0"):
        xckpt.load_into(tmp_path / "ckpt", targets, options=xckpt.LoadOptions(threads=1))
    assert len(begun) > 1
    assert all(slow.ended for slow in begun)


@pytest.mark.parametrize("threads", [None, 1])
def test_a_leaf_of_several_chunks_fills_its_target_without_the_planners_hooks(
    threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.arange(64.0).reshape(8, 8), "b": np.arange(3.0)}
    grid = xckpt.SaveOptions(chunk_bytes=2 * 8 * 8, pack_bytes=0)
    xckpt.save(tmp_path / "ckpt", state, options=grid)
    committed: list[tuple[int, ...]] = []

    def commit(target: ArrayTarget, index: int) -> None:
        committed.append(target.shape)

    monkeypatch.setattr("xckpt.numpy.ArrayTarget.commit", commit)
    monkeypatch.delattr("xckpt.storage.chunks.read_chunks.Destination")
    targets = {name: np.zeros_like(array) for name, array in state.items()}
    xckpt.load_into(tmp_path / "ckpt", targets, options=xckpt.LoadOptions(threads=threads))
    assert all(np.array_equal(targets[name], state[name]) for name in state)
    assert sorted(committed) == [(3,), (8, 8)]


LIKES = {
    "no target": lambda: None,
    "NumPy": lambda: np.empty((1024, 1024), np.float32),
    "torch": lambda: torch.empty((1024, 1024), device="meta"),
    "JAX": lambda: jax.ShapeDtypeStruct((1024, 1024), np.float32),
}


@pytest.mark.parametrize("like", LIKES)
def test_chunks_that_come_at_once_share_the_memory_of_their_leaf(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the chunks of one thread are missing in what the load gives."""
    array = np.arange(1, 1 + 1024 * 1024, dtype=np.float32).reshape(1024, 1024)
    xckpt.save(tmp_path / "ckpt", array, options=xckpt.SaveOptions(chunk_bytes=1 << 20))
    target = LIKES[like]()

    def slowly(make: Callable[..., object]) -> Callable[..., object]:
        def made(*args: object, **options: object) -> object:
            time.sleep(0.05)
            return make(*args, **options)

        return made

    monkeypatch.setattr(np, "empty", slowly(np.empty))
    monkeypatch.setattr(torch, "empty_like", slowly(torch.empty_like))
    loaded = xckpt.load(tmp_path / "ckpt", target, options=xckpt.LoadOptions(threads=4))
    np.testing.assert_array_equal(np.asarray(loaded), array)


@pytest.mark.parametrize("options", [xckpt.SaveOptions(), xckpt.SaveOptions(readers=8)])
def test_the_callers_thread_makes_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: xckpt.SaveOptions
) -> None:
    """In another thread they come from a heap whose pages go back with each of them."""
    state = {name: np.random.default_rng(0).random((512, 1024), np.float32) for name in "abc"}
    xckpt.save(tmp_path / "c", state, options=options)
    makers: list[threading.Thread] = []
    buffer = ArrayTarget.buffer

    def noted(target: ArrayTarget, index: int) -> Any:
        if target.array is None:
            makers.append(threading.current_thread())
        return buffer(target, index)

    monkeypatch.setattr(ArrayTarget, "buffer", noted)
    loaded = xckpt.load(tmp_path / "c", options=xckpt.LoadOptions(threads=3))
    assert makers == [threading.current_thread()] * 3
    np.testing.assert_array_equal(loaded["b"], state["b"])
