"""What a load through DCP reads, verifies, casts and never does."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.dcp.states import on_rank_state
from xckpt.torch.dcp import XckptStorageReader, XckptStorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SHAPE = (64, 48)


def on_rank_tensor(dim: int, fill: float | None = None) -> DTensor:
    full = torch.arange(64.0 * 48).reshape(SHAPE) if fill is None else torch.full(SHAPE, fill)
    return distribute_tensor(full, on_rank_mesh("4"), [Shard(dim)], src_data_rank=None)


def on_rank_save_rows(rank: int, path: Path) -> None:
    options = xckpt.SaveOptions(chunk_bytes=4 * 48 * 4)
    dcp.save({"w": on_rank_tensor(0)}, storage_writer=XckptStorageWriter(path, options=options))


def on_rank_load(rank: int, path: Path, dim: int, share: bool) -> int:
    """Bytes of chunks that this rank has read."""
    state: dict[str, Any] = {"w": on_rank_tensor(dim, 0.0)}
    reader = XckptStorageReader(path, options=xckpt.LoadOptions(share_reads=share))
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["w"].full_tensor(), on_rank_tensor(dim).full_tensor())
    return reader.bytes_read


def test_one_row_shard_reads_only_the_chunks_it_touches(four_ranks: Ranks, tmp_path: Path):
    """Chunks of 4 rows; rows [22, 30) lie in the chunks [20, 32), and no other file is there."""
    path = tmp_path / "ckpt"
    four_ranks.run(on_rank_save_rows, path)
    files = sorted((path / "w" / "c").rglob("*"))
    files = [file for file in files if file.is_file()]
    assert len(files) == 16
    for file in files:
        if int(file.relative_to(path / "w" / "c").parts[0]) not in (5, 6, 7):
            file.unlink()

    class Rows(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> dcp.LoadPlan:
            plan = super().create_local_plan()
            [item] = plan.items
            changes = {
                "dest_offsets": torch.Size((22, 0)),
                "storage_offsets": torch.Size((22, 0)),
                "lengths": torch.Size((8, 48)),
            }
            for name, value in changes.items():
                object.__setattr__(item, name, value)
            return plan

    state = {"w": torch.zeros(SHAPE)}
    reader = XckptStorageReader(path)
    dcp.load(state, storage_reader=reader, planner=Rows())
    expected = torch.arange(64.0 * 48).reshape(SHAPE)
    assert torch.equal(state["w"][22:30], expected[22:30])
    assert not state["w"][:22].any() and not state["w"][30:].any()
    assert reader.bytes_read == 12 * 48 * 4


def test_row_shards_are_read_once_and_nothing_else(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_save_rows, tmp_path / "ckpt")
    assert four_ranks.run(on_rank_load, tmp_path / "ckpt", 0, False) == [16 * 48 * 4] * 4


def test_rows_to_columns_over_four_ranks_read_the_checkpoint_once(
    four_ranks: Ranks, tmp_path: Path
):
    """DCP's own reader reads it four times: every rank wants a part of every chunk."""
    four_ranks.run(on_rank_save_rows, tmp_path / "ckpt")
    whole = 64 * 48 * 4
    assert sum(four_ranks.run(on_rank_load, tmp_path / "ckpt", 1, True)) == whole
    assert sum(four_ranks.run(on_rank_load, tmp_path / "ckpt", 1, False)) == 4 * whole


def on_rank_strange(rank: int, path: Path) -> None:
    class Repeating(dcp.DefaultLoadPlanner):
        """Makes a plan of its own after the ranks have said what they want."""

        def create_global_plan(self, global_plan: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
            return [dcp.LoadPlan(plan.items) for plan in global_plan]

    state: dict[str, Any] = {"w": on_rank_tensor(1, 0.0)}
    dcp.load(state, storage_reader=XckptStorageReader(path), planner=Repeating())
    assert torch.equal(state["w"].full_tensor(), on_rank_tensor(1).full_tensor())


def test_a_planner_may_make_new_plans(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_save_rows, tmp_path / "ckpt")
    four_ranks.run(on_rank_strange, tmp_path / "ckpt")


def on_rank_corrupt(rank: int, path: Path) -> str:
    state: dict[str, Any] = {"w": on_rank_tensor(0, 0.0)}
    try:
        dcp.load(state, storage_reader=XckptStorageReader(path))
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def test_a_damaged_chunk_is_refused_by_name_on_all_ranks(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_save_rows, tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "w" / "c" / "9" / "0"
    data = bytearray(file.read_bytes())
    data[17] ^= 1
    file.write_bytes(data)
    for answer in four_ranks.run(on_rank_corrupt, tmp_path / "ckpt"):
        assert "CorruptCheckpointError" in answer
        assert "w: [36, 40) x [0, 48)" in answer


def on_rank_replaced(rank: int, path: Path) -> str:
    """As if the checkpoint were replaced after rank 0 has opened it."""
    try:
        state = on_rank_state()
        dcp.load(state, storage_reader=XckptStorageReader(path / ("a" if rank else "b")))
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def test_ranks_that_see_different_checkpoints_stop(four_ranks: Ranks, tmp_path: Path):
    four_ranks.run(on_rank_two, tmp_path)
    for answer in four_ranks.run(on_rank_replaced, tmp_path):
        assert "was replaced while the ranks opened it" in answer


def on_rank_two(rank: int, path: Path) -> None:
    for name in ("a", "b"):
        state = on_rank_state(seed=len(name) + ord(name))
        dcp.save(state, storage_writer=XckptStorageWriter(path / name))


KINDS = ("float32", "float64", "float16", "bfloat16", "int8", "int64", "bool", "uint8", "complex64")


@examples(60)
@given(st.sampled_from(KINDS), st.sampled_from(KINDS), st.integers(0, 1 << 30))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_another_dtype_is_cast_as_copy_does_it(source: str, target: str, seed: int):
    """Infinities, NaN, halves and what overflows included."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(40, generator=generator, dtype=torch.float64) * 10.0 ** (seed % 40 - 10)
    numbers[:4] = torch.tensor([0.5, -1.5, float("inf"), float("nan")])
    if source != "float64" and not getattr(torch, source).is_floating_point:
        numbers = numbers.nan_to_num(3.0, 5.0, -5.0).clamp(-100, 100)
    saved = numbers.to(getattr(torch, source))
    if not getattr(torch, target).is_floating_point and saved.is_floating_point():
        saved = saved.nan_to_num(1.0, 2.0, -2.0).clamp(0, 100)  # else the result is undefined
    dcp.save({"x": saved}, storage_writer=XckptStorageWriter("memory://cast"), no_dist=True)
    state = {"x": torch.zeros(40, dtype=getattr(torch, target))}
    dcp.load(state, storage_reader=XckptStorageReader("memory://cast"), no_dist=True)
    expected = torch.zeros(40, dtype=getattr(torch, target)).copy_(saved)
    assert torch.equal(state["x"].view(torch.uint8), expected.view(torch.uint8))


def targets() -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        inference = torch.zeros(3, 4)
    return {
        "transposed": torch.zeros(4, 3).T,
        "strided": torch.zeros(6, 8)[::2, ::2],
        "parameter": torch.nn.Parameter(torch.zeros(3, 4)),
        "inference": inference,
        "negated": torch.zeros(3, 4, dtype=torch.complex64).conj().imag,
        "offset": torch.zeros(20)[8:].view(3, 4),
    }


@pytest.mark.parametrize("name", targets())
def test_any_target_is_filled_in_place(name: str, tmp_path: Path):
    saved = torch.arange(12.0).reshape(3, 4)
    dcp.save({"x": saved}, storage_writer=XckptStorageWriter(tmp_path / "a"))
    target = targets()[name]
    version = None if target.is_inference() else target._version
    state = {"x": target}
    dcp.load(state, storage_reader=XckptStorageReader(tmp_path / "a"))
    assert state["x"] is target
    assert torch.equal(target.detach(), saved)
    assert version is None or target._version > version


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_bytes_are_never_unpickled_by_xckpt(tmp_path: Path):
    """DCP's planner does so when it is given them; xckpt hands them on, shows them, loads them."""
    trace = tmp_path / "trace"
    state = {"w": torch.ones(2), "bomb": Bomb(trace)}
    dcp.save(state, storage_writer=XckptStorageWriter(tmp_path / "a"))
    checkpoint = xckpt.open(tmp_path / "a")
    assert isinstance(checkpoint["bomb"], bytes) and checkpoint.verify() == []
    assert isinstance(xckpt.load(tmp_path / "a")["bomb"], bytes)
    XckptStorageReader(tmp_path / "a").read_metadata()

    class Careful(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
            with pytest.raises(Exception, match="Weights only load failed"):
                torch.load(value, weights_only=True)

    reader = XckptStorageReader(tmp_path / "a")
    dcp.load({"w": torch.ones(2), "bomb": 0}, storage_reader=reader, planner=Careful())
    assert not trace.exists()


def test_what_xckpt_saved_of_lists_and_tuples_dcp_gets_as_one_object(tmp_path: Path):
    """Where DCP's flattening takes a container for one object, so does the reader."""
    saved: dict[str, Any] = {
        "opt": {
            "state": {0: {"exp_avg": np.ones(3), "step": np.array(4.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "none": None}],
        },
        "pair": (np.arange(3), [np.zeros((0, 2)), 2j]),
        "nothing": [],
    }
    xckpt.save(tmp_path / "a", saved)
    state: dict[str, Any] = {
        "opt": {
            "state": {0: {"exp_avg": torch.zeros(3).double(), "step": torch.tensor(0.0).double()}},
            "param_groups": [{"lr": 0.0, "betas": (0.0,), "params": [], "none": 1}],
        },
        "pair": (),
        "nothing": [1],
    }
    dcp.load(state, storage_reader=XckptStorageReader(tmp_path / "a"))
    opt = state["opt"]
    assert opt["state"][0]["exp_avg"].tolist() == [1, 1, 1]
    assert opt["state"][0]["step"] == 4.0
    assert opt["param_groups"] == [
        {"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "none": None}
    ]
    assert isinstance(state["pair"], tuple)
    assert torch.equal(state["pair"][0], torch.arange(3))
    assert state["pair"][1][0].shape == (0, 2) and state["pair"][1][1] == 2j
    assert state["nothing"] == []


def test_every_python_value_that_xckpt_saved_comes_back(tmp_path: Path):
    values = {
        "none": None,
        "true": True,
        "big": 1 << 80,
        "float": 0.1,
        "complex": 1 - 2j,
        "text": "é" * 5000,
        "bytes": b"\x00\xff" * 4000,
    }
    xckpt.save(tmp_path / "a", values)
    state: dict[str, Any] = dict.fromkeys(values, 0)
    dcp.load(state, storage_reader=XckptStorageReader(tmp_path / "a"))
    assert state == values
