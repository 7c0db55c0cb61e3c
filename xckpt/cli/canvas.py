"""Lines and marks on characters: what pictures are drawn on.

1. A line has a weight, and runs from the middle of a character to the middle of the next.
2. Up to four lines meet in a character; their weights choose it from `JOINTS` (`Canvas.lines`).
3. A character where no line is shows its mark.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

__all__ = ["JOINTS", "Canvas"]

# The character whose arms have weights up, right, down, left (0 none, 1 thin, 2 heavy) stands at
# up + 3 right + 9 down + 27 left.
JOINTS = " ╵╹╶└┖╺┕┗╷│╿┌├┞┍┝┡╻╽┃┎┟┠┏┢┣╴┘┚─┴┸╼┶┺┐┤┦┬┼╀┮┾╄┒┧┨┰╁╂┲╆╊╸┙┛╾┵┹━┷┻┑┥┩┭┽╃┯┿╇┓┪┫┱╅╉┳╈╋"
THIN, HEAVY = 1, 2


class Canvas:
    """``down`` + 1 rows of ``across`` + 1 characters.

    Example:
        >>> canvas = Canvas(2, 8)
        >>> canvas.rule((0, 2), (0, 4, 8))
        >>> canvas.write(range(1, 2), range(1, 4), "7")
        True
        >>> for line in canvas.lines():
        ...     print(line)
        ┏━━━┯━━━┓
        ┃ 7 │   ┃
        ┗━━━┷━━━┛
    """

    def __init__(self, down: int, across: int) -> None:
        self.level: NDArray[np.uint8] = np.zeros((down + 1, across), np.uint8)
        """Weight of the line from each character to the next one on its right."""
        self.upright: NDArray[np.uint8] = np.zeros((down, across + 1), np.uint8)
        """Weight of the line from each character to the one below it."""
        self.marks = [[" "] * (across + 1) for _ in range(down + 1)]
        """What each character shows where no line is."""
        self.styles = [[""] * (across + 1) for _ in range(down + 1)]

    def rule(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        """A grid: heavy outline, thin lines inside."""
        across, down = slice(columns[0], columns[-1]), slice(rows[0], rows[-1])
        for row in rows:
            weight = HEAVY if row in (rows[0], rows[-1]) else THIN
            self.level[row, across] = np.maximum(self.level[row, across], weight)
        for column in columns:
            weight = HEAVY if column in (columns[0], columns[-1]) else THIN
            self.upright[down, column] = np.maximum(self.upright[down, column], weight)

    def paint(self, rows: range, columns: range, style: str) -> None:
        """Give a box a style."""
        for row in rows:
            self.styles[row][columns.start : columns.stop] = [style] * len(columns)

    def write(self, rows: range, columns: range, text: str, style: str = "") -> bool:
        """Put a text between the lines, as near to the middle of a box as it fits, if it does."""
        free = self._joints()[rows.start : rows.stop, columns.start : columns.stop] == 0
        fits = np.ones((free.shape[0], max(0, free.shape[1] - len(text) + 1)), bool)
        for shift in range(len(text)):
            fits &= free[:, shift : shift + fits.shape[1]]
        places = np.argwhere(fits)
        if len(places) == 0:
            return False
        middle = np.array(fits.shape) - 1
        row, column = places[np.abs(2 * places - middle).sum(axis=1).argmin()].tolist()
        for position, character in enumerate(text, columns.start + column):
            self.marks[rows.start + row][position] = character
            self.styles[rows.start + row][position] = style
        return True

    def lines(self) -> list[Text]:
        """All rows."""
        return [
            _line(*row)
            for row in zip(self._joints().tolist(), self.marks, self.styles, strict=True)
        ]

    def _joints(self) -> NDArray[np.int64]:
        """For each character the number of its joint; 0 where no line is."""
        up = np.pad(self.upright, ((1, 0), (0, 0))).astype(np.int64)
        down = np.pad(self.upright, ((0, 1), (0, 0)))
        right = np.pad(self.level, ((0, 0), (0, 1)))
        left = np.pad(self.level, ((0, 0), (1, 0)))
        return up + 3 * right + 9 * down + 27 * left


def _line(joints: Sequence[int], marks: Sequence[str], styles: Sequence[str]) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for joint, mark, style in zip(joints, marks, styles, strict=True):
        line.append(JOINTS[joint] if joint else mark, style)
    return line
