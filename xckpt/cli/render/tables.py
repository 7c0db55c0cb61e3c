"""Reports as rich tables, for a terminal.

Names come from a checkpoint and may hold anything: they are never read as markup, and control
characters are escaped (`escaped`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from xckpt.cli.listing import ROOT, Row, shape_text, size_text
from xckpt.cli.render.draw import LEAST_WIDTH, draw
from xckpt.cli.render.shards import draw_shards
from xckpt.cli.render.tree import TREE_COLUMNS, checkpoint_facts, shortened, tree_cells
from xckpt.cli.report import (
    ArrayReport,
    CheckpointReport,
    LeafReport,
    SliceReport,
    counted,
    tree_rows,
)
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.shard_cuts import dimension_cuts
from xckpt.core.manifest.entries import TensorEntry
from xckpt.core.text.printable import printable, printable_lines
from xckpt.core.text.shown import readable_bytes
from xckpt.viewer.picture.plane import PicturePlane, shards_of

if TYPE_CHECKING:
    from xckpt.storage.contents.statistics import Statistics
    from xckpt.storage.stored_array import StoredArray

PIPED_WIDTH = 100_000
"""Columns where the output is not a terminal: nothing is wrapped or cut."""

LONGEST_VALUE = 2000
"""Most characters of one value that are shown; ``--json`` has them all."""

SHOWN_PIECES = 50
"""Pieces of one leaf that a table lists; ``--json`` has them all."""


IN_ONE_LINE = ("dtype", "fact", "leaves")
"""Columns of short words, beside those of numbers."""

LEAST_FOLDED = 16
"""Characters that a column keeps whose texts are folded."""


class SafeConsole(Console):
    """A console that escapes control characters in plain strings; a `Text` is to be `escaped`."""

    def print(self, *objects: Any, **how: Any) -> None:  # noqa: ANN401  # rich's own options
        """Print, and cut nothing off where a word is wider than the terminal.

        A pipe gets no blanks at the ends of lines: of a long value each line had as many.
        """
        if self.is_terminal:
            super().print(*objects, crop=False, **how)
            return
        with self.capture() as captured:
            super().print(*objects, crop=False, **how)
        text = "\n".join(line.rstrip(" ") for line in captured.get().split("\n"))
        super().print(Text(text), crop=False, no_wrap=True, overflow="ignore", end="")

    def on_broken_pipe(self) -> None:
        """Have the command itself end when the reader of its answer has closed the pipe.

        Raises:
            BrokenPipeError: always; rich's own way ends in exit code 1, which stands for faults.
        """
        raise BrokenPipeError

    def render_str(self, text: str, **how: Any) -> Text:  # noqa: ANN401  # rich's own options
        """The text that a string becomes."""
        return super().render_str(printable_lines(text), **how)


class PlainTable(Table):
    """A table that breaks no number and no word: on a narrow terminal each row is a block."""

    @property
    def least_width(self) -> int:
        """Characters without which something is broken that should not be."""
        return sum(map(self._least, self.columns)) + 2 * (len(self.columns) - 1)

    def _least(self, column: Column) -> int:
        texts = (
            cell.cell_len if isinstance(cell, Text) else len(str(cell)) for cell in column.cells
        )
        header = len(str(column.header)) if self.show_header else 0
        widest = max([header, *texts])
        return widest if column.no_wrap else max(header, min(widest, LEAST_FOLDED))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What is printed."""
        if self.least_width <= options.max_width:
            return super().__rich_console__(console, options)
        return self._blocks(options.max_width)

    def _blocks(self, width: int) -> Iterator[Text]:
        """For each row its first cell, and below it, indented, the others with their headers."""
        headers = [f"{column.header} " if self.show_header else "" for column in self.columns]
        for first, *others in zip(*(column.cells for column in self.columns), strict=True):
            label = first if isinstance(first, Text) else Text(printable_lines(str(first)))
            yield label
            line = indent = " " * (len(label.plain) - len(label.plain.lstrip()))
            for header, cell in zip(headers[1:], others, strict=True):
                text = printable_lines(str(cell))
                part = f"  {header}{text}" if text else ""
                if line != indent and len(line) + len(part) > width:
                    yield Text(line)
                    line = indent
                line += part
            if line != indent:
                yield Text(line)


def console() -> Console:
    """A console that prints names as they are.

    Example:
        >>> console().print("a leaf[bold] of any name")
        a leaf[bold] of any name
    """
    screen = SafeConsole(markup=False, highlight=False, emoji=False)
    if not (screen.is_terminal and screen.width):  # COLUMNS=0, of a terminal without a size
        screen.width = PIPED_WIDTH
    return screen


def leaf_list(rows: Iterable[Row]) -> RenderableType:
    """A line for each leaf: name, dtype, shape, bytes.

    Example:
        >>> console().print(leaf_list([Row("model/w", "int8", (2, 3), 6, True)]))
        model/w  int8  [2, 3]  6 B
    """
    table = empty_table("name", "dtype", "shape", "size", right=("size",), header=False)
    for row in rows:
        table.add_row(escaped(row.name or ROOT), row.dtype, shape_text(row.shape), size_text(row))
    return table


def statistics_table(found: Iterable[tuple[StoredArray, Statistics]]) -> RenderableType:
    """A line for each tensor: what its numbers are like."""
    columns = ("leaf", "dtype", "elements", "min", "max", "mean", "NaN", "infinite")
    table = empty_table(*columns, right=columns[2:])
    for leaf, of in found:
        numbers = (_number(of.least), _number(of.largest), _number(of.mean))
        counts = (f"{of.nans:,}", f"{of.infinities:,}")
        row = (str(leaf.dtype), f"{of.count:,}", *numbers, *counts)
        table.add_row(escaped(leaf.name or ROOT), *row)
    return table


def _number(number: complex | None) -> str:
    if number is None or isinstance(number, int):
        return "" if number is None else str(number)
    return f"{number:.6g}"


def checkpoint_table(report: CheckpointReport) -> RenderableType:
    """A summary of the checkpoint, and its tree."""
    table = empty_table(*TREE_COLUMNS, right=("size", "chunks"))
    for row in tree_rows(report.leaves, report.containers):
        label, *cells = map(Text, tree_cells(row))
        table.add_row(Text(label.plain, "" if row.leaf else "bold"), *cells)
    return Group(_facts(checkpoint_facts(report)), Text(), table)


def leaf_table(leaf: LeafReport) -> RenderableType:
    """Everything the manifest says of one leaf.

    Example:
        >>> whole = ArrayReport("w", (0,), (4,), (2,), None, 2)
        >>> leaf = LeafReport("w", "tensor", "int8", (4,), 4, "regular", (whole,))
        >>> console().print(leaf_table(leaf))
        leaf      w
        dtype     int8
        shape     [4]
        size      4 B in 2 chunks
        layout    one zarr array, chunks of [2]
        saved as  one whole
    """
    facts = [("leaf", leaf.name or ROOT), ("dtype", leaf.dtype)]
    if leaf.shape is not None:
        facts.append(("shape", shape_text(leaf.shape)))
    if leaf.value is not None:
        facts.append(("value", shortened(leaf.value, LONGEST_VALUE)))
    if leaf.layout != "manifest":
        facts.append(("size", f"{readable_bytes(leaf.bytes)} in {counted(leaf.chunks, 'chunk')}"))
        facts.append(("layout", _layout(leaf)))
    if leaf.kind == "tensor":
        facts.append(("saved as", str(leaf.sharding or "one whole")))
    if leaf.annotation:
        facts.append(("is a", leaf.annotation))
    if leaf.reading is not None:
        facts += _reading(leaf.reading)
    if leaf.layout != "pieces":
        return _facts(facts)
    return Group(_facts(facts), Text(), _pieces(leaf.arrays))


def leaf_drawing(leaf: LeafReport, box: Box | None = None, width: int = 64) -> RenderableType:
    """How a tensor lies in chunks, and which of them a slice of it reads."""
    assert leaf.shape is not None
    drawing = draw(leaf.shape, leaf.arrays, box=box, width=max(LEAST_WIDTH, min(width, 64)))
    return Group(*drawing.lines, *(Text(note, "dim") for note in drawing.notes))


def shard_drawing(
    entry: TensorEntry, box: Box | None = None, width: int = 64
) -> RenderableType | None:
    """Which device held which part of a tensor; None where its sharding does not say, or one did.

    Args:
        entry: the tensor.
        box: a slice; dimensions that are not drawn are cut open where it begins.
        width: most characters of a line.
    """
    if 0 in entry.shape or dimension_cuts(entry.sharding, entry.shape) is None:
        return None
    at = None
    if box is not None:
        at = [min(offset, size - 1) for offset, size in zip(box.offsets, entry.shape, strict=True)]
    plane = PicturePlane.of(entry, at=at)
    picture = shards_of(entry, plane)
    if [len(shard.devices) for shard in picture.shards] in ([], [1]):
        return None
    drawing = draw_shards(picture, width=max(LEAST_WIDTH, min(width, 64)))
    others = [d for d in range(len(entry.shape)) if d not in (plane.down, plane.across)]
    notes = [f"dimension {plane.down} down, dimension {plane.across} across"] if others else []
    notes += [f"dimension {d} is cut open at {plane.at[d]}" for d in others]
    dim = (Text(note, "dim") for note in (*notes, *drawing.notes))
    return Group(Text(), Text("shards", "bold"), *drawing.lines, *dim)


def _reading(reading: SliceReport) -> list[tuple[str, str]]:
    chunks = f"{reading.chunks_read:,} of {counted(reading.chunks, 'chunk')}"
    read, wanted = readable_bytes(reading.bytes_read), readable_bytes(reading.bytes_wanted)
    times = f" ({reading.bytes_read / reading.bytes_wanted:.2f} x)" if reading.bytes_wanted else ""
    return [
        ("slice", str(Box(reading.offset, reading.shape))),
        ("reads", f"{chunks}: {read} for the {wanted} wanted{times}"),
    ]


def _layout(leaf: LeafReport) -> str:
    if leaf.layout == "pieces":
        return f"{counted(len(leaf.arrays), 'piece')}, each a zarr array"
    [array] = leaf.arrays
    shard = f", in shards of {shape_text(array.shard)}" if array.shard else ""
    return f"one zarr array, chunks of {shape_text(array.chunk)}{shard}"


def _pieces(arrays: Sequence[ArrayReport]) -> RenderableType:
    table = empty_table("piece", "elements", "chunk", "chunks", right=("piece", "chunks"))
    for number, array in enumerate(arrays[:SHOWN_PIECES]):
        table.add_row(str(number), str(array.box), shape_text(array.chunk), str(array.chunks))
    if len(arrays) > SHOWN_PIECES:
        table.add_row("...", f"{len(arrays) - SHOWN_PIECES} more: --json lists them all")
    return table


def _facts(facts: Iterable[tuple[str, str]]) -> Table:
    table = empty_table("fact", "value", header=False)
    for name, fact in facts:
        table.add_row(Text(name, "bold"), escaped(fact))
    return table


def empty_table(*columns: str, right: Sequence[str] = (), header: bool = True) -> Table:
    """An empty table without lines; the columns of ``right`` are numbers.

    Numbers and dtypes stay in one line, other texts are folded.

    Example:
        >>> table = empty_table("leaf", "size", right=("size",))
        >>> table.add_row("model/w", "24 B")
        >>> console().print(table)
        leaf     size
        model/w  24 B
    """
    table = PlainTable(
        box=None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold"
    )
    for column in columns:
        is_number = column in right
        where = "right" if is_number else "left"
        table.add_column(
            column, justify=where, overflow="fold", no_wrap=is_number or column in IN_ONE_LINE
        )
    return table


def escaped(text: str) -> Text:
    """A text without control characters."""
    return Text(printable(text))
