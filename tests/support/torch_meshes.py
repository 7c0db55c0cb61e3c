"""Meshes over four ranks, some of which leave ranks out, and random DTensors on them.

Functions named ``on_rank_*`` run in the ranks; the others in the test's process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from xckpt.core.dtypes import numpy_dtype
from xckpt.torch.leaf import from_numpy

MESHES: dict[str, list] = {
    "4": [0, 1, 2, 3],
    "2x2": [[0, 1], [2, 3]],
    "4x1": [[0], [1], [2], [3]],
    "2x1x2": [[[0, 1]], [[2, 3]]],
    "transposed": [[0, 2], [1, 3]],
    "three": [0, 1, 2],
    "two": [1, 3],
    "one": [2],
}
NAMES = {
    "2x2": ("dp", "tp"),
    "2x1x2": ("dp", "pp", "tp"),
}


@functools.cache
def on_rank_mesh(name: str) -> DeviceMesh:
    """The mesh, made once; all four ranks must come here together."""
    return DeviceMesh("cpu", MESHES[name], mesh_dim_names=NAMES.get(name))


@dataclass(frozen=True)
class Case:
    """A global array and the way in which it is to be distributed."""

    shape: tuple[int, ...]
    dtype: str
    mesh: str
    placements: tuple[int | None, ...]
    """For each mesh axis the tensor dimension that it shards, or None."""

    def array(self) -> np.ndarray:
        """What the tensor holds: distinct small integers, as far as the dtype goes."""
        count = int(np.prod(self.shape, dtype=np.int64))
        modulo = {"bool": 2, "float8_e5m2": 5, "float8_e4m3fn": 15, "int8": 127, "uint8": 251}
        values = np.arange(count) % modulo.get(self.dtype, 251)
        return values.astype(numpy_dtype(self.dtype)).reshape(self.shape)


def on_rank_placements(case: Case) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in case.placements]


def on_rank_distribute(case: Case) -> DTensor:
    """The case as a DTensor; every rank cuts for itself, since gloo sends no float8."""
    full, mesh = from_numpy(case.array()), on_rank_mesh(case.mesh)
    return distribute_tensor(full, mesh, on_rank_placements(case), src_data_rank=None)


SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16])
DTYPES = st.sampled_from(
    ["float32", "bfloat16", "int64", "bool", "complex64", "float8_e5m2", "uint8", "float16"]
)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    meshes: list[str] | None = None,
) -> Case:
    """Any distribution of a tensor of up to three dimensions, or of the one given."""
    if shape is None:
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
    mesh = draw(st.sampled_from(meshes or sorted(MESHES)))
    axes = np.array(MESHES[mesh]).ndim
    dims = st.none() if not shape else st.none() | st.integers(0, len(shape) - 1)
    placements = tuple(draw(st.lists(dims, min_size=axes, max_size=axes)))
    return Case(shape, dtype or draw(DTYPES), mesh, placements)
