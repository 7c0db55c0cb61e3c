"""Store float16 while training in float32: half the bytes, and the model stays as it is.

The plan says what is written: where an item's properties say float16, the metadata, the planned
bytes and the zarr array do too. `resolve_data` then has to return just that.

Example:
    >>> import torch, xckpt
    >>> state = {"weight": torch.ones(2, 3), "ids": torch.arange(4), "step": 3}
    >>> saved = xckpt.save("memory://half", state, planner=HalfPrecisionPlanner())
    >>> saved.state_dict_metadata["weight"].properties.dtype, state["weight"].dtype
    ('float16', torch.float32)
    >>> _ = xckpt.load_into("memory://half", state, cast=True)  # float32 again
"""

from __future__ import annotations

from dataclasses import replace

import torch

from xckpt.metadata import TensorProperties
from xckpt.planner import DefaultSavePlanner, SavePlan, WriteItem


class HalfPrecisionPlanner(DefaultSavePlanner):
    """Saves float32 tensors as float16, and everything else as it is."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[_halved(item) for item in plan.items])

    def resolve_data(self, write_item: WriteItem) -> object:
        data = super().resolve_data(write_item)
        planned = write_item.tensor_data  # None for a Python value
        if planned is not None and planned.properties.dtype == "float16":
            assert isinstance(data, torch.Tensor)
            return data.half()  # a new tensor, unless it was float16 already
        return data


def _halved(item: WriteItem) -> WriteItem:
    tensor = item.tensor_data
    if tensor is None or tensor.properties.dtype != "float32":
        return item
    return replace(item, tensor_data=replace(tensor, properties=TensorProperties("float16")))
