"""A picture of how a leaf lies in zarr arrays and chunks, in box-drawing characters.

1. Two dimensions are drawn (`_view`): the slowest two that are cut; the others are named. Where
   one of the others is cut as well, the picture is the layer at its first element, or at the
   slice's.
2. Each gets a scale (`xckpt.cli.axes`): some characters a chunk, or fewer where they don't fit.
3. Each array gets a heavy outline, with thin lines between its chunks. Where chunks are too thin
   for that, a cell of the picture is several of them, and a note says how many.
4. What is between the lines tells what a slice reads: a character there stands for a range of
   elements, and together they stand for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from xckpt.cli.axes import Axis, Span, column_labels, row_labels, scale
from xckpt.cli.canvas import Canvas
from xckpt.cli.report import ArrayReport, counted
from xckpt.cli.slices import Window, touched

__all__ = ["LEAST_HEIGHT", "LEAST_WIDTH", "Picture", "picture"]

LEAST_WIDTH, LEAST_HEIGHT = 24, 6
TINY, READ, WANTED = "·", "░", "▓"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, and what it doesn't show, in words."""

    lines: tuple[Text, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _View:
    """Which plane of a tensor is drawn."""

    down: int | None
    """The dimension that is drawn downwards; None for a tensor of one dimension."""
    across: int
    layer: Mapping[int, int]
    """Each other dimension, and where it is looked at."""

    def plane(self, ranges: Window) -> tuple[range, range]:
        """The part of a box that is drawn, down and across."""
        return range(1) if self.down is None else ranges[self.down], ranges[self.across]


@dataclass(frozen=True, slots=True)
class _Piece:
    """An array in the plane that is drawn, down and across."""

    number: int
    down: Span
    across: Span
    read: tuple[range, range] | None
    """The whole chunks that a slice reads."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """A piece and its lines, as offsets."""

    piece: _Piece
    rows: list[int]
    columns: list[int]


def picture(
    shape: Sequence[int],
    arrays: Sequence[ArrayReport],
    *,
    box: Window | None = None,
    width: int = 64,
    height: int = 20,
) -> Picture:
    """Draw how a tensor lies in zarr arrays and their chunks.

    Args:
        shape: the tensor's, elements.
        arrays: the zarr arrays that cover it; they are numbered if there are several.
        box: a slice; what reading it touches is filled.
        width: most characters of a line, at least 24.
        height: most lines, at least 6.

    Raises:
        ValueError: width or height is too small to draw in.

    Example:
        >>> whole = ArrayReport("w", (0, 0), (6, 4), (2, 4), None, 3)
        >>> for line in picture((6, 4), [whole], box=(range(3), range(2))).lines:
        ...     print(line)
          0                      4
        0 ┏━━━━━━━━━━━━━━━━━━━━━━━┓
          ┃▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░┃
        2 ┠───────────────────────┨
          ┃▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░┃
        4 ┠───────────────────────┨
          ┃                       ┃
        6 ┗━━━━━━━━━━━━━━━━━━━━━━━┛
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        raise ValueError(f"a picture takes {LEAST_WIDTH} x {LEAST_HEIGHT} characters at least")
    if 0 in shape:
        return Picture((), ("no elements, so no chunks",))
    if not shape:
        return Picture((), ("a scalar, in one chunk",))
    view = _view(shape, arrays, box)
    pieces = _pieces(arrays, box, view)
    tall = 1 if view.down is None else shape[view.down]
    margin = 0 if view.down is None else len(str(tall)) + 1
    room = 2 if view.down is None else height - 2
    down = scale(tall, [piece.down for piece in pieces], wished=2, smallest=4, room=room)
    wide, room = shape[view.across], width - margin - 1
    across = scale(wide, [piece.across for piece in pieces], wished=8, smallest=24, room=room)

    outlines = [
        _Outline(piece, down.cuts(piece.down), across.cuts(piece.across))
        for piece in pieces
        if down.holds(piece.down) and across.holds(piece.across)
    ]
    shown = {outline.piece.number for outline in outlines}
    tiny = [piece for piece in pieces if piece.number not in shown]
    canvas = _drawing(down, across, outlines, tiny)
    for outline in outlines:
        _fill(canvas, outline, down, across, None if box is None else view.plane(box))
        if len(arrays) > 1:
            _number(canvas, outline, down, across)
    notes = [
        *_layer_notes(shape, arrays, view, len(pieces)),
        *_crowd_notes(view, outlines),
        *([f"{TINY} {counted(len(tiny), 'piece')} too thin for an outline"] if tiny else []),
        *([f"{WANTED} wanted, {READ} read with it"] if box is not None else []),
    ]
    return Picture(tuple(_labelled(canvas, down, across, outlines, margin)), tuple(notes))


def _view(shape: Sequence[int], arrays: Sequence[ArrayReport], box: Window | None) -> _View:
    """The plane of the two slowest dimensions that are cut."""

    def rank(d: int) -> tuple[bool, bool, int]:
        return (not _is_cut(shape, arrays, d), shape[d] == 1, d)

    down, across = sorted(sorted(range(len(shape)), key=rank)[:2]) if len(shape) > 1 else (None, 0)
    hidden = [d for d in range(len(shape)) if d not in (down, across)]
    layer = {d: min(box[d].start, shape[d] - 1) if box else 0 for d in hidden}
    return _View(down, across, layer)


def _is_cut(shape: Sequence[int], arrays: Sequence[ArrayReport], d: int) -> bool:
    return any(min(array.shape[d], array.chunk[d]) < shape[d] for array in arrays)


def _pieces(arrays: Sequence[ArrayReport], box: Window | None, view: _View) -> list[_Piece]:
    """The arrays that have a part in the plane."""
    pieces: list[_Piece] = []
    for number, array in enumerate(arrays):
        held = [range(o, o + n) for o, n in zip(array.offset, array.shape, strict=True)]
        if 0 in array.shape or any(at not in held[d] for d, at in view.layer.items()):
            continue
        spans = [
            Span(part.start, part.stop, min(chunk, len(part)))
            for part, chunk in zip(held, array.chunk, strict=True)
        ]
        down = Span(0, 1, 1) if view.down is None else spans[view.down]
        around = None if box is None else touched(array, box)
        read = None if around is None else view.plane(around)
        pieces.append(_Piece(number, down, spans[view.across], read))
    return pieces


def _drawing(
    down: Axis, across: Axis, outlines: Sequence[_Outline], tiny: Sequence[_Piece]
) -> Canvas:
    """All lines, and where the pieces lie that are too thin for them."""
    canvas = Canvas(down.last, across.last)
    canvas.rule((0, down.last), (0, across.last))
    for mark, some in (
        (TINY, tiny),
        (READ, [piece for piece in tiny if piece.read]),
        (" ", [outline.piece for outline in outlines]),
    ):
        for piece in some:
            for row in range(down.at(piece.down.start), down.at(piece.down.stop) + 1):
                start, stop = across.at(piece.across.start), across.at(piece.across.stop)
                canvas.marks[row][start : stop + 1] = [mark] * (stop + 1 - start)
    for outline in outlines:
        rows = [down.at(offset) for offset in outline.rows]
        canvas.rule(rows, [across.at(offset) for offset in outline.columns])
    return canvas


def _fill(
    canvas: Canvas,
    outline: _Outline,
    down: Axis,
    across: Axis,
    wanted: tuple[range, range] | None,
) -> None:
    """Mark what is read of a piece, and in it what is wanted."""
    read = outline.piece.read
    if read is None or wanted is None:
        return
    for row in down.between(outline.rows):
        for column in across.between(outline.columns):
            for part, mark in ((read, READ), (wanted, WANTED)):
                if row.meets(part[0]) and column.meets(part[1]):
                    canvas.marks[row.position][column.position] = mark


def _number(canvas: Canvas, outline: _Outline, down: Axis, across: Axis) -> None:
    """Colour a piece and write its number into it."""
    number = outline.piece.number
    colour = COLOURS[number % len(COLOURS)]
    rows = range(down.at(outline.rows[0]) + 1, down.at(outline.rows[-1]))
    columns = range(across.at(outline.columns[0]) + 1, across.at(outline.columns[-1]))
    canvas.paint(rows, columns, colour)
    for text in (f" {number} ", f"{number}"):
        if canvas.write(rows, columns, text, f"bold {colour}"):
            return


def _labelled(
    canvas: Canvas, down: Axis, across: Axis, outlines: Sequence[_Outline], margin: int
) -> Iterator[Text]:
    """The rows of a canvas with the offsets of their lines; ends of pieces before chunks."""
    rows = [offset for each in outlines for offset in (each.rows[0], each.rows[-1])]
    rows += [offset for each in outlines for offset in each.rows]
    columns = [offset for each in outlines for offset in (each.columns[0], each.columns[-1])]
    columns += [offset for each in outlines for offset in each.columns]
    yield Text(column_labels(across, columns, margin), "dim", no_wrap=True)
    for label, line in zip(row_labels(down, rows, margin), canvas.lines(), strict=True):
        yield Text.assemble((label, "dim"), line, no_wrap=True)


def _crowd_notes(view: _View, outlines: Sequence[_Outline]) -> Iterator[str]:
    """How many chunks there are between two lines, where it is more than one."""
    for d, several in (
        (view.down, [(each.rows, each.piece.down.chunk) for each in outlines]),
        (view.across, [(each.columns, each.piece.across.chunk) for each in outlines]),
    ):
        most = max((-(-(b - a) // n) for cuts, n in several for a, b in pairwise(cuts)), default=1)
        if most > 1:
            yield f"along dimension {d} a cell of the picture is up to {counted(most, 'chunk')}"


def _layer_notes(
    shape: Sequence[int], arrays: Sequence[ArrayReport], view: _View, shown: int
) -> Iterator[str]:
    """Which dimensions are drawn, and what is to know of the others."""
    if view.layer:
        yield f"dimension {view.down} down, dimension {view.across} across"
    for d, at in view.layer.items():
        if not _is_cut(shape, arrays, d):
            yield f"dimension {d} is whole: [0, {shape[d]})"
            continue
        chunks = {array.chunk[d] for array in arrays}
        parts = f" in chunks of {chunks.pop()}" if len(chunks) == 1 else ""
        yield f"dimension {d}, [0, {shape[d]}){parts}, is drawn at {at}"
    if shown < len(arrays):
        yield f"{shown:,} of {counted(len(arrays), 'piece')} lie there"
