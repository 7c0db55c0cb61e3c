"""float16 in storage, float32 in training: plan, metadata, bytes and data say the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
import xckpt.zarr_dtypes
from conformance.implementations.threads import ThreadGroup, results
from examples.planners.half_precision import HalfPrecisionPlanner
from tests.support.examples import examples
from tests.support.jobs import fresh_path
from xckpt.metadata import BytesStorageMetadata, TensorStorageMetadata
from xckpt.planner import SavePlan

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int32, torch.bool]


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tensors = {str(dtype)[6:]: (torch.randn(6, 5) * 9).to(dtype) for dtype in DTYPES}
    return {
        **tensors,
        "strided": torch.randn(4, 7).T,
        "step": 3,
        "note": "float32",
        "long": "x" * 9000,
    }


class Noting(HalfPrecisionPlanner):
    """Also notes what is planned in the end."""

    finished: SavePlan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.finished = super().finish_plan(new_plan)
        return self.finished


@pytest.mark.parametrize("size", [1, 3])
def test_metadata_planned_bytes_and_data_agree(tmp_path, size):
    mine, kept = state(), state()
    planners = [Noting() for _ in range(size)]

    def save(group: ThreadGroup) -> xckpt.Metadata:
        return xckpt.save(tmp_path / "ckpt", mine, group=group, planner=planners[group.rank])

    metadata = results(size, save)[0].state_dict_metadata
    planned = {item.index.fqn: item for planner in planners for item in planner.finished.items}
    group: Any = zarr.open_group(tmp_path / "ckpt", mode="r")
    stored: Any = xckpt.open(tmp_path / "ckpt")
    for name, leaf in kept.items():
        described, data = metadata[name], planned[name].tensor_data
        if not isinstance(leaf, torch.Tensor):
            assert isinstance(described, BytesStorageMetadata)
            assert described.kind == type(leaf).__name__ and stored[name] == leaf
            assert data is None and planned[name].tensor_storage_size() is None
            continue
        expected = leaf.half() if leaf.dtype == torch.float32 else leaf
        assert isinstance(described, TensorStorageMetadata) and data is not None
        assert described.properties == data.properties
        assert described.properties.dtype == stored[name].dtype == str(expected.dtype)[6:]
        assert planned[name].tensor_storage_size() == expected.numel() * expected.element_size()
        if expected.dtype != torch.bfloat16:
            assert np.array_equal(stored[name][...], expected.numpy())
            assert np.array_equal(group[name][:], expected.numpy())
        # The user's own are as they were.
        assert mine[name].dtype == leaf.dtype and torch.equal(mine[name], leaf)
    assert xckpt.open(tmp_path / "ckpt").verify() == []


def test_resolving_an_item_twice_gives_the_same():
    planner, mine = HalfPrecisionPlanner(), state()
    planner.set_up_planner(mine)
    for item in planner.create_local_plan().items:
        first: Any = planner.resolve_data(item)
        again: Any = planner.resolve_data(item)
        if item.tensor_data is None:
            assert first.read() == again.read()
        else:
            assert (
                torch.equal(first, again)
                and str(first.dtype)[6:] == item.tensor_data.properties.dtype
            )


def test_a_cast_brings_float32_back():
    path, mine = fresh_path(), {"w": torch.randn(5, 3), "step": 1}
    xckpt.save(path, mine, planner=HalfPrecisionPlanner())
    target = {"w": torch.zeros(5, 3), "step": 0}
    with pytest.raises(
        xckpt.TreeMismatchError, match="w: dtype float16 in the checkpoint, float32"
    ):
        xckpt.load_into(path, target)
    xckpt.load_into(path, target, cast=True)
    assert torch.equal(target["w"], mine["w"].half().float()) and target["step"] == 1


@given(st.lists(st.sampled_from(DTYPES), max_size=5))
@examples(20)
def test_only_float32_changes(dtypes):
    planner = HalfPrecisionPlanner()
    planner.set_up_planner({f"t{n}": torch.zeros(3, dtype=dtype) for n, dtype in enumerate(dtypes)})
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    found = [item.tensor_data.properties.dtype for item in plans[0].items if item.tensor_data]
    names = [str(dtype)[6:] for dtype in dtypes]
    assert found == ["float16" if name == "float32" else name for name in names]
    assert len(metadata.state_dict_metadata) == len(dtypes)
