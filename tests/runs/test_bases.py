"""A step's record says which step its save was to share unchanged chunks with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import xckpt
from xckpt.policies import EverySteps


def bases_of(records: Sequence[xckpt.StepRecord]) -> dict[int, int | None]:
    return {record.number: record.base for record in records}


def test_the_record_names_the_base(tmp_path: Path) -> None:
    """A policy sees it, another process reads it, and one save in three has none."""
    seen: dict[int, int | None] = {}

    def keep(records: Sequence[xckpt.StepRecord]) -> list[int]:
        seen.update(bases_of(records))
        return [record.number for record in records]

    state = {"w": np.arange(6)}
    run = xckpt.CheckpointManager(tmp_path, save=EverySteps(1), keep=keep, full_every=3)
    with run as checkpoints:
        for step in range(5):
            checkpoints.save(step, state)
    assert seen == {0: None, 1: 0, 2: 1, 3: None, 4: 3}
    again = xckpt.CheckpointManager(tmp_path, save=EverySteps(1), keep=keep)
    assert bases_of(again.steps()) == seen
    again.restore(step=2)
    with again as checkpoints:
        checkpoints.save(9, state)
    newest = again.latest()
    assert newest is not None and (newest.number, newest.base) == (9, 2)
