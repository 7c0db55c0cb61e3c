"""Named placements: which boxes of which tensors each of W ranks holds.

Every tensor is a float32 matrix of `WIDTH` columns. Layers repeat, so there are `SHAPES` different
numbers of rows.

1. ``fsdp``: rows over all ranks.
2. ``mesh``: rows over W / 8 ranks, columns over 8.
3. ``hsdp``: rows over W / 8 ranks, and each row block is on 8 ranks.
4. ``moe``: 64 groups of ranks (at most W and T) with experts of their own, rows over the group.
5. ``ddp``: everything on every rank.
6. ``ragged``: rows over all ranks, in blocks of no common size, so that a leaf is in pieces.
7. ``unlike``: as ``fsdp``, but no tensor is like another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.spread import MeshProcesses, OnMesh, Spread

WIDTH = 1024
SHAPES = 12
"""Different shapes among the tensors."""
COLUMNS = 8
"""Ranks that share a row block in two of the placements."""
GROUPS = 64
"""Groups of experts."""

Held = Callable[[int, int], tuple[tuple[int, int], tuple[int, int]]]
"""(rank, kind of tensor) -> offsets and sizes of the box that the rank holds."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What W ranks hold of T tensors."""

    name: str
    ranks: int
    tensors: int
    shapes: tuple[tuple[int, int], ...]
    """The global shape of each kind of tensor."""
    held: Held
    groups: int = 1
    """Groups of ranks that hold tensors of their own, about T / groups each."""
    mesh: tuple[int, ...] = ()
    """The axes of a mesh of all ranks that cuts the tensors; none where each rank knows its own."""
    cuts: tuple[tuple[int, ...], ...] = ((), ())
    """For each dimension the axes that cut it."""

    def leaves(self, rank: int) -> list[tuple[str, int]]:
        """Name and kind of each tensor of a rank, in the order of its state."""
        group = rank * self.groups // self.ranks
        named = range(self.tensors)[group :: self.groups]
        return [(f"model/layers.{n}.weight", n // self.groups % len(self.shapes)) for n in named]

    def spreads(self) -> list[Spread | None]:
        """Where the tensors of each kind are on all ranks, as mesh and placements say it."""
        if not self.mesh:
            return [None] * len(self.shapes)
        mesh = MeshProcesses("torch", np.arange(self.ranks).reshape(self.mesh))
        return [OnMesh(shape, mesh, self.cuts) for shape in self.shapes]

    def boxes(self, rank: int) -> list[Boxes]:
        """What a rank holds of a tensor of each kind."""
        return [Boxes.of([self.held(rank, kind)]) for kind in range(len(self.shapes))]


def _rows(rows: Sequence[int], parts: int, part_of: Callable[[int], int]) -> Held:
    """Blocks of as many rows, over the parts that ranks have."""

    def held(rank: int, kind: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (part_of(rank) % parts * rows[kind], 0), (rows[kind], WIDTH)

    return held


def fsdp(ranks: int, tensors: int, shapes: int = SHAPES) -> Placement:
    """Rows over all ranks."""
    rows = [4 + kind for kind in range(shapes)]
    return Placement(
        "fsdp" if shapes == SHAPES else "unlike",
        ranks,
        tensors,
        tuple((ranks * count, WIDTH) for count in rows),
        _rows(rows, ranks, lambda rank: rank),
        mesh=(ranks,),
        cuts=((0,), ()),
    )


def _row_blocks(ranks: int) -> int:
    """How many row blocks there are, where `COLUMNS` ranks share each."""
    if ranks % COLUMNS:
        raise ValueError(f"this placement takes a multiple of {COLUMNS} ranks, not {ranks}")
    return ranks // COLUMNS


def mesh(ranks: int, tensors: int) -> Placement:
    """Rows over W / 8 ranks, columns over 8."""
    blocks = _row_blocks(ranks)
    rows, width = [4 + kind for kind in range(SHAPES)], WIDTH // COLUMNS

    def held(rank: int, kind: int) -> tuple[tuple[int, int], tuple[int, int]]:
        row, column = divmod(rank, COLUMNS)
        return (row * rows[kind], column * width), (rows[kind], width)

    shapes = tuple((blocks * count, WIDTH) for count in rows)
    axes = (blocks, COLUMNS)
    return Placement("mesh", ranks, tensors, shapes, held, mesh=axes, cuts=((0,), (1,)))


def hsdp(ranks: int, tensors: int) -> Placement:
    """Rows over W / 8 ranks, each block on 8 of them."""
    rows, parts = [4 + kind for kind in range(SHAPES)], _row_blocks(ranks)
    shapes = tuple((parts * count, WIDTH) for count in rows)
    held = _rows(rows, parts, lambda rank: rank)
    axes = (COLUMNS, parts)
    return Placement("hsdp", ranks, tensors, shapes, held, mesh=axes, cuts=((1,), ()))


def moe(ranks: int, tensors: int) -> Placement:
    """Experts of their own for each of 64 groups."""
    groups = min(GROUPS, ranks, tensors)
    rows, parts = [4 + kind for kind in range(SHAPES)], ranks // groups
    shapes = tuple((parts * count, WIDTH) for count in rows)
    held = _rows(rows, parts, lambda rank: rank)
    return Placement("moe", ranks, tensors, shapes, held, groups)


def ddp(ranks: int, tensors: int) -> Placement:
    """Everything everywhere."""
    rows = [4 + kind for kind in range(SHAPES)]
    shapes = tuple((count, WIDTH) for count in rows)
    held = _rows(rows, 1, lambda rank: 0)
    return Placement("ddp", ranks, tensors, shapes, held, mesh=(ranks,))


def ragged(ranks: int, tensors: int) -> Placement:
    """Row blocks whose sizes have no common divisor."""
    sizes = [np.arange(ranks) * (7 + kind) % 13 + 101 + kind for kind in range(SHAPES)]
    starts = [np.cumsum(size) - size for size in sizes]

    def held(rank: int, kind: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (int(starts[kind][rank]), 0), (int(sizes[kind][rank]), WIDTH)

    shapes = tuple((int(size.sum()), WIDTH) for size in sizes)
    return Placement("ragged", ranks, tensors, shapes, held)


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "fsdp": fsdp,
    "mesh": mesh,
    "hsdp": hsdp,
    "moe": moe,
    "ddp": ddp,
    "ragged": ragged,
    "unlike": lambda ranks, tensors: fsdp(ranks, tensors, tensors),
}
