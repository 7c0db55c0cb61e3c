"""Ranks that do not come, over real torch groups: they are named, and a timeout ends the wait."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.signs import await_sign
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import RanksFailedError
from xckpt.torch.group import TorchGroup

STATE = {"w": np.ones(4), "step": 1}


class Heard(logging.Handler):
    """What was logged; a file says that it was twice."""

    def __init__(self, twice: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._twice = twice

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")
        if len(self.texts) == 2:
            self._twice.touch()


def fresh_group(backend: str = "gloo") -> Any:
    """A process group that a test may spoil."""
    return dist.new_group(backend=backend)


def outcome(call: Any, *args: Any, **kwargs: Any) -> tuple[str, list[int], float]:
    """What a call raised, the ranks in it, and after how long."""
    began = time.monotonic()
    try:
        call(*args, **kwargs)
    except RanksFailedError as error:
        return str(error), [f.rank for f in error.failures], time.monotonic() - began
    return "", [], time.monotonic() - began


def on_rank_two_never_comes(rank: int, path: Path) -> Any:
    group = fresh_group()
    if rank == 2:
        dist.barrier()  # of all ranks, when the others have given up
        late = outcome(xckpt.save, path, STATE, group=group)
        return late, outcome(xckpt.save, path, STATE, group=group)
    first = outcome(xckpt.save, path, STATE, group=group, timeout=1)
    dist.barrier()
    return first, outcome(xckpt.save, path, STATE, group=group)


def test_a_timeout_names_the_silent_rank_on_all(four_ranks: Ranks, tmp_path: Path) -> None:
    """A late rank learns of it, and no step runs over a group that is out of step."""
    for first, again in four_ranks.run(on_rank_two_never_comes, tmp_path / "a"):
        text, ranks, seconds = first
        assert ranks == [2]
        assert "lost contact with 1 rank" in text
        assert "rank 2: sent nothing for 1 s; is it alive, and did it call the same save" in text
        assert seconds < 1 + 4 * ALLOWANCE
        assert again[1] == [2] and again[2] < ALLOWANCE
        assert "no other can begin on this process group: make a new one" in again[0]
    assert not (tmp_path / "a").exists()


def on_rank_zero_never_comes(rank: int, path: Path) -> Any:
    group = fresh_group()
    found = outcome(xckpt.load, path, group=group, timeout=1) if rank else ("", [0], 0.0)
    dist.barrier()  # rank 0 stays until the others have given up
    return found


def test_a_coordinator_that_never_comes_is_named(four_ranks: Ranks, tmp_path: Path) -> None:
    xckpt.save(tmp_path, STATE, no_dist=True, overwrite=True)
    answers = four_ranks.run(on_rank_zero_never_comes, tmp_path)
    for text, ranks, seconds in answers[1:]:
        assert ranks == [0] and "rank 0: sent nothing for 1 s" in text
        assert seconds < 1 + 3.5 * ALLOWANCE


def on_rank_asynchronous(rank: int, path: Path) -> Any:
    group = fresh_group("cuda:gloo" if path.name == "beside" else "gloo")

    def save() -> None:
        xckpt.save_async(path, STATE, group=group, timeout=1).result(30)

    found = ("", [1, 3], 0.0) if rank in (1, 3) else outcome(save)
    dist.barrier()
    return found


@pytest.mark.parametrize("name", ["own", "beside"])
def test_an_asynchronous_save_names_them_too(four_ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Also where the processes have yet to make a gloo backend."""
    for text, ranks, seconds in four_ranks.run(on_rank_asynchronous, tmp_path / name):
        assert ranks == [1, 3]
        assert not text or "rank 3: sent nothing for 1 s" in text
        assert seconds < 1 + 3 * ALLOWANCE


def on_rank_says_for_whom(rank: int, folder: Path) -> list[str]:
    """Rank 3 comes before the coordinator, ranks 1 and 2 once it has warned twice."""
    group = TorchGroup(fresh_group(), warn_after=0.4)
    group.gather(b"")  # connects them
    group.broadcast(b"" if rank == 0 else None)
    heard = Heard(folder / "heard twice")
    logger = logging.getLogger("xckpt")
    logger.addHandler(heard)
    try:
        if rank == 0:
            await_sign(folder / "sent")
        elif rank in (1, 2):
            await_sign(folder / "heard twice")
        group.gather(b"")
        if rank == 3:
            (folder / "sent").touch()
    finally:
        logger.removeHandler(heard)
    return heard.texts


def test_a_rank_that_waits_says_for_whom_and_goes_on_saying_so(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    coordinator, *late, _ = four_ranks.run(on_rank_says_for_whom, tmp_path)
    assert len(coordinator) == 2  # after 0.4 s, and 0.8 s later; the next would be 1.6 s later
    for text in coordinator:
        assert text.startswith("WARNING: rank 0 has waited")
        assert "s for ranks 1, 2: is it alive" in text
        assert "xckpt.LocalGroup()" in text and "timeout=" in text
    assert late == [[], []]


def on_rank_alone(rank: int, path: Path) -> Any:
    if rank == 0:
        xckpt.save(path, STATE, no_dist=True)
        xckpt.save(path, STATE, group=xckpt.LocalGroup(), overwrite=True)
        xckpt.save_async(path, STATE, no_dist=True, overwrite=True).result()
        xckpt.load_into(path, {"w": np.ones(4), "step": 0}, no_dist=True)
        return xckpt.load(path, no_dist=True)["step"]
    return 1


def test_one_rank_may_save_and_load_alone(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(on_rank_alone, tmp_path / "a") == [1] * 4


def on_rank_torch_group(rank: int, path: Path) -> int:
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    where = path / str(rank // 2)
    saved = xckpt.save(where, STATE, group=pairs[rank // 2], timeout=30)
    assert "w" in saved.state_dict_metadata
    return xckpt.load(where, group=pairs[rank // 2], timeout=30)["step"]


def test_a_torch_process_group_is_a_group(four_ranks: Ranks, tmp_path: Path) -> None:
    assert four_ranks.run(on_rank_torch_group, tmp_path / "a") == [1] * 4


def on_rank_times_beyond_all_clocks(rank: int, path: Path) -> list[int]:
    steps: list[int] = []
    for seconds in (1e300, float("inf"), 10**400):
        group = fresh_group()
        xckpt.save(path, STATE, group=group, overwrite=True, timeout=seconds)
        xckpt.save_async(path, STATE, group=group, overwrite=True, timeout=seconds).result()
        steps.append(xckpt.load(path, group=group, timeout=seconds)["step"])
    return steps


def test_times_beyond_all_clocks(four_ranks: Ranks, tmp_path: Path) -> None:
    """A load ended by an OverflowError: no socket waits as long."""
    answers = four_ranks.run(on_rank_times_beyond_all_clocks, tmp_path / "a")
    assert answers == [[1, 1, 1]] * 4
