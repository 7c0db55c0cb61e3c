"""Loads in place whose targets share memory: right, or refused before anything is written."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.engine.test_many_leaves import calls_of
from xckpt.errors import UnsupportedLeafError

ONES, NUMBERS = np.ones(12), np.arange(12.0)
MAKERS: list[Callable[[], Any]] = [
    lambda: np.zeros(12),
    lambda: torch.zeros(12, dtype=torch.float64),
]
frameworks = pytest.mark.parametrize("make", MAKERS, ids=["numpy", "torch"])


def saved(options: xckpt.SaveOptions | None = None, **state: object) -> str:
    """The place of a checkpoint."""
    path = f"memory://shared-memory-{uuid.uuid4()}"
    xckpt.save(path, state, options=options)
    return path


@frameworks
def test_tied_targets_take_equal_elements(make: Callable[[], Any]) -> None:
    tied = make()
    xckpt.load_into(saved(x=NUMBERS, y=NUMBERS), {"x": tied, "y": tied})
    assert tied.tolist() == NUMBERS.tolist()


@frameworks
def test_tied_targets_of_different_elements_are_refused_untouched(make: Callable[[], Any]) -> None:
    tied = make()
    path = saved(x=NUMBERS, y=ONES)
    message = r"x and y share memory, .* different elements .* untie .*select= or at="
    with pytest.raises(UnsupportedLeafError, match=message):
        xckpt.load_into(path, {"x": tied, "y": tied})
    with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
        xckpt.load_state_dict({"x": tied, "y": tied}, xckpt.storage.ZarrStorageReader(path))
    assert not tied.any()
    xckpt.load_into(path, {"x": tied, "y": tied}, select="y")
    assert tied.tolist() == ONES.tolist()


@frameworks
def test_views_that_overlap_are_compared_where_they_do(make: Callable[[], Any]) -> None:
    path, memory = saved(x=NUMBERS[:8], y=NUMBERS[4:]), make()
    xckpt.load_into(path, {"x": memory[:8], "y": memory[4:]})
    assert memory.tolist() == NUMBERS.tolist()
    memory = make()
    with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
        xckpt.load_into(path, {"x": memory[:8], "y": memory[3:11]})
    assert not memory.any()


@frameworks
def test_views_that_interleave_are_filled(make: Callable[[], Any]) -> None:
    memory = make()
    xckpt.load_into(saved(x=ONES[:6], y=NUMBERS[:6]), {"x": memory[::2], "y": memory[1::2]})
    assert memory[::2].tolist() == ONES[:6].tolist()
    assert memory[1::2].tolist() == NUMBERS[:6].tolist()


def test_elements_that_are_cut_otherwise_are_read_and_compared() -> None:
    grid = xckpt.SaveOptions(chunk_bytes=32)
    path = saved(grid, x=NUMBERS.reshape(3, 4), y=NUMBERS.reshape(3, 4))
    flat, tied = saved(grid, x=NUMBERS, y=NUMBERS), np.zeros(12)
    for place, target in ((path, tied.reshape(3, 4)), (flat, tied)):
        xckpt.load_into(place, {"x": target, "y": target})
        assert tied.tolist() == NUMBERS.tolist()
        tied[...] = 0
    xckpt.load_into(saved(x=NUMBERS, y=NUMBERS.reshape(3, 4)), {"x": tied, "y": tied.reshape(3, 4)})
    assert tied.tolist() == NUMBERS.tolist()


def test_another_format_has_no_digests_and_is_read(tmp_path: Path) -> None:
    path, tied = tmp_path / "m.safetensors", np.zeros(12)
    safetensors.numpy.save_file({"x": NUMBERS, "y": NUMBERS, "z": ONES}, path)
    with pytest.raises(UnsupportedLeafError, match="x and z share memory"):
        xckpt.load_into(path, {"x": tied, "y": tied, "z": tied})
    assert not tied.any()
    xckpt.load_into(path, {"x": tied, "y": tied}, unexpected="ignore")
    assert tied.tolist() == NUMBERS.tolist()


def test_a_cast_of_tied_targets_is_right_or_refused() -> None:
    tied = np.zeros(12, np.float32)
    xckpt.load_into(saved(x=NUMBERS, y=NUMBERS), {"x": tied, "y": tied}, cast=True)
    assert tied.tolist() == NUMBERS.tolist()
    path = saved(x=NUMBERS, y=NUMBERS.astype(np.int64))
    with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
        xckpt.load_into(path, {"x": tied, "y": tied}, cast=True)
    path = saved(x=NUMBERS, y=NUMBERS)
    with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
        xckpt.load_into(path, {"x": tied, "y": tied.view(np.int32)}, cast=True)
    assert tied.tolist() == NUMBERS.tolist()


def test_a_tensor_and_its_conjugate_view_have_to_agree() -> None:
    path, tied = saved(x=NUMBERS * 1j, y=NUMBERS * 1j), torch.zeros(12, dtype=torch.complex128)
    with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
        xckpt.load_into(path, {"x": tied, "y": tied.conj()})
    assert not tied.any()
    xckpt.load_into(path, {"x": tied.conj(), "y": tied.conj()})
    assert tied.tolist() == (NUMBERS * -1j).tolist()
    stored = torch.from_numpy(NUMBERS - NUMBERS * 1j)
    views = {"x": stored, "y": stored.conj(), "z": stored.conj().imag[3:], "r": stored.real}
    xckpt.save(path, views, overwrite=True)
    xckpt.load_into(path, {"x": tied, "y": tied.conj(), "z": tied.conj().imag[3:], "r": tied.real})
    assert tied.tolist() == stored.tolist()
    tied.zero_()
    with pytest.raises(UnsupportedLeafError, match="x and z share memory"):
        xckpt.load_into(path, {"x": tied, "y": tied.conj(), "z": tied.imag[3:], "r": tied.real})
    assert not tied.any()


def test_what_is_not_read_shares_no_memory() -> None:
    tied = np.zeros(12)
    xckpt.load_into(saved(x=NUMBERS), {"x": tied, "y": tied}, missing="ignore")
    assert tied.tolist() == NUMBERS.tolist()


def test_a_load_makes_a_tensor_for_each_tied_like() -> None:
    like = torch.zeros(12, dtype=torch.float64)
    loaded = xckpt.load(saved(x=NUMBERS, y=ONES), {"x": like, "y": like})
    assert (loaded["x"].tolist(), loaded["y"].tolist()) == (NUMBERS.tolist(), ONES.tolist())


def test_one_rank_that_shares_memory_stops_all() -> None:
    path = saved(x=NUMBERS, y=ONES)

    def load(group: ThreadGroup) -> bool:
        x = np.zeros(12)
        y = x if group.rank else np.zeros(12)
        with pytest.raises(UnsupportedLeafError, match=r"(?s)rank 1.*x and y share") as caught:
            xckpt.load_into(path, {"x": x, "y": y}, group=group)
        assert [failure.rank for failure in caught.value.failures] == [1]
        return bool(x.any() or y.any())

    assert results(2, load) == [False, False]


def test_a_run_is_restored_into_tied_targets_or_not_at_all(tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": NUMBERS, "y": ONES})
        manager.wait()
        tied = np.zeros(12)
        with pytest.raises(UnsupportedLeafError, match="x and y share memory"):
            manager.restore_into({"x": tied, "y": tied})
    assert not tied.any()


def test_a_load_in_place_makes_few_calls_more_for_a_leaf() -> None:
    """To learn where it is, and to compare that: 6 are."""
    made: list[int] = []
    for size in (600, 200, 600):  # the first imports
        state = {f"w{n}": torch.full((4,), float(n)) for n in range(size)}
        path = saved(None, **state)
        loads = (
            (lambda p=path, s=state: xckpt.load(p, s)),
            (lambda p=path, s=state: xckpt.load_into(p, s)),
        )
        made.append(calls_of(loads[1]) - calls_of(loads[0]))
    assert made[2] - made[1] < 7 * 400
