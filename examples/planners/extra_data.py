"""Keep something from every rank with the checkpoint: its host, its random seed, its times.

Each rank sends its part with its local plan. The coordinator puts the parts into the metadata in
rank order; they are JSON in the manifest, apart from what the user passes as ``metadata=``.

Example:
    >>> import torch, xckpt
    >>> planner = ExtraDataPlanner({"host": "node-7", "seed": 41})
    >>> _ = xckpt.save("memory://extra", {"weight": torch.ones(2)}, planner=planner)
    >>> xckpt.open("memory://extra").metadata.planner_data
    [{'host': 'node-7', 'seed': 41}]
"""

from __future__ import annotations

from dataclasses import replace

from xckpt.metadata import Metadata
from xckpt.planner import DefaultSavePlanner, SavePlan


class ExtraDataPlanner(DefaultSavePlanner):
    """Saves a list with something from every rank as the metadata's ``planner_data``.

    Args:
        mine: this rank's part: what JSON can carry.
    """

    def __init__(self, mine: object) -> None:
        super().__init__()
        self.mine = mine

    def create_local_plan(self) -> SavePlan:
        return replace(super().create_local_plan(), planner_data=self.mine)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        parts = [plan.planner_data for plan in plans]
        return plans, replace(metadata, planner_data=parts)
