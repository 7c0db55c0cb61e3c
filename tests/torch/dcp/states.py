"""States that DCP saves in these tests, and the same on every rank as plain NumPy arrays.

Functions named ``on_rank_*`` run in the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.torch_meshes import on_rank_mesh

ROWS, COLUMNS = 11, 6


def whole(seed: int = 0) -> np.ndarray:
    """What the big tensors hold."""
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * seed


def on_rank_state(mesh: str = "4", seed: int = 0, *, dim: int = 0) -> dict[str, Any]:
    """Sharded, replicated and plain tensors, and values, in dicts and lists."""
    full = torch.from_numpy(whole(seed))

    def spread(*placements: Any) -> torch.Tensor:
        return distribute_tensor(full, on_rank_mesh(mesh), placements, src_data_rank=None)

    axes = on_rank_mesh(mesh).ndim
    return {
        "model": {
            "layers.0.weight": spread(Shard(dim), *[Replicate()] * (axes - 1)),
            "same": spread(*[Replicate()] * axes),
        },
        "opt": [torch.tensor(3.0 + seed), {"empty": torch.zeros(0, 3)}],
        "step": 7 + seed,
        "args": {"betas": (0.9, 0.99), "names": ["a", "b"]},
    }


def on_rank_blank(mesh: str = "4", *, dim: int = 1) -> dict[str, Any]:
    """Targets for `on_rank_state`, sharded another way and filled with something else."""
    blank = on_rank_state(mesh, seed=-5, dim=dim)
    return {**blank, "step": None, "args": {"betas": None, "names": []}}


def on_rank_check(state: dict[str, Any], seed: int = 0) -> None:
    """All of a loaded state is what was saved."""
    full = torch.from_numpy(whole(seed))
    for name in ("layers.0.weight", "same"):
        assert torch.equal(state["model"][name].full_tensor(), full), name
    assert state["opt"][0] == 3.0 + seed
    assert state["opt"][1]["empty"].shape == (0, 3)
    assert state["step"] == 7 + seed
    assert state["args"] == {"betas": (0.9, 0.99), "names": ["a", "b"]}
