"""Boxes of elements on characters: scales, lines, marks and labels.

1. An `Axis` maps the elements of one dimension to characters. Lines are `GAP` characters apart;
   where chunks are thinner, only every second, third, ... boundary is a line (`Axis.cuts`).
2. A character between two lines stands for a range of elements, and together the characters stand
   for all of them (`Axis.between`).
3. A `Canvas` keeps the weight of the line from each character to its neighbours; the weights of
   the four arms of a character choose it from `JOINTS`. A character without lines shows its mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from rich.text import Text

from xckpt.core.geometry.box import Box

LEAST = (2, 12)
"""Characters down and across of what is drawn to scale, at least."""
GAP = 2
"""Characters from a line to the next, at least: one is between them."""

# The character whose arms have weights up, right, down, left (0 none, 1 thin, 2 heavy) stands at
# up + 3 right + 9 down + 27 left.
JOINTS = " ╵╹╶└┖╺┕┗╷│╿┌├┞┍┝┡╻╽┃┎┟┠┏┢┣╴┘┚─┴┸╼┶┺┐┤┦┬┼╀┮┾╄┒┧┨┰╁╂┲╆╊╸┙┛╾┵┹━┷┻┑┥┩┭┽╃┯┿╇┓┪┫┱╅╉┳╈╋"

Cuts = Sequence[Sequence[int]]
"""Offsets of lines, down and across."""


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` elements on characters 0 to ``last``.

    Example:
        >>> axis = Axis(size=100, last=20)
        >>> axis.at(0), axis.at(52), axis.at(100)
        (0, 10, 20)
    """

    size: int
    last: int

    def at(self, offset: int) -> int:
        """The character nearest to an offset."""
        return (2 * offset * self.last + self.size) // (2 * self.size)

    def cuts(self, start: int, stop: int, chunk: int) -> list[int]:
        """The ends of an array, and the boundaries of its chunks that have room for a line.

        Example:
            >>> Axis(size=100, last=20).cuts(0, 100, chunk=30)
            [0, 30, 60, 90, 100]
            >>> Axis(size=100, last=20).cuts(0, 50, chunk=4)
            [0, 12, 24, 36, 50]
        """
        every = max(1, GAP * self.size // (chunk * self.last))
        while any(
            self.at(b) - self.at(a) < GAP for a, b in pairwise(range(start, stop, every * chunk))
        ):
            every += 1
        inner = range(start, stop, every * chunk)[1:]
        return [start, *(cut for cut in inner if self.at(stop) - self.at(cut) >= GAP), stop]

    def between(self, cuts: Sequence[int]) -> Iterator[tuple[int, float, float]]:
        """The characters between lines at ``cuts``, each with the elements it stands for.

        Example:
            >>> list(Axis(size=12, last=6).between([0, 6, 12]))  # character, first, one past last
            [(1, 0, 3.0), (2, 3.0, 6), (4, 6, 9.0), (5, 9.0, 12)]
        """
        step = self.size / self.last
        for low, high in pairwise(cuts):
            first, last = self.at(low) + 1, self.at(high) - 1
            for position in range(first, last + 1):
                start = low if position == first else (position - 0.5) * step
                yield position, start, high if position == last else (position + 0.5) * step


def scale(size: int, chunk: int, *, wished: int, smallest: int, room: int) -> Axis:
    """How large a dimension is drawn.

    Args:
        size: elements.
        chunk: elements of the smallest chunk.
        wished: characters for that chunk, if there is room.
        smallest: characters of the whole, if it is but one chunk.
        room: most characters of the whole, not counting the first.

    Example:
        >>> scale(50, 5, wished=3, smallest=10, room=60)
        Axis(size=50, last=30)
        >>> scale(50, 1, wished=3, smallest=10, room=60)
        Axis(size=50, last=60)
    """
    step = min(max(wished, -(-smallest * chunk // size)), room * chunk // size)
    return Axis(size, room if step < GAP else round(size * step / chunk))


def to_scale(
    axes: tuple[Axis, Axis], chunks: tuple[int, int], rooms: tuple[int, int]
) -> tuple[Axis, Axis]:
    """One scale for both sides: a character stands for twice as many elements down as across.

    Args:
        axes: down and across, each on its own scale.
        chunks: elements of the smallest chunk in each.
        rooms: most characters of each, not counting the first.

    Example:
        >>> to_scale((Axis(16, 4), Axis(32, 32)), (8, 8), (18, 60))
        (Axis(size=16, last=8), Axis(size=32, last=32))
        >>> to_scale((Axis(1000, 18), Axis(8, 24)), (10, 8), (18, 60))  # a strip, were it to scale
        (Axis(size=1000, last=18), Axis(size=8, last=24))
    """
    down, across = axes
    wished = max(across.last / across.size, 2 * down.last / down.size)
    chosen = min(wished, rooms[1] / across.size, 2 * rooms[0] / down.size)
    lengths = round(chosen * down.size / 2), round(chosen * across.size)
    made = Axis(down.size, lengths[0]), Axis(across.size, lengths[1])
    for own, even, chunk, least in zip(axes, made, chunks, LEAST, strict=True):
        apart = even.last * chunk >= GAP * even.size
        if even.last < least or (even.last < own.last and not apart):
            return axes
    return made


def is_to_scale(axes: tuple[Axis, Axis]) -> bool:
    """Whether both sides have one scale, as far as whole characters allow.

    Example:
        >>> is_to_scale((Axis(16, 8), Axis(16, 16))), is_to_scale((Axis(16, 16), Axis(16, 16)))
        (True, False)
    """
    down, across = axes
    return abs(2 * down.last * across.size - across.last * down.size) <= max(
        2 * across.size, down.size
    )


class Canvas:
    """The characters of two axes: lines between them, and marks where no line is.

    Example:
        >>> canvas = Canvas(Axis(size=2, last=2), Axis(size=4, last=8))
        >>> canvas.rule([(0, 2), (0, 2, 4)])
        >>> canvas.fill([(0, 2), (0, 2, 4)], Box((0, 3), (1, 1)), "x")
        >>> for line in canvas.lines():
        ...     print(line)
        ┏━━━┯━━━┓
        ┃   │ xx┃
        ┗━━━┷━━━┛
    """

    def __init__(self, down: Axis, across: Axis) -> None:
        self.axes: Final = (down, across)
        rows, columns = down.last + 1, across.last + 1
        self.level: NDArray[np.int64] = np.zeros((rows, columns + 1), np.int64)
        """Weight of the line from each character to the one on its left."""
        self.upright: NDArray[np.int64] = np.zeros((rows + 1, columns), np.int64)
        """Weight of the line from each character to the one above it."""
        self.marks: Final = np.full((rows, columns), " ")
        self.styles: Final = np.full((rows, columns), "", dtype=object)

    def span(self, box: Box, inside: int = 0) -> tuple[slice, slice]:
        """The characters of a box, or those ``inside`` its outline."""
        ends = zip(self.axes, box.offsets, box.ends, strict=True)
        rows, columns = (slice(x.at(a) + inside, x.at(b) + 1 - inside) for x, a, b in ends)
        return rows, columns

    def has_room(self, box: Box) -> bool:
        """Whether there is a character between the lines of a box's outline."""
        return all(part.start < part.stop for part in self.span(box, inside=1))

    def rule(self, cuts: Cuts) -> None:
        """A grid at some offsets: heavy outline, thin lines inside."""
        rows, columns = (
            [axis.at(cut) for cut in lines] for axis, lines in zip(self.axes, cuts, strict=True)
        )
        for lines, at, along in ((self.level, rows, columns), (self.upright.T, columns, rows)):
            for place in at:
                part = lines[place, along[0] + 1 : along[-1] + 1]
                np.maximum(part, 2 if place in (at[0], at[-1]) else 1, out=part)

    def fill(self, cuts: Cuts, box: Box, mark: str) -> None:
        """Mark the characters between some lines that stand for an element of a box."""
        ends = zip(self.axes, cuts, box.offsets, box.ends, strict=True)
        places = [
            [at for at, low, high in axis.between(lines) if low < stop and start < high]
            for axis, lines, start, stop in ends
        ]
        self.marks[np.ix_(*places)] = mark

    def write(self, box: Box, texts: Sequence[str], style: str) -> None:
        """Give a box a style, and write the first text that fits, as near to its middle as it can.

        A text fits where no line is.
        """
        inside = self.span(box, inside=1)
        marks, styles, free = self.marks[inside], self.styles[inside], self.joints()[inside] == 0
        styles[:] = style
        for text in texts:
            free_runs = sliding_window_view(np.pad(free, ((0, 0), (0, len(text)))), len(text), 1)
            places = np.argwhere(free_runs.all(axis=-1))
            if len(places):
                middle = np.array([free.shape[0] - 1, free.shape[1] - len(text)])
                row, start = places[np.abs(2 * places - middle).sum(axis=1).argmin()].tolist()
                marks[row, start : start + len(text)] = list(text)
                styles[row, start : start + len(text)] = f"bold {style}"
                return

    def joints(self) -> NDArray[np.int64]:
        """For each character the number of its joint; 0 where no line is."""
        up, down = self.upright[:-1], self.upright[1:]
        left, right = self.level[:, :-1], self.level[:, 1:]
        return up + 3 * right + 9 * down + 27 * left

    def lines(self) -> Iterator[Text]:
        """All rows."""
        for row in zip(self.joints().tolist(), self.marks, self.styles, strict=True):
            line = Text(no_wrap=True, overflow="crop")
            for joint, mark, style in zip(*row, strict=True):
                line.append(JOINTS[joint] if joint else str(mark), style)
            yield line


def column_labels(axis: Axis, offsets: Sequence[int], margin: int) -> str:
    """As many offsets as fit above their lines: the ends first, then in the order given.

    Example:
        >>> column_labels(Axis(size=100, last=20), [50, 5, 60], margin=2)
        '  0         50      100'
    """
    width = margin + axis.last + 1
    line = " " * width
    for offset in dict.fromkeys((axis.size, 0, *offsets)):
        text = str(offset)
        start = width - len(text) if offset == axis.size else margin + axis.at(offset)
        stop = start + len(text)
        if stop <= width and not line[max(start - 1, 0) : stop + 1].strip():
            line = line[:start] + text + line[stop:]
    return line
