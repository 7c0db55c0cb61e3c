"""A storage of one's own whose hook gives back another number of plans: the hook is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, run_ranks
from xckpt.metadata import Metadata
from xckpt.planner import LoadPlan, SavePlan
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

STATE = {"w": np.arange(5.0), "step": 3}


class FewOrders(ZarrStorageWriter):
    def prepare_global_plan(
        self, plans: list[SavePlan], metadata: Metadata
    ) -> tuple[list[SavePlan], Metadata]:
        shares, metadata = super().prepare_global_plan(plans, metadata)
        return shares[:-1], metadata


class ManyReads(ZarrStorageReader):
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return [*super().prepare_global_plan(plans), LoadPlan([])]


def refused(size: int, call: Any) -> str:
    """What all ranks raise."""
    outcomes = run_ranks(size, call)
    assert all(isinstance(outcome.error, xckpt.PlanError) for outcome in outcomes)
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1
    return texts.pop()


@pytest.mark.parametrize("size", [1, 2])
def test_a_storage_that_gives_back_another_number_of_plans_is_named(
    tmp_path: Path, size: int
) -> None:
    def save(group: ThreadGroup) -> None:
        xckpt.save_state_dict(STATE, FewOrders(tmp_path / "a"), process_group=group)

    def load(group: ThreadGroup) -> None:
        xckpt.load_state_dict(dict(STATE), ManyReads(tmp_path / "b"), process_group=group)

    returned = f"prepare_global_plan returned {size - 1} plan(s): it must return {size}, a SavePlan"
    assert f"FewOrders.{returned}" in refused(size, save)
    xckpt.save(tmp_path / "b", STATE)
    returned = f"prepare_global_plan returned {size + 1} plan(s): it must return {size}, a LoadPlan"
    assert f"ManyReads.{returned}" in refused(size, load)
