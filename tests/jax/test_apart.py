"""Arrays of one name on devices that are a part of the job, as pipeline stages have them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xckpt
from tests.support.jax_jobs import run


def on(processes: tuple[int, ...], spec: PartitionSpec, content: np.ndarray) -> jax.Array:
    """An array on all devices of these processes."""
    devices = [each for number in processes for each in jax.devices() if number == owner(each)]
    sharding = NamedSharding(Mesh(np.array(devices), "x"), spec)
    return jax.make_array_from_callback(
        content.shape, sharding, lambda at: content[at], dtype=content.dtype
    )


def owner(device: object) -> int:
    return getattr(device, "process_index")  # noqa: B009  # jax.Device has no stubs


ROWS, WHOLE = PartitionSpec("x"), PartitionSpec()
SIZES = 64, 1 << 20
"""One that is compared as a whole, and one of which samples are."""


def save(path: str, state: object, background: bool) -> None:
    if background:
        xckpt.save_async(path, state).result()
    else:
        xckpt.save(path, state)


def on_process_differ(folder: str) -> dict[str, str]:
    """What a save says where processes have other arrays under one name; empty if it saved."""
    rank, said = jax.process_index(), dict[str, str]()
    for size in SIZES:
        first, second = np.zeros(size, np.float32), np.ones(size, np.float32)
        mine = second if rank == 2 else first
        cases = {
            "own devices": on((rank,), ROWS, mine),
            "overlapping": on((1, 2) if rank == 2 else (0, 1), ROWS, mine),
            "copies": on((2,) if rank == 2 else (0, 1), WHOLE, mine),
            "other parts": on((2,), WHOLE, mine) if rank == 2 else on((0, 1), ROWS, mine),
            "one device": jax.device_put(mine) if rank == 2 else on((0, 1), WHOLE, mine),
        }
        for name, array in cases.items():
            for background in (False, True):
                path = f"{folder}/{name}"
                with pytest.raises(xckpt.PlanError) as caught:
                    save(path, {"w": array}, background)
                said[f"{name}, {size}, {background}"] = str(caught.value)
    return said


def test_arrays_that_differ_under_one_name_are_refused(tmp_path: Path) -> None:
    answers = run(on_process_differ, 3, str(tmp_path))
    assert answers[0] == answers[1] == answers[2]
    assert isinstance(answers[0], dict) and len(answers[0]) == 20
    for case, text in answers[0].items():
        if case.startswith("own devices, 64"):
            assert "w: [0, 32) differs between ranks 0, 1 and rank 2" in text
            assert "w: [32, 64) differs between ranks 0, 1 and rank 2" in text
        assert "w: [" in text or "w: differs between" in text, text
        assert "rank 2" in text
    assert not list(tmp_path.iterdir())


def on_process_equal(folder: str) -> None:
    rank = jax.process_index()
    for size in SIZES:
        content = np.arange(size, dtype=np.float32)
        stage = (0, 1) if rank < 2 else (2,)
        state = {
            "own devices": on((rank,), ROWS, content),
            "copies": on(stage, WHOLE, content),
            "named by all": on((1,), ROWS, content),
            f"stage{len(stage)}": on(stage, ROWS, content + rank // 2),
            "own": xckpt.PerRank(on((rank,), ROWS, content + rank)),
        }
        save(f"{folder}/{size}", state, False)
        save(f"{folder}/later{size}", state, True)


def test_equal_ones_and_those_of_other_names_are_saved(tmp_path: Path) -> None:
    run(on_process_equal, 3, str(tmp_path))
    for size in SIZES:
        content = np.arange(size, dtype=np.float32)
        for folder in (tmp_path / f"{size}", tmp_path / f"later{size}"):
            opened = xckpt.open(folder)
            assert opened.verify() == []
            stored = {name: np.asarray(opened[name]) for name in opened}
            for name in ("own devices", "copies", "named by all", "stage2"):
                assert np.array_equal(stored.pop(name), content), name
            assert np.array_equal(stored.pop("stage1"), content + 1)
            for rank in range(3):
                assert np.array_equal(stored.pop(f"own/rank{rank}"), content + rank), stored.keys()
            assert not stored
