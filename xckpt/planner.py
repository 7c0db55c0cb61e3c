"""The planners and what they exchange, under the names that torch's users know."""

from xckpt.core.grid import GridOptions
from xckpt.core.load_planner import DefaultLoadPlanner, LoadPlanner
from xckpt.core.plan import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from xckpt.core.save_planner import DefaultSavePlanner, SavePlanner

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
