"""What is saved and loaded under schedules, and from which sizes on threads take parts of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import NamedSharding, PartitionSpec
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty

from xckpt import LoadOptions, SaveOptions

HANDED_OVER = {
    "xckpt.storage.chunks.window.TOGETHER": 2,
    "xckpt.storage.chunks.write_chunks.TOGETHER": 2,
    "xckpt.storage.chunks.unit_files.TOGETHER": 2,
    "xckpt.storage.chunks.window.SMALL_BYTES": 64,
    "xckpt.storage.chunks.read_chunks.SMALL_BYTES": 64,
    "xckpt.storage.chunks.write_chunks.SMALL_BYTES": 64,
    "xckpt.storage.chunks.chunk.SMALL_BYTES": 64,
    "xckpt.storage.chunks.plain_files.SLAB_BYTES": 128,
    "xckpt.storage.packs.read_packs.FILE_BYTES": 256,
    "xckpt.storage.packs.read_packs.GAP_BYTES": 0,
    "xckpt.storage.chunks.shards.reads.GAP_BYTES": 0,
    "xckpt.storage.stored_array.PARALLEL_BYTES": 64,
    "xckpt.storage.budget.FEW_PROCESSORS": 1,
    "xckpt.formats.reader.PART_BYTES": 256,
    "xckpt.formats.opened.PART_BYTES": 256,
    "xckpt.convert.mapped_reads.BLOCK_BYTES": 256,
    "xckpt.engine.host_copy.ALONE_BYTES": 64,
    "xckpt.engine.host_copy.SLAB": 256,
}
"""Sizes from which on threads take parts of the work: of these leaves they are few bytes."""


SIZES = (24, 40)


SMALL = SaveOptions(chunk_bytes=1 << 9, threads=3)


KINDS = {
    "chunks": SMALL,
    "packs": replace(SMALL, pack_bytes=1 << 12),
    "shards": replace(SMALL, shard_bytes=1 << 11),
    "readers": SaveOptions(readers=8, threads=3),
    "checksums": replace(SMALL, crc32c=True),
}


THREADS = LoadOptions(threads=4)


Tree = dict[str, Any]


def state(seed: int) -> Tree:
    """Leaves of several types, large and small; none holds a zero, as new memory often does."""
    random = np.random.default_rng(seed)
    large = {
        f"w{n}": random.integers(1, 100, SIZES).astype(["float32", "int32", "int8"][n])
        for n in range(3)
    }
    small = {f"s{n}": random.integers(1, 100, (n + 1, 3)).astype("float32") for n in range(6)}
    return {**large, "small": small, "step": 7, "text": "x" * 900}


def mapped(tree: Tree, make: Callable[[Any], Any]) -> Tree:
    """The tree with another leaf for each array."""
    return {
        name: mapped(leaf, make)
        if isinstance(leaf, dict)
        else make(leaf)
        if isinstance(leaf, np.ndarray)
        else leaf
        for name, leaf in tree.items()
    }


def whole(leaf: Any) -> Any:
    return np.asarray(leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf)


def same(loaded: Tree, expected: Tree) -> None:
    """Whether a tree is what was saved."""
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            same(loaded[name], value)
        else:
            np.testing.assert_array_equal(whole(loaded[name]), value, name)


def changed(tree: Tree) -> None:
    """Change every array in place."""
    for leaf in (*tree.values(), *tree["small"].values()):
        if isinstance(leaf, np.ndarray):
            leaf += 1


def on_devices(array: Any) -> Any:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    spec = PartitionSpec("a", "b") if array.shape == SIZES else PartitionSpec()
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))


def on_mesh(array: Any) -> Any:
    mesh = init_device_mesh("cpu", (1,))
    return empty(
        *array.shape, dtype=torch.from_numpy(array).dtype, device_mesh=mesh, placements=[Shard(0)]
    )


LIKES: dict[str, Callable[[Tree], Any]] = {
    "nothing": lambda tree: None,
    "numpy": partial(mapped, make=np.empty_like),
    "torch": partial(mapped, make=lambda a: torch.empty_like(torch.from_numpy(a))),
    "meta": partial(mapped, make=lambda a: torch.empty_like(torch.from_numpy(a), device="meta")),
    "dtensor": partial(mapped, make=on_mesh),
    "jax": partial(mapped, make=on_devices),
    "cast": partial(mapped, make=lambda a: np.empty(a.shape, "float64")),
    "transposed": partial(mapped, make=lambda a: np.empty(a.shape[::-1], a.dtype).T),
}


@contextlib.contextmanager
def in_one_process(of_torch: bool) -> Iterator[None]:
    """A process group of this process, for DTensors."""
    if of_torch:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if of_torch:
            dist.destroy_process_group()
