"""One rank makes another call than the other, or the same one elsewhere: both say so in time.

Nothing is committed, and a new group saves afterwards.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks
from tests.support.stored import step_at
from tests.support.time_limit import ALLOWANCE
from xckpt.errors import XckptError
from xckpt.torch.group import TorchGroup

TIMEOUT = 1.5
BAR = TIMEOUT + 2 * ALLOWANCE
"""Seconds within which each rank has to end."""

Manager = xckpt.CheckpointManager


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(64, step, np.float32), "step": step}


def _save_async(path: Path, run: Manager, group: Any) -> None:
    xckpt.save_async(path, state(2), group=group, timeout=TIMEOUT).result(60)


def _manager_save(path: Path, run: Manager, group: Any) -> None:
    run.save(7, state(2), force=True)
    run.wait()


CALLS: dict[str, Callable[[Path, Manager, Any], object]] = {
    "save": lambda path, run, group: xckpt.save(path, state(2), group=group, timeout=TIMEOUT),
    "save_async": _save_async,
    "load": lambda path, run, group: xckpt.load(path, state(0), group=group, timeout=TIMEOUT),
    "load_into": lambda path, run, group: xckpt.load_into(
        path, state(0), group=group, timeout=TIMEOUT
    ),
    "save of a manager": _manager_save,
    "restore of a manager": lambda path, run, group: run.restore(state(0)),
    "delete of a manager": lambda path, run, group: run.delete(1),
}


WORDS = {
    "save of a manager": ("save or should_save of its CheckpointManager", "save a step"),
    "restore of a manager": ("restore of its CheckpointManager", "restore a step"),
    "delete of a manager": ("delete of its CheckpointManager", "delete a step"),
}
"""How errors name a call: beside any other call, and beside another one of a manager."""


def on_rank(rank: int, calls: tuple[str, str], path: Path, places: tuple[str, str]) -> Any:
    """What this rank's call raises, in how many seconds, and what the next save raises."""
    group: Any = dist.new_group()
    run = Manager(path / "run", group=group, timeout=TIMEOUT)
    xckpt.save_async(path / "warm", state(1), group=group, overwrite=True).result(60)
    dist.barrier()
    began = time.monotonic()
    said = error_of(lambda: CALLS[calls[rank]](path / places[rank], run, group))
    seconds = time.monotonic() - began
    dist.barrier()
    save = partial(xckpt.save, path / "again", state(3), group=group, timeout=TIMEOUT)
    again = error_of(save)
    xckpt.save(path / "fresh", state(4), group=cast(Any, dist.new_group()), timeout=60)
    return said, seconds, again


def error_of(call: Callable[[], object]) -> str:
    """What a call says that fails."""
    try:
        call()
    except XckptError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def attack(ranks: Ranks, path: Path, calls: tuple[str, str], places: tuple[str, str]) -> Any:
    """What both ranks say of their calls and of the next save; nothing else has changed."""
    xckpt.save(path / "old", state(1))
    xckpt.save(path / "older", state(0))
    for number in (1, 2):
        with Manager(path / "run") as run:
            run.save(number, state(number), force=True)
    answers = ranks.run(on_rank, calls, path, places)
    for said, seconds, _ in answers:
        assert seconds < BAR, (said, seconds)
    assert step_at(str(path / "fresh")) == 4 and step_at(str(path / "old")) == 1
    assert [each.number for each in Manager(path / "run").steps()] == [1, 2]
    assert {each.name for each in path.iterdir()} - {"again"} == {
        *("old", "older", "run", "warm", "fresh")
    }
    return [(said, again) for said, _, again in answers]


DEFAULT = [("save", "load"), ("save", "restore of a manager"), ("delete of a manager", "load_into")]
AT_ONCE = [call for call in CALLS if call != "save_async"]


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(pair, marks=() if pair in DEFAULT else pytest.mark.thorough)
        for pair in itertools.permutations(AT_ONCE, 2)
    ],
    ids=" and ".join,
)
def test_each_rank_names_the_calls(
    two_ranks: Ranks, tmp_path: Path, calls: tuple[str, str]
) -> None:
    """The group saves again afterwards."""
    places = cast(Any, tuple("old" if call.startswith("load") else "new" for call in calls))
    of_managers = all(call in WORDS for call in calls)
    words = [WORDS.get(call, (call, call))[of_managers] for call in calls]
    for said, again in attack(two_ranks, tmp_path, calls, places):
        for rank, word in enumerate(words):
            there = f"{word} on rank {rank}", f"rank {rank} {word}", f"rank {rank} to {word}"
            mine = f"rank {rank}: RuntimeError: it calls {word}", f"is to {word}"
            assert any(each in said for each in (*there, *mine)), said
        assert again == ""
    assert step_at(str(tmp_path / "again")) == 3


@pytest.mark.parametrize("call", ["save", "save_async", "load", "load_into"])
def test_the_same_call_elsewhere(two_ranks: Ranks, tmp_path: Path, call: str) -> None:
    places = ("old", "older") if call.startswith("load") else ("new", "newer")
    for said, again in attack(two_ranks, tmp_path, (call, call), places):
        for rank, place in enumerate(places):
            assert f"'{tmp_path / place}' on rank {rank}" in said
        assert again == ""


BESIDE = [(call, order) for call in AT_ONCE for order in (True, False)]


@pytest.mark.parametrize(
    ("call", "first"),
    [
        pytest.param(*each, marks=() if each == ("save", True) else pytest.mark.thorough)
        for each in BESIDE
    ],
)
def test_one_rank_saves_in_the_background(
    two_ranks: Ranks, tmp_path: Path, call: str, first: bool
) -> None:
    """Such a save has connections of its own: each rank says in the store what it waits in."""
    calls = ("save_async", call) if first else (call, "save_async")
    places = cast(Any, tuple("old" if each.startswith("load") else "new" for each in calls))
    words = [WORDS.get(each, (each, each))[0] for each in calls]
    for rank, (said, again) in enumerate(attack(two_ranks, tmp_path, calls, places)):
        other = f"it calls {words[1 - rank]}, and rank {rank} {words[rank]}"
        assert f"rank {1 - rank}: sent nothing for {TIMEOUT:g} s: {other}" in said
        assert "this save or load cannot go on" in again


def first_call(rank: int, calls: tuple[str, str], path: Path, coordinators: list[int]) -> str:
    """What this rank's call raises, the first one of its process group."""
    group = TorchGroup(cast(Any, dist.new_group()), coordinators[rank], timeout=TIMEOUT)
    return error_of(lambda: CALLS[calls[rank]](path / "old", cast(Any, None), group))


@pytest.mark.parametrize(
    "calls",
    [
        ("save_async", "load"),
        pytest.param(("load", "save_async"), marks=pytest.mark.thorough),
    ],
)
def test_the_first_call(two_ranks: Ranks, tmp_path: Path, calls: tuple[str, str]) -> None:
    xckpt.save(tmp_path / "old", state(1))
    for rank, said in enumerate(two_ranks.run(first_call, calls, tmp_path, [0, 0])):
        assert f"rank {1 - rank}: sent nothing for {TIMEOUT:g} s: " in said
        assert f"it calls {calls[1 - rank]}, and rank {rank} {calls[rank]}" in said
    assert step_at(str(tmp_path / "old")) == 1


@pytest.mark.thorough
def test_each_rank_has_its_own_coordinator(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank, said in enumerate(two_ranks.run(first_call, ("save", "load"), tmp_path, [0, 1])):
        other = f"its coordinator is rank {1 - rank}, and that of rank {rank} is {rank}"
        assert f"rank {1 - rank}: sent nothing for {TIMEOUT:g} s: {other}" in said
