"""The boxes of a stored sharding against those of JAX and of torch's rule."""

from __future__ import annotations

from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xckpt.core.geometry.cover import cover_fault, unique
from xckpt.core.geometry.shard_cuts import MOST_DEVICES, device_boxes, dimension_cuts, held_by
from xckpt.core.metadata import Sharding
from xckpt.jax.shardings import stored_sharding

MESHES = {(8,): ("a",), (2, 4): ("a", "b"), (2, 2, 2): ("a", "b", "c")}


@given(st.sampled_from(list(MESHES)), st.data())
def test_they_are_those_of_jax(sizes: tuple[int, ...], data: st.DataObject) -> None:
    names = MESHES[sizes]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), names)
    rank = data.draw(st.integers(0, 3))
    order = data.draw(st.permutations(names))
    cut = [data.draw(st.integers(-1, rank - 1)) if rank else -1 for _ in names]
    spec = [tuple(a for a, d in zip(order, cut, strict=True) if d == k) for k in range(rank)]
    parts = [prod(mesh.shape[a] for a in axes) for axes in spec]
    shape = tuple(n * data.draw(st.integers(1, 3)) for n in parts)
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    cuts = dimension_cuts(stored_sharding(sharding, rank), shape)
    assert cuts is not None
    boxes = device_boxes(cuts, sizes)
    for device, index in sharding.devices_indices_map(shape).items():
        [box] = boxes[list(mesh.devices.flat).index(device)]
        theirs = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
        assert list(zip(box.offsets, box.ends, strict=True)) == theirs


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans())
def test_torch_placements_cover_the_tensor(size: int, mesh: list[int], strided: bool) -> None:
    placements = ["Shard(dim=0)"] * len(mesh)
    if strided and len(mesh) > 1:  # as FSDP2 over tensor parallelism writes it
        placements[0] = f"_StridedShard(dim=0, sf={prod(mesh[1:])})"
    axes = tuple((str(n), parts) for n, parts in enumerate(mesh))
    cuts = dimension_cuts(Sharding(axes=axes, placements=tuple(placements)), (size, 3))
    assert cuts is not None
    boxes, devices = held_by(device_boxes(cuts, mesh), 2)
    assert cover_fault((size, 3), unique(boxes)[0]) is None
    assert len(devices) == len(boxes)


@pytest.mark.parametrize(
    "sharding",
    [
        None,
        Sharding(axes=(("a", 2),), placements=("EnumerableShardingSpec()",)),
        Sharding(axes=(("a", 2),), placements=("Shard(dim=2)",)),
        Sharding(axes=(("a", 2),), placements=("Shard(dim=0)", "Shard(dim=0)")),
        Sharding(axes=(("a", 2),), spec=(("b",), ())),
        Sharding(axes=(("a", 2),), spec=((), (), ("a",))),
        Sharding(axes=(("a", 0),), spec=(("a",), ())),
        Sharding(axes=(("a", MOST_DEVICES + 1),), spec=(("a",), ())),
        Sharding(axes=(("a", 1 << 62), ("b", 1 << 62)), placements=("Shard(0)", "Replicate()")),
        Sharding(axes=(("a", 64),), placements=("_StridedShard(dim=0, sf=999999)",)),
    ],
    ids=str,
)
def test_what_a_sharding_does_not_tell(sharding: Sharding | None) -> None:
    assert dimension_cuts(sharding, (4, 4)) is None
