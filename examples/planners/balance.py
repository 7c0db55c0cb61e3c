"""Decide who writes what: deal out replicated items to the ranks, the largest first.

By default replicas share each tensor's writing along its chunks. This planner gives each item whole
to the one of its holders that has the fewest bytes so far, as is usual for data-parallel training.
An item that one rank alone holds stays there.

Example:
    >>> import torch, xckpt
    >>> state = {f"layer{n}": torch.full((4,), float(n)) for n in range(5)}
    >>> _ = xckpt.save("memory://balanced", state, planner=BalancingPlanner())  # on every rank
    >>> xckpt.open("memory://balanced")["layer3"][:]
    array([3., 3., 3., 3.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from xckpt.metadata import Metadata
from xckpt.planner import DefaultSavePlanner, SavePlan, WriteItem


class BalancingPlanner(DefaultSavePlanner):
    """Deals out items to the ranks that hold them, so that all write about as many bytes."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        shares = deal(all_plans)
        dealt = [replace(plan, items=share) for plan, share in zip(all_plans, shares, strict=True)]
        # What is left has one holder each. The default checks that it makes up whole tensors.
        return super().create_global_plan(dealt)


def deal(plans: Sequence[SavePlan]) -> list[list[WriteItem]]:
    """Each distinct item for one of the ranks that offer it; one list a rank."""
    holders: dict[WriteItem, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item, []).append(rank)
    shares: list[list[WriteItem]] = [[] for _ in plans]
    loads = [(0, 0)] * len(plans)  # bytes, then items: values have no bytes, but are dealt too
    for item in sorted(holders, key=lambda item: -item.box_bytes):
        rank = min(holders[item], key=loads.__getitem__)
        shares[rank].append(item)
        size, count = loads[rank]
        loads[rank] = size + item.box_bytes, count + 1
    return shares
