"""A dimension of a tensor on the characters of a picture: its scale, lines and labels.

1. `scale` gives the smallest chunk as many characters as one wishes, or shares out all the room.
2. `Axis.cuts` are the boundaries of an array that get a line. Lines are `GAP` characters apart, so
   that one is between them; where chunks are thinner, only every second, third, ... is a line.
3. `Axis.between` shares out the elements among the characters between the lines.
4. `row_labels` and `column_labels` name the lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Axis", "Cell", "Span", "column_labels", "row_labels", "scale"]

GAP = 2
"""Characters from a line to the next, at least."""


@dataclass(frozen=True, slots=True)
class Span:
    """An array along one dimension: elements ``[start, stop)``, ``chunk`` of them at a time."""

    start: int
    stop: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Cell:
    """A character between two lines, and the elements ``[low, high)`` it stands for."""

    position: int
    low: float
    high: float

    def meets(self, part: range) -> bool:
        """Whether some of them are in a range."""
        return self.low < part.stop and part.start < self.high


@dataclass(frozen=True, slots=True)
class Axis:
    """``size`` elements on characters 0 to ``last``."""

    size: int
    last: int

    def at(self, offset: int) -> int:
        """The character nearest to an offset."""
        return (2 * offset * self.last + self.size) // (2 * self.size)

    def holds(self, span: Span) -> bool:
        """Whether there is a character between an array's ends."""
        return self.at(span.stop) - self.at(span.start) >= GAP

    def cuts(self, span: Span) -> list[int]:
        """The boundaries of an array that are drawn: its ends, and its chunks' where they fit.

        Example:
            >>> Axis(size=100, last=20).cuts(Span(0, 100, 30))
            [0, 30, 60, 90, 100]
            >>> Axis(size=100, last=20).cuts(Span(0, 50, 4))
            [0, 12, 24, 36, 50]
        """
        every = max(1, GAP * self.size // (span.chunk * self.last))
        while not self._clear(range(span.start, span.stop, every * span.chunk)):
            every += 1
        end = self.at(span.stop)
        inner = range(span.start, span.stop, every * span.chunk)[1:]
        return [span.start, *(cut for cut in inner if end - self.at(cut) >= GAP), span.stop]

    def _clear(self, cuts: Sequence[int]) -> bool:
        """Whether lines at all of these are far enough apart."""
        return all(self.at(b) - self.at(a) >= GAP for a, b in pairwise(cuts))

    def between(self, cuts: Sequence[int]) -> Iterator[Cell]:
        """The characters between lines at ``cuts``; each element belongs to one of them at least.

        Example:
            >>> list(Axis(size=12, last=6).between([0, 6, 12]))[:3]
            [Cell(position=1, low=0, high=3.0), Cell(position=2, low=3.0, high=6), ...]
        """
        step = self.size / self.last
        for low, high in pairwise(cuts):
            first, last = self.at(low) + 1, self.at(high) - 1
            for position in range(first, last + 1):
                yield Cell(
                    position,
                    low if position == first else (position - 0.5) * step,
                    high if position == last else (position + 0.5) * step,
                )


def scale(size: int, spans: Sequence[Span], *, wished: int, smallest: int, room: int) -> Axis:
    """How large a dimension is drawn.

    Args:
        size: elements.
        spans: the arrays that are drawn.
        wished: characters for the smallest chunk, if there is room.
        smallest: characters of the whole, if it is but one chunk.
        room: most characters of the whole, the first one aside.

    Example:
        >>> scale(50, [Span(0, 50, 5)], wished=3, smallest=10, room=60)
        Axis(size=50, last=30)
        >>> scale(50, [Span(0, 50, 1)], wished=3, smallest=10, room=60)
        Axis(size=50, last=60)
    """
    finest = min(span.chunk for span in spans)
    step = min(max(wished, -(-smallest * finest // size)), room * finest // size)
    return Axis(size, room if step < GAP else round(size * step / finest))


def row_labels(axis: Axis, offsets: Iterable[int], margin: int) -> list[str]:
    """The offset of each line, in ``margin`` characters; of several in a place the first given.

    Example:
        >>> row_labels(Axis(size=100, last=4), [50, 51], margin=4)
        ['  0 ', '    ', ' 50 ', '    ', '100 ']
    """
    labels: dict[int, int] = {}
    for offset in (0, axis.size, *offsets):
        labels.setdefault(axis.at(offset), offset)
    texts = [str(labels.get(row, "")) for row in range(axis.last + 1)]
    return [f"{text} ".rjust(margin) if margin else "" for text in texts]


def column_labels(axis: Axis, offsets: Iterable[int], margin: int) -> str:
    """As many offsets as fit above their lines: the ends first, then in the order given.

    Example:
        >>> column_labels(Axis(size=100, last=20), [50, 5, 60], margin=2)
        '  0         50      100'
    """
    width = margin + axis.last + 1
    line = ""
    for offset in dict.fromkeys((axis.size, 0, *offsets)):
        text = str(offset)
        start = width - len(text) if offset == axis.size else margin + axis.at(offset)
        stop = start + len(text)
        line = line or " " * width
        if start >= 0 and not line[max(start - 1, 0) : stop + 1].strip() and stop <= width:
            line = line[:start] + text + line[stop:]
    return line
