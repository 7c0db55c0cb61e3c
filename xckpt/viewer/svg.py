"""A leaf's shards and chunks as an SVG file, to scale: what the page draws, without a browser.

The rectangles have the elements as their units, in a nested picture that is stretched to a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import product
from math import prod
from typing import Final

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.shard_cuts import device_boxes, dimension_cuts
from xckpt.core.manifest.entries import TensorEntry, leaf_arrays
from xckpt.core.text.printable import printable

MOST_CELLS: Final = 20_000
"""Chunks of a picture."""
WIDTH, HEIGHT, LEAST = 640.0, 420.0, 48.0
COLOURS: Final = (
    *("#f7c56b", "#a9d8f5", "#7fd6b8", "#f6ee8f", "#8fbfe3", "#f0a878"),
    *("#e8b5d0", "#cfd3d8"),
)
_NAMESPACE: Final = "http://www.w3.org/2000/svg"
_STYLE: Final = (
    "rect{vector-effect:non-scaling-stroke;stroke:#1b1f24;fill:none}"
    ".chunk{stroke:#525a65;stroke-dasharray:4 3}.array{stroke-width:3}"
    "text{font:600 12px sans-serif;text-anchor:middle;dominant-baseline:central}"
)


def leaf_svg(
    leaf: TensorEntry,
    down: int | None = None,
    across: int | None = None,
    at: Sequence[int] | None = None,
) -> str:
    """The picture of a plane of a tensor.

    Args:
        leaf: the tensor's entry in the manifest.
        down: the dimension down; by default the last but one.
        across: the dimension across; by default the last.
        at: a position in each dimension, for those that are not drawn; by default the first.

    Raises:
        ValueError: there is no such plane, or it has more than `MOST_CELLS` chunks.

    Example:
        >>> entry = TensorEntry("w", "int8", (4, 6), (2, 6))
        >>> leaf_svg(entry).count('class="chunk"')
        2
    """
    rank = len(leaf.shape)
    if across is None and rank:
        across = rank - 1 if down != rank - 1 or rank == 1 else rank - 2
    if down is None and rank > 1:
        down = max(d for d in range(rank) if d != across)
    position = tuple(at) if at is not None else (0,) * rank
    chosen = [d for d in (down, across) if d is not None]
    fits = len(position) == rank and len(set(chosen)) == len(chosen)
    if not fits or not all(0 <= d < rank for d in chosen):
        raise ValueError(f"{leaf.name}: of {rank} dimensions it has no plane along {chosen}")
    if 0 in leaf.shape:
        raise ValueError(f"{leaf.name}: it has no elements to draw")
    plane = _Drawn(leaf, down, across, position)
    return plane.svg()


class _Drawn:
    """A plane of a tensor, drawn."""

    def __init__(
        self, leaf: TensorEntry, down: int | None, across: int | None, at: tuple[int, ...]
    ) -> None:
        self._leaf, self._down, self._across, self._at = leaf, down, across, at
        self._rows = 1 if down is None else leaf.shape[down]
        self._columns = 1 if across is None else leaf.shape[across]
        scale = min(WIDTH / self._columns, HEIGHT / self._rows)
        self._width = max(self._columns * scale, LEAST)
        self._height = max(self._rows * scale, LEAST)

    def svg(self) -> str:
        """The whole picture."""
        width, height = f"{self._width:g}", f"{self._height:g}"
        shards = list(self._shards())
        parts = [
            f'<svg xmlns="{_NAMESPACE}" role="img" width="{width}" height="{height}">',
            f"<title>{escape(printable(self._leaf.name))}</title><style>{_STYLE}</style>",
            f'<svg width="{width}" height="{height}" viewBox="0 0 {self._columns} {self._rows}" ',
            'preserveAspectRatio="none" overflow="visible">',
            *(
                self._rectangle(box, "shard", f' style="fill:{COLOURS[devices[0] % len(COLOURS)]}"')
                for box, devices in shards
            ),
            *self._stored(),
            "</svg>",
            *(self._label(box, devices) for box, devices in shards),
            "</svg>",
        ]
        return "".join(parts)

    def _place(self, box: Box) -> tuple[int, int, int, int] | None:
        """(x, y, width, height) of a box in the plane; None where it does not lie there."""
        for d, (low, end) in enumerate(zip(box.offsets, box.ends, strict=True)):
            if d not in (self._down, self._across) and not low <= self._at[d] < end:
                return None
        x, width = (0, 1) if self._across is None else _along(box, self._across)
        y, height = (0, 1) if self._down is None else _along(box, self._down)
        return x, y, width, height

    def _rectangle(self, box: Box, kind: str, more: str = "") -> str:
        place = self._place(box)
        if place is None:
            return ""
        x, y, width, height = place
        return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"{more}/>'

    def _shards(self) -> Iterator[tuple[Box, list[int]]]:
        """The distinct shards in the plane, each with the devices that held it."""
        cuts = dimension_cuts(self._leaf.sharding, self._leaf.shape)
        if cuts is None or self._leaf.sharding is None:
            return
        holders: dict[Box, list[int]] = {}
        mesh = [size for _, size in self._leaf.sharding.axes]
        for device, boxes in enumerate(device_boxes(cuts, mesh)):
            for box in boxes:
                if self._place(box) is not None:
                    holders.setdefault(box, []).append(device)
        yield from holders.items()

    def _stored(self) -> Iterator[str]:
        """Chunks, then arrays over them."""
        arrays = [array for array in leaf_arrays(self._leaf) if self._place(array.box)]
        shown = (self._down, self._across)
        steps = [
            [
                range(0, size, chunk) if d in shown else [(self._at[d] - low) // chunk * chunk]
                for d, (low, size, chunk) in enumerate(
                    zip(array.offset, array.shape, array.chunk, strict=True)
                )
            ]
            for array in arrays
        ]
        count = sum(prod(map(len, each)) for each in steps)
        if count > MOST_CELLS:
            raise ValueError(f"{self._leaf.name}: {count:,} chunks lie in the plane, too many")
        for array, each in zip(arrays, steps, strict=True):
            for offsets in product(*each):
                part = Box(offsets, array.chunk).meets(Box.whole(array.shape))
                if part is not None:
                    yield self._rectangle(part.shifted(array.offset), "chunk")
        yield from (self._rectangle(array.box, "array") for array in arrays)

    def _label(self, box: Box, devices: Sequence[int]) -> str:
        """The device's number, where there is room; of replicas how many more there are."""
        place = self._place(box)
        assert place is not None
        text = f"{devices[0]}" if len(devices) == 1 else f"{devices[0]} +{len(devices) - 1}"
        x, y, width, height = place
        across, down = self._width / self._columns, self._height / self._rows
        if width * across < 8 * len(text) + 6 or height * down < 16:
            return ""
        middle = (x + width / 2) * across, (y + height / 2) * down
        return f'<text x="{middle[0]:g}" y="{middle[1]:g}">{text}</text>'


def _along(box: Box, d: int) -> tuple[int, int]:
    return box.offsets[d], box.sizes[d]
