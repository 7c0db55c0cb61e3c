"""The planners and what they exchange, under the names that torch's users know."""

from xckpt.core.geometry.grid import GridOptions
from xckpt.core.plan.items import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from xckpt.core.plan.load import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan.save import DefaultSavePlanner, SavePlanner

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "GridOptions",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
]
