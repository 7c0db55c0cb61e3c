"""Shares that disagree with the metadata, and what finish_plan may change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import xckpt
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorProperties
from xckpt.core.plan.items import SavePlan, WriteItem, WriteItems
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.core.plan.save_checks import check_finished, check_shares
from xckpt.errors import PlanError


def planned(size: int = 3) -> tuple[list[SavePlan], Metadata]:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": np.zeros((4, 2), np.float32), "step": 1, "none": np.zeros((0,))})
    return planner.create_global_plan([planner.create_local_plan()] * size)


def half(item: WriteItem) -> WriteItem:
    if item.tensor_data is None:
        return item
    return replace(
        item, tensor_data=replace(item.tensor_data, properties=TensorProperties("float16"))
    )


def refusal(check: Callable[..., None], *arguments: object) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        check(*arguments)
    return caught.value.problems


def test_what_the_default_planner_plans_passes():
    shares, metadata = planned()
    check_shares(shares, metadata)
    check_shares([replace(share, items=list(share.items)) for share in shares], metadata)
    for share in shares:
        check_finished(share, share)
        check_finished(share, replace(share, items=list(share.items)))
        check_finished(share, replace(share, items=[]))


def test_each_leaf_that_differs_is_listed_once():
    shares, metadata = planned()
    leaves = dict(metadata.state_dict_metadata)
    changed = Metadata({"none": leaves["none"], "w": BytesStorageMetadata()})
    assert set(refusal(check_shares, shares, changed)) == {
        "w: rank 0 has to write it, but it is float32 of shape (4, 2), "
        "and a Python opaque in the metadata",
        "step: rank 1 has to write it, but it is not in the metadata",
    }


def test_a_leaf_that_a_rank_knows_but_does_not_write_is_no_difference():
    shares, metadata = planned(1)
    leaves = dict(metadata.state_dict_metadata)
    del leaves["step"]
    items = WriteItems.of(shares[0].items)
    tensors = [block for block in items.blocks if block.boxes.rank]
    check_shares([SavePlan(WriteItems(items.table, tensors))], Metadata(leaves))


def test_a_finished_plan_has_the_leaves_of_the_share():
    shares, _ = planned(1)
    share = shares[0]
    finished = replace(share, items=[half(item) for item in share.items])
    assert refusal(check_finished, share, finished) == (
        "w: it is float16 of shape (4, 2), and float32 of shape (4, 2) in the share",
    )
    new = replace(share.items[0], index=replace(share.items[0].index, fqn="new"))
    assert refusal(check_finished, share, replace(share, items=[new])) == (
        "new: it is not in the share",
    )


def test_items_of_one_leaf_agree():
    first = planned(1)[0][0].items[0]
    with pytest.raises(xckpt.PlanError, match="w: dtype float32 and dtype float16"):
        WriteItems.of([first, half(first)])
