"""Draw which device held which part of a tensor, to scale, in characters.

1. A character is about twice as tall as it is wide, so it stands for twice as many rows as columns
   of elements; where a side would be too thin to be seen, each side gets its own scale.
2. Each character shows the shard that owns the element in its middle: by colour and by a sign
   of the device that holds it. Of replicas every other sign is a ``+``.
3. A number of several digits, and how many more hold a shard, stand in its middle where there is
   room.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_letters, digits
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from xckpt.cli.render.draw import Drawing
from xckpt.cli.report import counted
from xckpt.viewer.picture.plane import COLOURS, Picture, PictureShard

SIGNS: Final = digits + ascii_letters
LEAST_COLUMNS, LEAST_ROWS, LARGEST = 8, 3, 8
"""Characters of a side, at least; and of an element, at most."""


def draw_shards(picture: Picture, *, width: int = 64, height: int = 13) -> Drawing:
    """Draw the shards of a picture.

    Args:
        picture: what lies in a plane; its shards are disjoint.
        width: most characters of a line, the offsets included.
        height: most lines, that of the offsets included.

    Example:
        >>> shards = (PictureShard((0, 0, 4, 4), (0,)), PictureShard((4, 0, 4, 4), (1, 3)))
        >>> drawing = draw_shards(Picture("w", 4, 8, shards, (), (), ()), width=34)
        >>> for line in drawing.lines:
        ...     print(line)
          0                              8
        0 00000000000000001+1+1+1+1+1+1+1+
          00000000000000001+1+1+1+1+1+1+1+
          00000000000000001+1+1+1+1+1+1+1+
          00000000000000001+1+1 1 +1 +1+1+
          00000000000000001+1+1+1+1+1+1+1+
          00000000000000001+1+1+1+1+1+1+1+
          00000000000000001+1+1+1+1+1+1+1+
        4 00000000000000001+1+1+1+1+1+1+1+
    """
    margin = len(str(picture.rows)) + 1 if picture.rows > 1 else 0
    rows, columns, even = cells_of(picture, width - margin, height - 1)
    owners = owner_of_cells(picture, rows, columns)
    signs = np.full((rows, columns), " ")
    for number, shard in enumerate(picture.shards):
        _sign(signs, owners == number, shard)
    notes = list(_notes(picture, owners, even))
    lines = _lines(picture, owners, signs, margin)
    return Drawing((_offsets(picture, columns, margin), *lines), tuple(notes))


def cells_of(picture: Picture, width: int, height: int) -> tuple[int, int, bool]:
    """How many rows and columns of characters a picture gets, and whether it is to scale.

    Example:
        >>> cells_of(Picture("w", 4096, 4096, (), (), (), ()), 60, 20)
        (20, 40, True)
        >>> cells_of(Picture("w", 65536, 16, (), (), (), ()), 60, 20)
        (20, 8, False)
    """
    scale = min(width / picture.columns, 2 * height / picture.rows, LARGEST)
    columns, rows = round(scale * picture.columns), round(scale * picture.rows / 2)
    even = (columns >= LEAST_COLUMNS and rows >= LEAST_ROWS) or picture.rows == 1
    return min(height, max(rows, LEAST_ROWS)), min(width, max(columns, LEAST_COLUMNS)), even


def owner_of_cells(picture: Picture, rows: int, columns: int) -> NDArray[np.int64]:
    """For each character the number of the shard that owns its middle; -1 where none does.

    Example:
        >>> picture = Picture("w", 1, 4, (PictureShard((2, 0, 2, 1), (5,)),), (), (), ())
        >>> owner_of_cells(picture, 1, 6)
        array([[-1, -1, -1,  0,  0,  0]])
    """
    owners = np.full((rows, columns), -1, np.int64)
    middles = [
        (2 * np.arange(cells) + 1) * size // (2 * cells)
        for cells, size in ((rows, picture.rows), (columns, picture.columns))
    ]
    for number, shard in enumerate(picture.shards):
        x, y, width, height = shard.place
        top, bottom = np.searchsorted(middles[0], [y, y + height])
        left, right = np.searchsorted(middles[1], [x, x + width])
        owners[top:bottom, left:right] = number
    return owners


def _sign(signs: NDArray[np.str_], own: NDArray[np.bool_], shard: PictureShard) -> None:
    """Fill a shard's characters, and write its devices in the middle."""
    places = np.argwhere(own)
    if not len(places):
        return
    (top, left), (bottom, right) = places.min(axis=0).tolist(), places.max(axis=0).tolist()
    part = signs[top : bottom + 1, left : right + 1]
    part[:] = SIGNS[shard.devices[0] % len(SIGNS)]
    if len(shard.devices) > 1:
        part[:, 1::2] = "+"
    label = f" {shard.label} "
    if len(shard.label) > 1 and len(label) <= part.shape[1] and len(part) > 1:
        start = (part.shape[1] - len(label)) // 2
        part[(len(part) - 1) // 2, start : start + len(label)] = list(label)


def _offsets(picture: Picture, columns: int, margin: int) -> Text:
    """The line above: the first column and the end."""
    end = str(picture.columns)
    return Text(" " * margin + "0" + end.rjust(columns - 1), "dim", no_wrap=True)


def _lines(
    picture: Picture, owners: NDArray[np.int64], signs: NDArray[np.str_], margin: int
) -> Iterator[Text]:
    for row, (numbers, line) in enumerate(zip(owners.tolist(), signs.tolist(), strict=True)):
        side = {0: "0", len(owners) - 1: str(picture.rows)}.get(row, "")
        label = f"{side:>{margin - 1}} " if margin else ""
        text = Text.assemble((label, "dim"), no_wrap=True)
        for number, sign in zip(numbers, line, strict=True):
            text.append(sign, _style(picture, number))
        yield text


def _style(picture: Picture, number: int) -> str:
    if number < 0:
        return "default"
    return f"black on {COLOURS[picture.shards[number].devices[0] % len(COLOURS)]}"


def _notes(picture: Picture, owners: NDArray[np.int64], even: bool) -> Iterator[str]:
    yield "a sign or number is the device that held a shard; with +, others held it too"
    if not even:
        yield "each axis has its own scale"
    seen = len(np.unique(owners[owners >= 0]))
    if seen < len(picture.shards):
        thin = len(picture.shards) - seen
        yield f"{thin:,} of {counted(len(picture.shards), 'shard')} too thin for a character"
