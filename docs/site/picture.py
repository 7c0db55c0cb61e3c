"""The drawing of the README: one tensor as torch's ranks hold it, as it is stored, as JAX wants it.

``python -m docs.site.picture`` writes docs/images/resharding.svg; a test compares. The chunks are
those that xckpt chooses for these shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.grid import choose_grid

FILE: Final = Path(__file__).parents[1] / "images" / "resharding.svg"
SIZE: Final = 4096
"""Rows and columns of the tensor."""
SIDE: Final = 200
"""Of a drawing, in pixels."""
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Of the four ranks: colour-blind people tell them apart."""


def boxes(rows: int, columns: int) -> list[Box]:
    """An even cut of the tensor."""
    sizes = (SIZE // rows, SIZE // columns)
    return [
        Box((row * sizes[0], column * sizes[1]), sizes)
        for row in range(rows)
        for column in range(columns)
    ]


def drawing() -> str:
    """The picture, SVG."""
    shards, devices = boxes(2, 2), boxes(4, 2)
    chunks = stored(shards)
    ranks = [f"rank {rank}" for rank in range(4)]
    files = [
        f"c/{box.offsets[0] // box.sizes[0]}/{box.offsets[1] // box.sizes[1]}" for box in chunks
    ]
    parts = [
        *_grid(20, "torch, 4 ranks: FSDP x TP", shards, ranks, shards),
        *_arrow(232, "each rank writes"),
        *_grid(300, "zarr: chunks with one writer each", chunks, files, shards),
        *_arrow(512, "each device reads"),
        *_grid(580, "JAX, 8 devices: 4 x 2", devices, [f"d{n}" for n in range(8)], shards),
    ]
    words = "A tensor on 4 torch ranks, in zarr chunks, and on 8 JAX devices"
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 260" role="img" '
        f'aria-label="{words}" font-family="sans-serif" font-size="13">\n'
        '<rect width="800" height="260" fill="white"/>\n'
    )
    return f"{head}{''.join(f'{part}{chr(10)}' for part in parts)}</svg>\n"


def stored(shards: Sequence[Box]) -> list[Box]:
    """The chunks that a save of these shards makes of float32."""
    grid = choose_grid((SIZE, SIZE), 4, Boxes.of([(box.offsets, box.sizes) for box in shards]))
    [chunk] = grid.chunks.tolist()
    return boxes(SIZE // chunk[0], SIZE // chunk[1])


def _grid(
    left: int, title: str, cells: Sequence[Box], labels: Sequence[str], shards: Sequence[Box]
) -> Iterator[str]:
    """One cut of the tensor; a cell has the colour of the rank that wrote it."""
    yield f'<text x="{left}" y="22">{title}</text>'
    for box, label in zip(cells, labels, strict=True):
        y, x = (offset * SIDE // SIZE for offset in box.offsets)
        height, width = (size * SIDE // SIZE for size in box.sizes)
        writer = next(n for n, shard in enumerate(shards) if _inside(box, shard))
        yield (
            f'<rect x="{left + x}" y="{36 + y}" width="{width}" height="{height}" '
            f'fill="{COLOURS[writer]}" fill-opacity="0.45" stroke="black"/>'
        )
        middle = (left + x + width // 2, 36 + y + height // 2 + 5)
        yield f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="middle">{label}</text>'


def _inside(box: Box, outer: Box) -> bool:
    return all(o >= p for o, p in zip(box.offsets, outer.offsets, strict=True)) and all(
        e <= f for e, f in zip(box.ends, outer.ends, strict=True)
    )


def _arrow(left: int, words: str) -> Iterator[str]:
    yield f'<path d="M{left} 136h48m-8 -6l8 6l-8 6" fill="none" stroke="black"/>'
    yield f'<text x="{left + 24}" y="252" text-anchor="middle" font-size="12">{words}</text>'


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(drawing(), encoding="utf-8")
