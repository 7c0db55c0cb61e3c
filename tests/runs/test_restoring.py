"""What a run restores where its newest step cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.runs.life import Place, on_threads
from tests.runs.world import state_of, tag_of
from xckpt.policies import EverySteps

ALWAYS = EverySteps(1)


def spoil(step: Path) -> None:
    """A bit of each chunk of ``rows`` is another."""
    for file in (step / "rows" / "c").rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(each ^ 1 for each in file.read_bytes()))


@pytest.mark.filterwarnings("ignore:step 1 was restored:UserWarning")
def test_a_step_that_is_known_as_damaged_need_not_fit(tmp_path: Path) -> None:
    """Three ranks have saved it, and two go on from the step before, which they have saved."""

    def save(place: Place, step: int) -> None:
        with xckpt.CheckpointManager(tmp_path, save=ALWAYS, group=place.group) as run:
            run.save(step, state_of(step, place.rank, place.size))

    def restore(place: Place) -> None:
        with xckpt.CheckpointManager(tmp_path, save=ALWAYS, group=place.group) as run:
            like = {**state_of(0, place.rank, 2), "own": xckpt.PerRank(np.zeros(3, int))}
            with pytest.raises(xckpt.TreeMismatchError, match="own/rank2"):
                run.restore(like)  # nothing is known of it, and it may be sound
            assert tag_of(run.restore()) == 1
            assert run.restore(like)["tag"] == 1
            (skipped,) = run.skipped
            assert skipped.number == 2 and "own/rank2" in str(skipped.error)

    on_threads(2, lambda place: save(place, 1))
    on_threads(3, lambda place: save(place, 2))
    spoil(tmp_path / "step-00000002")
    on_threads(2, restore)
