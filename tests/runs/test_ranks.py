"""The random runs of `test_seeds` on three processes of torch: a few, for each takes seconds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.life import Life, Place, failing_disk, plan
from tests.runs.test_seeds import KEEPING
from tests.runs.world import World
from tests.support.ranks import Ranks

SIZE = 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as started:
        yield started


def on_rank(rank: int, root: str, seed: int) -> int:
    """Two lives; the plan is the same on all ranks. Returns how many steps are there at last."""
    import torch.distributed as dist

    def meet(mine: object) -> list[Any]:
        said: list[Any] = [None] * SIZE
        dist.all_gather_object(said, mine)
        return said

    draw = random.Random(seed)
    world = World(root, draw.choice(KEEPING))
    every = draw.choice([1, 5, 20])
    with failing_disk(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for number in (1, 2):
            Life(world, Place(rank, SIZE, None, meet), number, every).live(plan(draw, 10))
    return len(world.good)


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(20))
def test_a_run_on_torch_ranks(ranks: Ranks, seed: int, tmp_path: Path) -> None:
    kept = ranks.run(on_rank, str(tmp_path / "run"), seed)
    assert kept == kept[:1] * SIZE
