"""Draw how a tensor lies in zarr arrays and chunks, in box-drawing characters.

1. Two dimensions are drawn: the slowest two that are cut. The others are named in notes; where one
   of them is cut too, the drawing is the layer at the slice, or at its first element.
2. The smallest chunk gets some characters, or all the room there is is shared out (`scale`). Both
   sides then get one scale, unless a boundary that has room on its own would be lost (`to_scale`).
3. Each array gets a heavy outline, with thin lines between its chunks. Where chunks are too thin
   for that, a cell of the drawing is several of them, and a note says how many.
4. What is between the lines shows what a slice reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from xckpt.cli.render.canvas import (
    Canvas,
    Cuts,
    column_labels,
    is_to_scale,
    scale,
    to_scale,
)
from xckpt.cli.report import ArrayReport, counted, touched
from xckpt.core.geometry.box import Box

LEAST_WIDTH, LEAST_HEIGHT = 24, 6
TINY, READ, WANTED = "·", "░", "▓"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class Drawing:
    """Lines of characters, and what they don't show, in words."""

    lines: tuple[Text, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plane:
    """The one or two dimensions of a tensor that are drawn, and where the others are cut open.

    Example:
        >>> plane = Plane([0, 2], {1: 5})  # dimension 1 is cut open at 5
        >>> plane.of((8, 16, 32), 1), Plane([0], {}).of((8,), 1)
        ((8, 32), (1, 8))
    """

    dimensions: Sequence[int]
    layer: Mapping[int, int]

    def of(self, values: Sequence[int], default: int) -> tuple[int, int]:
        """What is given per dimension of the tensor, down and across."""
        down, across = [default, *(values[d] for d in self.dimensions)][-2:]
        return down, across

    def of_box(self, box: Box) -> Box:
        """The part of a box that is in the plane."""
        return Box(self.of(box.offsets, 0), self.of(box.sizes, 1))


@dataclass(frozen=True, slots=True)
class Piece:
    """A zarr array in the plane that is drawn."""

    number: int
    box: Box
    chunk: tuple[int, int]
    fills: Sequence[tuple[Box, str]]
    """Boxes and the mark that fills them: what a slice reads, and in it the slice."""


def draw(
    shape: Sequence[int],
    arrays: Sequence[ArrayReport],
    *,
    box: Box | None = None,
    width: int = 64,
    height: int = 20,
) -> Drawing:
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
        >>> whole = ArrayReport("w", (0, 0), (6, 24), (2, 24), None, 3)
        >>> for line in draw((6, 24), [whole], box=Box((0, 0), (3, 12))).lines:
        ...     print(line)
          0                                              24
        0 ┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
          ┃▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░░░░░░░░┃
        2 ┠───────────────────────────────────────────────┨
          ┃▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░░░░░░░░┃
        4 ┠───────────────────────────────────────────────┨
          ┃                                               ┃
        6 ┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
    """
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        raise ValueError(f"a picture takes {LEAST_WIDTH} x {LEAST_HEIGHT} characters at least")
    if 0 in shape:
        return Drawing((), ("no elements, so no chunks",))
    if not shape:
        return Drawing((), ("a scalar, in one chunk",))
    plane = _plane(shape, arrays, box)
    pieces = list(_pieces(arrays, box, plane))
    margin = len(str(shape[plane.dimensions[0]])) + 1 if len(shape) > 1 else 0
    canvas = _canvas(plane.of(shape, 1), pieces, width - margin, height if margin else 4)
    outlined = [piece for piece in pieces if canvas.has_room(piece.box)]
    thin = [piece for piece in pieces if not canvas.has_room(piece.box)]
    for piece in sorted(thin, key=lambda piece: bool(piece.fills)):
        canvas.marks[canvas.span(piece.box)] = READ if piece.fills else TINY
    cuts = [_outline(canvas, piece, numbered=len(arrays) > 1) for piece in outlined]
    notes = list(_layer_notes(shape, arrays, plane) if plane.layer else ())
    if margin and not is_to_scale(canvas.axes):
        notes.append("each axis has its own scale")
    if len(pieces) < len(arrays):
        notes.append(f"{len(pieces):,} of {counted(len(arrays), 'piece')} lie there")
    notes += _crowd_notes(plane, outlined, cuts)
    if thin:
        notes.append(f"{TINY} {counted(len(thin), 'piece')} too thin for an outline")
    if box is not None:
        notes.append(f"{WANTED} wanted, {READ} read with it")
    return Drawing(tuple(_labelled(canvas, cuts, margin)), tuple(notes))


def _plane(shape: Sequence[int], arrays: Sequence[ArrayReport], box: Box | None) -> Plane:
    """The slowest two dimensions that are cut."""
    ranked = sorted(range(len(shape)), key=lambda d: (not _is_cut(shape, arrays, d), shape[d] == 1))
    layer = {d: min(box.offsets[d], shape[d] - 1) if box else 0 for d in sorted(ranked[2:])}
    return Plane(sorted(ranked[:2]), layer)


def _is_cut(shape: Sequence[int], arrays: Sequence[ArrayReport], d: int) -> bool:
    return any(min(array.shape[d], array.chunk[d]) < shape[d] for array in arrays)


def _pieces(arrays: Sequence[ArrayReport], box: Box | None, plane: Plane) -> Iterator[Piece]:
    """The arrays that have a part in the plane."""
    for number, array in enumerate(arrays):
        ends = [(array.box.offsets[d], at, array.box.ends[d]) for d, at in plane.layer.items()]
        if 0 not in array.shape and all(start <= at < stop for start, at, stop in ends):
            read = touched(array, box) if box else None
            fills = ((read, READ), (box, WANTED)) if read and box else ()
            chunk = plane.of(tuple(map(min, array.chunk, array.shape)), 1)
            flat = [(plane.of_box(part), mark) for part, mark in fills]
            yield Piece(number, plane.of_box(array.box), chunk, flat)


def _canvas(sizes: tuple[int, int], pieces: Sequence[Piece], width: int, height: int) -> Canvas:
    """A canvas of the whole plane; one of the lines is for labels."""
    row_chunk, column_chunk = (min(piece.chunk[k] for piece in pieces) for k in (0, 1))
    down = scale(sizes[0], row_chunk, wished=2, smallest=4, room=height - 2)
    across = scale(sizes[1], column_chunk, wished=8, smallest=24, room=width - 1)
    canvas = Canvas(*to_scale((down, across), (row_chunk, column_chunk), (height - 2, width - 1)))
    canvas.rule([(0, size) for size in sizes])
    return canvas


def _outline(canvas: Canvas, piece: Piece, *, numbered: bool) -> Cuts:
    """Draw a piece over what is there; returns its lines."""
    canvas.marks[canvas.span(piece.box)] = " "
    spans = zip(canvas.axes, piece.box.offsets, piece.box.ends, piece.chunk, strict=True)
    cuts = [axis.cuts(start, stop, chunk) for axis, start, stop, chunk in spans]
    canvas.rule(cuts)
    for box, mark in piece.fills:
        canvas.fill(cuts, box, mark)
    if numbered:
        number = str(piece.number)
        canvas.write(piece.box, (f" {number} ", number), COLOURS[piece.number % len(COLOURS)])
    return cuts


def _labelled(canvas: Canvas, cuts: Sequence[Cuts], margin: int) -> Iterator[Text]:
    """The rows of a canvas with the offsets of their lines; ends of pieces before chunks."""
    down, across = canvas.axes
    ends = [[(lines[0], lines[-1]) for lines in piece] for piece in cuts]
    rows, columns = ([cut for piece in (*ends, *cuts) for cut in piece[k]] for k in (0, 1))
    yield Text(column_labels(across, columns, margin), "dim", no_wrap=True)
    labels = {down.at(offset): f"{offset} " for offset in (*reversed(rows), down.size, 0)}
    for row, line in enumerate(canvas.lines()):
        label = labels.get(row, "").rjust(margin) if margin else ""
        yield Text.assemble((label, "dim"), line, no_wrap=True)


def _layer_notes(
    shape: Sequence[int], arrays: Sequence[ArrayReport], plane: Plane
) -> Iterator[str]:
    """Which dimensions are drawn, and where the others are cut."""
    down, across = plane.dimensions
    yield f"dimension {down} down, dimension {across} across"
    for d, at in plane.layer.items():
        if not _is_cut(shape, arrays, d):
            yield f"dimension {d} is whole: [0, {shape[d]})"
        else:
            chunks = {array.chunk[d] for array in arrays}
            parts = f" in chunks of {chunks.pop()}" if len(chunks) == 1 else ""
            yield f"dimension {d}, [0, {shape[d]}){parts}, is drawn at {at}"


def _crowd_notes(plane: Plane, pieces: Sequence[Piece], cuts: Sequence[Cuts]) -> Iterator[str]:
    """How many chunks there are between two lines, where it is more than one."""
    for k, d in enumerate(plane.dimensions, 2 - len(plane.dimensions)):
        crowds = [
            -(-(b - a) // piece.chunk[k])
            for piece, lines in zip(pieces, cuts, strict=True)
            for a, b in pairwise(lines[k])
        ]
        if max(crowds, default=1) > 1:
            most = counted(max(crowds), "chunk")
            yield f"along dimension {d} a cell of the picture is up to {most}"
