"""Torch ranks of which one is killed while a manager saves: the others name it, a restart goes on.

A rank that is to die starts a clock just before a save, so the kill comes anywhere in that save: in
its plan, its writes, its commit, or the deletion of what it outdates.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from tests.runs.killed import ENVIRONMENT
from tests.support.ranks import Ranks, die
from tests.support.servers import environment, s3
from xckpt.policies import EverySteps, Latest
from xckpt.storage.write_checkpoint import ZarrStorageWriter

__all__ = ["environment", "s3"]

SIZE = 3
EVERY = 5
"""Steps between saves."""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, and when."""

    rank: int
    step: int
    """The save in which it is."""
    seconds: float = 0.0
    """After the call of that save; 0 for the middle of its writes."""


def state_of(step: int, rank: int, size: int) -> dict[str, Any]:
    """What a rank saves: a tensor that all have, and rows that it alone has."""
    return {"w": torch.full((6,), float(step)), f"of-{rank}-of-{size}": torch.full((3,), step)}


def doom(kill: Kill) -> None:
    """Have this process die while it saves."""
    if kill.seconds:
        threading.Timer(kill.seconds, die).start()
    else:
        ZarrStorageWriter.write_data = lambda *_: die()  # type: ignore[method-assign]


def on_rank_train(
    rank: int, root: str, places: dict[str, str], end: int, kill: Kill | None, every: int = EVERY
) -> tuple[int, int, str]:
    """Go on with a run.

    Returns:
        The step that it began with, the last one that was surely committed, and what was raised.
    """
    os.environ.update(places)
    group = torch.distributed.get_world_size()
    begun = sure = -1
    try:
        with xckpt.CheckpointManager(root, save=EverySteps(every), keep=Latest(2)) as run:
            run.restore(default=None)
            begun = run.next_step
            due: list[int] = []
            for step in range(begun, end):
                if kill is not None and step == kill.step:
                    run.wait()
                    sure = max(due, default=sure)
                    if rank == kill.rank:
                        doom(kill)
                if run.save(step, state_of(step, rank, group)):
                    # A save begins when the one before it is committed.
                    sure = max(due, default=sure)
                    due.append(step)
            if kill is not None:
                threading.Event().wait(2 * kill.seconds)
        return begun, max(due, default=sure), ""
    except xckpt.XckptError as error:
        return begun, sure, f"{type(error).__name__}: {error}"


def found_in(root: str, size: int) -> int:
    """The newest step that a restart finds, whole."""
    run = xckpt.CheckpointManager(root, group=xckpt.LocalGroup())
    state = run.restore(default=None)
    if state is None:
        return -1
    assert run.restored is not None and run.skipped == ()
    step = run.restored.number
    assert {name for name in state if name != "w"} == {f"of-{r}-of-{size}" for r in range(size)}
    assert all((leaf == step).all() for leaf in state.values())
    return step


def live(root: str, places: dict[str, str], end: int, kill: Kill | None, every: int) -> int:
    """One life of the ranks; the newest step that it has left."""
    before = found_in(root, SIZE)
    # A life is hundreds of saves, on a machine that may do other things.
    with Ranks(SIZE, seconds=600) as ranks:
        answers = ranks.attempt(on_rank_train, root, places, end, kill, every)
    lived = [answer for ok, answer in answers if ok]
    assert len(lived) == SIZE - (kill is not None), answers
    if kill is not None:
        assert answers[kill.rank] == (False, "ended with code -9")
    newest = found_in(root, SIZE)
    for begun, sure, raised in lived:
        assert begun == before + 1 and sure <= newest, (answers, newest)
        assert kill is None or f"rank {kill.rank}" in raised or newest >= kill.step, raised
    return newest


@pytest.mark.thorough  # of a single save: tests/torch/test_save_load.py, of runs: test_seeds.py
def test_a_rank_is_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        answers = ranks.attempt(on_rank_train, str(tmp_path), {}, 15, Kill(1, 10))
    assert answers[1] == (False, "ended with code -9")
    lived, (begun, sure, raised) = answers[0]
    assert lived and (begun, sure) == (0, 5) and "rank 1" in raised, raised
    assert found_in(str(tmp_path), 2) == 5
    # What it has left is removed once another process goes on.
    with xckpt.CheckpointManager(tmp_path, save=EverySteps(1), keep=Latest(1)) as run:
        assert run.restore() and run.next_step == 6
        run.save(6, state_of(6, 0, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006"]


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_a_thousand_steps_with_kills(
    seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each life but the last ends by the kill of a rank; odd seeds are in a bucket."""
    draw = random.Random(seed)
    root = f"{request.getfixturevalue('s3')}/killed-{seed}" if seed % 2 else str(tmp_path / "run")
    places = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    # A bucket takes longer, and a rank answers within a minute.
    newest, end, every = -1, 1000, 50 if seed % 2 else EVERY
    for step in sorted(draw.sample(range(every, end - every, every), 4)):
        if step > newest:
            kill = Kill(draw.randrange(SIZE), step, draw.choice([0.0, draw.uniform(0.0001, 0.05)]))
            newest = live(root, places, end, kill, every)
    assert live(root, places, end, None, every) == end - every
