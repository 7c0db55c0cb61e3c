"""A picture as an SVG file, to scale: what the page draws, without a browser.

The rectangles have the elements as their units, in a nested picture that is stretched to a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from xckpt.core.text.printable import printable
from xckpt.viewer.picture.plane import COLOURS, Picture, PictureShard, Place

WIDTH, HEIGHT, LEAST, LARGEST = 640.0, 420.0, 48.0, 96.0
_NAMESPACE: Final = "http://www.w3.org/2000/svg"
_STYLE: Final = (
    "rect{vector-effect:non-scaling-stroke;stroke:#1b1f24;fill:none}"
    ".chunk{stroke:#525a65;stroke-dasharray:4 3}.unit{stroke-width:1.8}.array{stroke-width:3}"
    "text{font:600 12px sans-serif;text-anchor:middle;dominant-baseline:central;"
    "paint-order:stroke;stroke:#ffffff99;stroke-width:4px}"
)


def size_of(picture: Picture) -> tuple[float, float]:
    """Width and height in pixels: to one scale, unless a side were too thin to be seen.

    Example:
        >>> size_of(Picture("w", 64, 32, (), (), (), ()))
        (210.0, 420.0)
    """
    scale = min(WIDTH / picture.columns, HEIGHT / picture.rows, LARGEST)
    return max(picture.columns * scale, LEAST), max(picture.rows * scale, LEAST)


def svg(picture: Picture) -> str:
    """The picture as SVG.

    Example:
        >>> svg(Picture("w", 4, 6, (), ((0, 0, 6, 2), (0, 2, 6, 2)), (), ())).count("chunk\\"")
        2
    """
    width, height = size_of(picture)
    scale = width / picture.columns, height / picture.rows
    parts = [
        f'<svg xmlns="{_NAMESPACE}" role="img" width="{width:g}" height="{height:g}">',
        f"<title>{escape(printable(picture.name))}</title><style>{_STYLE}</style>",
        *_hatches(picture.shards, scale),
        f'<svg width="{width:g}" height="{height:g}" ',
        f'viewBox="0 0 {picture.columns} {picture.rows}" ',
        'preserveAspectRatio="none" overflow="visible">',
        *(_rectangle(each.place, "shard", _fill(each)) for each in picture.shards),
        *_rectangles(picture.chunks, "chunk"),
        *_rectangles(picture.units, "unit"),
        *_rectangles(picture.arrays, "array"),
        "</svg>",
        *(_label(each, scale) for each in picture.shards),
        "</svg>",
    ]
    return "".join(parts)


def _rectangles(places: Iterable[Place], kind: str) -> Iterator[str]:
    return (_rectangle(place, kind) for place in places)


def _rectangle(place: Place, kind: str, fill: str = "") -> str:
    x, y, width, height = place
    style = f' style="fill:{fill}"' if fill else ""
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"{style}/>'


def _fill(shard: PictureShard) -> str:
    """A colour for the first device that holds a shard; hatched where several do."""
    number = shard.devices[0] % len(COLOURS)
    return COLOURS[number] if len(shard.devices) == 1 else f"url(#hatch-{number})"


def _hatches(shards: Iterable[PictureShard], scale: tuple[float, float]) -> Iterator[str]:
    """The hatched fills that are used, in pixels whatever the elements' size."""
    used = {each.devices[0] % len(COLOURS) for each in shards if len(each.devices) > 1}
    for number in sorted(used):
        yield (
            f'<pattern id="hatch-{number}" width="9" height="9" patternUnits="userSpaceOnUse" '
            f'patternTransform="scale({1 / scale[0]:g} {1 / scale[1]:g}) rotate(45)">'
            f'<path d="M0 0h9v9h-9z" fill="{COLOURS[number]}"/>'
            '<path d="M0 0v9" stroke="#14171a" stroke-width="1.5" opacity=".5"/></pattern>'
        )


def _label(shard: PictureShard, scale: tuple[float, float]) -> str:
    """The devices, where there is room."""
    if not has_room(shard, scale):
        return ""
    x, y, width, height = shard.place
    middle = (x + width / 2) * scale[0], (y + height / 2) * scale[1]
    return f'<text x="{middle[0]:g}" y="{middle[1]:g}">{shard.label}</text>'


def has_room(shard: PictureShard, scale: tuple[float, float]) -> bool:
    """Whether a label fits into a shard.

    Args:
        shard: the shard.
        scale: pixels of an element across and down.
    """
    _, _, width, height = shard.place
    return width * scale[0] >= 8 * len(shard.label) + 6 and height * scale[1] >= 16
