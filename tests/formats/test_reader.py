"""Loading through a source: planners, targets of any framework, several ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from xckpt.convert import convert
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.engine.load import load_state
from xckpt.engine.ranks.group import Group, LocalGroup
from xckpt.formats import reader as source_reader
from xckpt.formats.detect import open_source
from xckpt.formats.reader import SourceReader
from xckpt.formats.safetensors.source import SafetensorsSource
from xckpt.formats.xckpt import XckptSource
from xckpt.storage.budget import Pool

ARRAYS = {
    "a.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "step": np.array(7),
    "none": np.zeros((0, 4), np.int8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def load(path: Path, like: Any, group: Group | None = None, **options: Any) -> Any:
    planner = DefaultLoadPlanner(cast=True)
    reader = SourceReader(
        lambda: open_source(path), str(path), options=xckpt.LoadOptions(**options)
    )
    load_state(like, reader, group=group or LocalGroup(), planner=planner)
    return planner.result()


def test_everything_as_numpy(path: Path) -> None:
    loaded = load(path, None)
    assert set(loaded) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 24])
@pytest.mark.parametrize("threads", [1, 4])
def test_into_sharded_arrays_of_another_dtype(
    path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, threads: int
) -> None:
    """A jax.Array sharded over eight devices, torch in another type, NumPy as it is."""
    monkeypatch.setattr(source_reader, "PART_BYTES", part_bytes)
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    seen: list[xckpt.Progress] = []
    loaded = load(
        path,
        {
            "a.weight": jax.ShapeDtypeStruct((20, 30), np.float32, sharding=sharding),
            "step": torch.zeros((), dtype=torch.float16),
            "none": np.ones((0, 4), np.int8),
        },
        threads=threads,
        progress=seen.append,
    )
    assert loaded["a.weight"].sharding == sharding
    assert np.array_equal(loaded["a.weight"], ARRAYS["a.weight"])
    assert loaded["step"].item() == 7 and loaded["step"].dtype == torch.float16
    assert loaded["none"].shape == (0, 4)
    assert seen[-1].done == seen[-1].total


def test_what_does_not_fit_is_listed(path: Path) -> None:
    with pytest.raises(xckpt.TreeMismatchError) as caught:
        load(path, {"a.weight": np.zeros((30, 20)), "b": np.zeros(2), "step": 1})
    assert len(caught.value.problems) == 3  # a Python number takes the 0-d array


def test_ranks_load_together(path: Path) -> None:
    def on_rank(group: ThreadGroup) -> bool:
        loaded = load(path, {name: np.zeros_like(array) for name, array in ARRAYS.items()}, group)
        return all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())

    assert all(results(3, on_rank))


def test_a_rank_that_sees_another_file(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({**ARRAYS, "step": np.array(8)}, other)

    def on_rank(group: ThreadGroup) -> str:
        try:
            load((path, other)[group.rank], None, group)
        except xckpt.XckptError as error:
            return str(error)
        return ""

    for text in results(2, on_rank):
        assert "rank 1: StorageError" in text and "other contents than the coordinator" in text


def test_ranks_load_from_copies_that_keep_the_time(path: Path, tmp_path: Path) -> None:
    """As each host has one on a disk of its own."""
    (tmp_path / "host").mkdir()
    copy = Path(shutil.copy2(path, tmp_path / "host" / path.name))

    def on_rank(group: ThreadGroup) -> bool:
        loaded = load((path, copy)[group.rank], None, group)
        return all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())

    assert all(results(2, on_rank))


def test_a_file_that_was_cut_off_meanwhile(path: Path) -> None:
    source = open_source(path)
    path.write_bytes(path.read_bytes()[:-100])
    reader = SourceReader(lambda: source)
    with pytest.raises(xckpt.CorruptCheckpointError, match="truncated"):
        load_state(None, reader, group=LocalGroup(), planner=DefaultLoadPlanner())


def test_a_file_that_is_written_meanwhile(path: Path) -> None:
    """What was read is of two checkpoints, perhaps."""
    content = path.read_bytes()

    def rewrite(progress: xckpt.Progress) -> None:
        with path.open("r+b") as file:  # at no moment is it shorter: another thread reads it
            file.write(content)

    options = xckpt.LoadOptions(progress=rewrite)
    with pytest.raises(xckpt.StorageError, match=f"{path.name}: a file of it was written while"):
        xckpt.load(path, options=options)


def test_a_file_that_is_written_anew_meanwhile(tmp_path: Path) -> None:
    """A writer that begins with an empty file leaves nothing that is damaged."""
    path, tensors = tmp_path / "many.safetensors", {f"w{n}": np.ones(1000) for n in range(8)}
    safetensors.numpy.save_file(tensors, path)

    def begin(progress: xckpt.Progress) -> None:
        path.write_bytes(b"")

    calls: list[Callable[[], object]] = [
        lambda: xckpt.load(path, options=xckpt.LoadOptions(progress=begin, threads=1)),
        lambda: convert(
            path, tmp_path / "to", options=xckpt.SaveOptions(progress=begin, threads=1)
        ),
    ]
    for call in calls:
        safetensors.numpy.save_file(tensors, path)
        with pytest.raises(xckpt.StorageError, match="a file of it was written"):
            call()
    safetensors.numpy.save_file(tensors, path)
    options = xckpt.SaveOptions(progress=begin)
    with ThreadPoolExecutor(2) as workers, pytest.raises(xckpt.StorageError, match="was written"):
        convert(path, tmp_path / "to", executor=workers, options=options)


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []

    class Noted(Pool):
        def __init__(self, *, threads: int | None, budget: int) -> None:
            budgets.append(budget)
            super().__init__(threads=threads, budget=budget)

    xckpt.save("memory://source-host", {"w": np.arange(3)})
    monkeypatch.setattr(source_reader, "Pool", Noted)
    shared = SourceReader(lambda: XckptSource("memory://source-host"))
    shared.host_ranks = 4
    xckpt.load_state_dict({"w": np.zeros(3, int)}, shared)
    assert budgets == [xckpt.LoadOptions().memory_bytes // 4]


def test_parts_that_are_cast_share_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is less than any part, each goes alone."""
    monkeypatch.setattr(source_reader, "PART_BYTES", 100)
    read, reading, most = SafetensorsSource.read, list[str](), list[int]()

    def counted(self: SafetensorsSource, name: str, *about: Any) -> None:
        reading.append(name)
        most.append(len(reading))
        read(self, name, *about)
        time.sleep(0.002)
        reading.remove(name)

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    state = {name: array.astype(np.float64) for name, array in ARRAYS.items()}
    options = xckpt.LoadOptions(memory_bytes=1, threads=4)
    xckpt.load_into(path, state, cast=True, options=options)
    assert len(most) > 20 and max(most) == 1
