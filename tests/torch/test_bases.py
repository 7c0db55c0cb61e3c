"""Saves with a base on real ranks: each shares its own chunks, and all fail alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import xckpt
from tests.support.ranks import Ranks

ROWS = 1 << 16
SMALL = xckpt.SaveOptions(chunk_bytes=1 << 16)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Rows of which each rank has half, an uneven table, and what both have alike."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.arange(ROWS, dtype=torch.float32).reshape(-1, 4)[rank * ROWS // 8 :][: ROWS // 8]
    table = torch.arange(7, dtype=torch.int64)[4 * rank :][: 4 - rank]
    shape, stride = torch.Size((7,)), (1,)
    return {
        "rows": DTensor.from_local(rows.clone(), mesh, [Shard(0)], run_check=False),
        "table": DTensor.from_local(table, mesh, [Shard(0)], shape=shape, stride=stride),
        "both": torch.full((5,), float(step)),
        "step": step,
    }


def on_rank_save(rank: int, root: str, base: str | None, name: str, changed: bool) -> int:
    """One element of rank 1 may be changed; how many bytes this rank shared."""
    state = state_of(rank, 1)
    if changed and rank == 1:
        state["rows"].to_local()[0, 0] = -1
    taken: list[xckpt.Metrics] = []
    options = xckpt.SaveOptions(chunk_bytes=SMALL.chunk_bytes, metrics=taken.append)
    xckpt.save(f"{root}/{name}", state, base=base and f"{root}/{base}", options=options)
    return taken[0].shared


def on_rank_save_own(rank: int, root: str, base: str | None, name: str, step: int) -> int:
    """Leaves that one rank alone has, and leaves that each rank names in an order of its own."""
    # By its place among the leaves of rank 0, "b" of this step would be "a" of the step before.
    common = {letter: torch.full((4,), number + step) for number, letter in enumerate("cba")}
    mine = {f"of-{rank}": torch.full((6,), rank), f"also-of-{rank}": torch.full((5,), rank)}
    state = mine | common if rank else dict(reversed(common.items())) | mine
    taken: list[xckpt.Metrics] = []
    options = xckpt.SaveOptions(metrics=taken.append)
    xckpt.save(f"{root}/{name}", state, base=base and f"{root}/{base}", options=options)
    return taken[0].shared


def on_rank_fail(rank: int, root: str, base: str) -> tuple[str, str]:
    chosen = f"{root}/{base}" if base != "differs" else f"{root}/a-{rank}"
    try:
        xckpt.save(f"{root}/failed", state_of(rank, 1), base=chosen)
    except xckpt.XckptError as error:
        return type(error).__name__, str(error)
    return "", ""


def one_file(*paths: Path) -> bool:
    return len({os.stat(path).st_ino for path in paths}) == 1


def test_each_rank_shares_its_own_chunks(ranks: Ranks, tmp_path: Path) -> None:
    a, b, alone = tmp_path / "a", tmp_path / "b", tmp_path / "alone"
    ranks.run(on_rank_save, str(tmp_path), None, "a", False)
    shared = ranks.run(on_rank_save, str(tmp_path), "a", "b", True)
    whole = ROWS * 4 + 7 * 8 + 5 * 4
    assert sum(shared) == whole - SMALL.chunk_bytes and min(shared) > 0
    assert not one_file(a / "rows/c/2/0", b / "rows/c/2/0")
    assert all(one_file(a / key, b / key) for key in ("rows/c/0/0", "rows/c/3/0", "both/c/0"))
    assert xckpt.open(b).verify() == [] == xckpt.open(a).verify()
    assert xckpt.load(b)["rows"][ROWS // 8, 0] == -1
    # One process keeps the grid of several, and several that of one.
    state = {name: value for name, value in xckpt.load(a).items() if name != "step"}
    xckpt.save(alone, state, base=a)
    assert all(one_file(a / key, alone / key) for key in ("rows/c/0/0", "rows/c/3/0", "both/c/0"))
    assert sum(ranks.run(on_rank_save, str(tmp_path), "alone", "c", False)) == whole
    assert xckpt.open(tmp_path / "c").verify() == []


@pytest.mark.parametrize("step, shared", [(0, 2 * 11 * 8 + 3 * 4 * 8), (1, 2 * 11 * 8)])
def test_leaves_that_some_ranks_have(ranks: Ranks, tmp_path: Path, step: int, shared: int) -> None:
    ranks.run(on_rank_save_own, str(tmp_path), None, "a", 0)
    assert sum(ranks.run(on_rank_save_own, str(tmp_path), "a", "b", step)) == shared
    assert xckpt.open(tmp_path / "b").verify() == []
    loaded = xckpt.load(tmp_path / "b")
    assert [loaded[letter][0] for letter in "cba"] == [step, 1 + step, 2 + step]
    assert (loaded["of-1"] == 1).all() and (loaded["also-of-0"] == 0).all()


def test_all_ranks_fail_alike(ranks: Ranks, tmp_path: Path) -> None:
    for name, text in ranks.run(on_rank_fail, str(tmp_path), "nowhere"):
        assert name == "NotACheckpointError" and "base: " in text and "nowhere" in text
    for name, text in ranks.run(on_rank_fail, str(tmp_path), "differs"):
        assert name == "PlanError" and "the argument base is" in text
    assert list(tmp_path.iterdir()) == []
