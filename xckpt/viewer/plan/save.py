"""A save with another mesh, as numbers: the grid of each leaf, and the bytes of each writer.

It is what `xckpt.core.plan.layout` decides for such shards: chunks with one writer, replicas
shared among their holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

import numpy as np

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import Grid, GridOptions
from xckpt.core.geometry.shard_cuts import device_boxes, held_by
from xckpt.core.manifest.entries import TensorEntry
from xckpt.core.plan.layout import Layout, LeafShards, lay_out, share
from xckpt.viewer.plan.mesh_text import ReaderMesh


def saved_grids(
    tensors: Mapping[int, TensorEntry],
    of_leaf: Mapping[int, int],
    first_leaf: Mapping[int, int],
    mesh: ReaderMesh,
) -> tuple[list[str], tuple[int, ...]]:
    """The grid of each kind in words, and the bytes that each rank writes.

    Args:
        tensors: leaf number -> its entry.
        of_leaf: leaf number -> the number of its kind.
        first_leaf: number of a kind -> a leaf of it.
        mesh: who saves.
    """
    layouts = [_layout(tensors[first_leaf[kind]], mesh) for kind in range(len(first_leaf))]
    counts = Counter(of_leaf.values())
    loads = np.zeros(mesh.ranks, np.int64)
    contested = list[int]()
    for kind, layout in enumerate(layouts):
        if isinstance(layout, str):
            continue
        if layout.contested:
            contested.append(kind)
            continue
        added = np.zeros(mesh.ranks, np.int64)
        share(layout, added)
        loads += added * counts[kind]
    for kind in sorted(contested, key=lambda kind: -prod(tensors[first_leaf[kind]].shape)):
        layout = layouts[kind]
        assert isinstance(layout, Layout)
        for _ in range(counts[kind]):
            share(layout, loads)
    shapes = [tensors[first_leaf[kind]].shape for kind in range(len(layouts))]
    words = [
        layout if isinstance(layout, str) else grid_text(layout.grid, shape)
        for layout, shape in zip(layouts, shapes, strict=True)
    ]
    return words, tuple(loads.tolist())


def _layout(leaf: TensorEntry, mesh: ReaderMesh) -> Layout | str:
    cuts = mesh.cuts(mesh.spec(leaf.name), leaf.shape)
    boxes, ranks = held_by(device_boxes(cuts, [size for _, size in mesh.axes]), len(leaf.shape))
    return lay_out(LeafShards(leaf.shape, item_size(leaf.dtype), boxes, ranks), GridOptions())


def grid_text(grid: Grid, shape: tuple[int, ...]) -> str:
    """A grid in words.

    Example:
        >>> from xckpt.core.geometry.box import Boxes
        >>> grid_text(Grid.of(Boxes.whole((4, 2)), [(2, 2)], [None]), (4, 2))
        'chunks of [2, 2]'
    """
    if grid.is_regular(shape) or len(grid.arrays) == 1:
        return f"chunks of {grid.chunks[0].tolist()}"
    return f"{len(grid.arrays):,} pieces"
