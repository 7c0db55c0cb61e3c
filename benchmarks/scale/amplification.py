"""How much readers read of what they want, where a matrix was saved by other ranks in other parts.

1. Pairs of a writer's and a reader's placement are drawn: rows, columns, and two grids, each of 4
   to 64 ranks, of matrices of 4,096 to 32,768 x 4,096 or 8,192 elements of 2 or 4 bytes.
2. The chunks are those that a save chooses for the writer's boxes
   (`xckpt.core.geometry.grid.choose_grid`); nothing is written.
3. Each rank of the reader wants its box, and reads the chunks that the box meets: alone, or each
   chunk once for the `HOST` ranks of a host. What is read, over what is wanted, is a pair's figure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.grid import GridOptions, cells, choose_grid, count_cells

HOST = 8
"""Ranks of a host."""
PAIRS = 500
KNOWN = "known"
"""The save is given the reader's own parts."""
MADE_FOR = (0, 8, 64, KNOWN)
"""The options that are compared: `xckpt.SaveOptions.readers`."""

_RANKS = (4, 8, 16, 32, 64)
_ROWS, _COLUMNS = (4096, 8192, 16384, 32768), (4096, 8192)
_GRIDS = {4: (2, 2), 8: (4, 2), 16: (4, 4), 32: (8, 4), 64: (8, 8)}
_STEEP = {4: (2, 2), 8: (2, 4), 16: (8, 2), 32: (4, 8), 64: (16, 4)}


@dataclass(frozen=True, slots=True)
class Pair:
    """A matrix, and the parts of writer and reader along its rows and columns."""

    shape: tuple[int, int]
    item: int
    writer: tuple[int, int]
    reader: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Amplification:
    """What all pairs read, over what they want; and in how many chunks and objects they lie."""

    readers: int | str
    """The option of the saves, or `KNOWN`."""
    mean: float
    p90: float
    most: float
    host_mean: float
    host_most: float
    chunks: float
    """Of a matrix, in the mean."""
    objects: float
    """Of a matrix, in the mean."""


def pairs(count: int = PAIRS, seed: int = 0) -> list[Pair]:
    """Pairs drawn at random, the same for the same seed."""
    draw = random.Random(seed)
    drawn: list[Pair] = []
    for _ in range(count):
        shape = draw.choice(_ROWS), draw.choice(_COLUMNS)
        item = draw.choice((2, 4))
        writer, reader = (_parts(draw) for _ in range(2))
        drawn.append(Pair(shape, item, writer, reader))
    return drawn


def _parts(draw: random.Random) -> tuple[int, int]:
    ranks = draw.choice(_RANKS)
    return draw.choice(((ranks, 1), (1, ranks), _GRIDS[ranks], _STEEP[ranks]))


def boxes(shape: tuple[int, int], parts: tuple[int, int]) -> list[Box]:
    """The boxes of the ranks, in C order."""
    sizes = shape[0] // parts[0], shape[1] // parts[1]
    return [
        Box((row * sizes[0], column * sizes[1]), sizes)
        for row in range(parts[0])
        for column in range(parts[1])
    ]


def read_by(pair: Pair, options: GridOptions) -> tuple[float, float, int, int]:
    """What is read over what is wanted, by ranks alone and by hosts; the chunks and objects."""
    held = Boxes.of([(box.offsets, box.sizes) for box in boxes(pair.shape, pair.writer)])
    grid = choose_grid(pair.shape, pair.item, held, options)
    (chunk, *_), (unit, *_) = grid.chunks.tolist(), grid.units.tolist()
    chunks, objects = (count_cells(pair.shape, sizes) for sizes in (chunk, unit))
    wanted = [
        cells(box.offsets, box.ends, pair.shape, chunk)[0] for box in boxes(pair.shape, pair.reader)
    ]
    alone = sum(len(numbers) for numbers in wanted)
    hosts = [np.concatenate(wanted[low : low + HOST]) for low in range(0, len(wanted), HOST)]
    shared = sum(len(np.unique(numbers)) for numbers in hosts)
    # Every chunk is whole: all sizes are powers of two.
    return alone / chunks, shared / chunks, chunks, objects


def amplification(readers: int | str, drawn: Sequence[Pair]) -> Amplification:
    """The figures of all pairs, for saves with one option, or with that which suits each."""

    def options(pair: Pair) -> GridOptions:
        return GridOptions(readers=pair.reader if isinstance(readers, str) else readers)

    figures = np.array([read_by(pair, options(pair)) for pair in drawn])
    alone, host, chunks, objects = figures.T
    return Amplification(
        readers,
        float(alone.mean()),
        float(np.quantile(alone, 0.9)),
        float(alone.max()),
        float(host.mean()),
        float(host.max()),
        float(chunks.mean()),
        float(objects.mean()),
    )
