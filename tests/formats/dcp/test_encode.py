"""``.metadata`` made without torch: torch reads from it what it reads from its own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.torch.dcp.folders import alone, load_alone, save_alone
from tests.torch.dcp.test_imports import TORCH_DTYPES
from xckpt.formats.dcp.metadata import DCPMetadata, parse
from xckpt.formats.dcp.sink import encode

STATE: dict[str, Any] = {
    "model": {"w.weight": torch.ones(2, 3), "h\u00e9": torch.zeros((), dtype=torch.bfloat16)},
    "list": [torch.zeros(4), {"x": torch.ones(5)}],
    "lr": 0.1,
    "betas": (0.9, 0.95),
}


def rewritten(folder: Path) -> tuple[Metadata, Metadata]:
    """What torch says of a folder, and what it says after its ``.metadata`` went through ours."""
    path = folder / ".metadata"
    before: Metadata = pickle.loads(path.read_bytes())
    path.write_bytes(encode(parse(path.read_bytes())))
    return before, pickle.loads(path.read_bytes())


def without_strides(metadata: Metadata) -> None:
    """From 2.15 on torch notes strides, which no load of DCP needs and xckpt does not write."""
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, TensorStorageMetadata) and hasattr(stored.properties, "strides"):
            setattr(stored.properties, "strides", None)  # noqa: B010  # older releases lack it


def test_torch_unpickles_its_own_objects(tmp_path: Path) -> None:
    folder = save_alone(STATE, tmp_path / "dcp")
    torchs, ours = rewritten(folder)
    without_strides(torchs)
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(torchs.state_dict_metadata)
    assert ours.planner_data == torchs.planner_data
    assert ours.storage_data == torchs.storage_data
    assert getattr(torchs, "version", None) in (None, ours.version)
    assert pickle.dumps(ours.state_dict_metadata["model.w.weight"]) == pickle.dumps(
        torchs.state_dict_metadata["model.w.weight"]
    )


def test_torch_loads_by_it(tmp_path: Path) -> None:
    folder = save_alone(STATE, tmp_path / "dcp", single_file_per_rank=False)
    rewritten(folder)
    target: dict[str, Any] = {
        "model": {"w.weight": torch.zeros(2, 3)}, "list": [torch.ones(4)], "betas": None
    }  # fmt: skip
    load_alone(target, folder)
    assert target["model"]["w.weight"].eq(1).all() and not target["list"][0].any()
    assert target["betas"] == (0.9, 0.95)
    with alone():
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(folder, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt")["list"][1]["x"].tolist() == [1] * 5


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_alone({"w": torch.zeros(3, 2).to(dtype)}, tmp_path / "dcp")
    _, ours = rewritten(folder)
    properties: TensorProperties = ours.state_dict_metadata["w"].properties  # type: ignore[union-attr]
    assert properties == TensorProperties(dtype=dtype)


def test_what_is_parsed_of_it(tmp_path: Path) -> None:
    data = (save_alone(STATE, tmp_path / "dcp") / ".metadata").read_bytes()
    first, again = parse(data), parse(encode(parse(data)))
    assert (again.objects, again.paths, again.order) == (first.objects, first.paths, first.order)
    assert [vars_of(t) for t in again.tensors.values()] == [
        vars_of(t) for t in first.tensors.values()
    ]
    assert parse(encode(DCPMetadata({}, {}, {}, ()))).order == ()


def vars_of(tensor: Any) -> tuple[object, ...]:
    return tensor.name, tensor.dtype, tensor.shape, list(tensor.boxes), tensor.places
