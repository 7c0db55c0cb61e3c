"""Drawings: each is read back, character by character, and compared with what it was drawn from."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.support.examples import examples
from tests.support.tilings import Shape, tilings
from xckpt.cli.render import draw as drawing
from xckpt.cli.render.canvas import JOINTS, Axis
from xckpt.cli.render.draw import Drawing
from xckpt.cli.report import ArrayReport, parse_box
from xckpt.core.geometry.box import Box

SIDES = st.sampled_from([1, 2, 3, 5, 8, 12, 16, 17, 30]) | st.integers(1, 40)
DIRECTIONS = {
    "UP": ("up",),
    "DOWN": ("down",),
    "LEFT": ("left",),
    "RIGHT": ("right",),
    "VERTICAL": ("up", "down"),
    "HORIZONTAL": ("left", "right"),
}


def arms(character: str) -> dict[str, int]:
    """Direction -> weight of a box-drawing character, by its Unicode name; empty for any other."""
    name = unicodedata.name(character, "")
    if not name.startswith("BOX DRAWINGS"):
        return {}
    found: dict[str, int] = {}
    words = name.removeprefix("BOX DRAWINGS ").split()
    one_weight = words[0] in ("LIGHT", "HEAVY") and not {"LIGHT", "HEAVY"} & set(words[1:])
    for part in [words] if one_weight else split(words):
        weight = 2 if "HEAVY" in part else 1
        for word in part:
            found.update(dict.fromkeys(DIRECTIONS.get(word, ()), weight))
    return found


def split(words: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "AND":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def test_every_joint_is_the_character_of_its_weights() -> None:
    assert len(JOINTS) == len(set(JOINTS)) == 81
    for number, character in enumerate(JOINTS):
        weights = [number // 3**k % 3 for k in range(4)]
        named = dict(zip(("up", "right", "down", "left"), weights, strict=True))
        assert arms(character) == {way: weight for way, weight in named.items() if weight}


def array(offset: Shape, shape: Shape, chunk: Shape) -> ArrayReport:
    return ArrayReport("w", offset, shape, chunk, None, 0)


def whole(shape: Shape, chunk: Shape) -> list[ArrayReport]:
    return [array((0,) * len(shape), shape, chunk)]


@dataclass(frozen=True)
class Layout:
    shape: Shape
    arrays: list[ArrayReport]
    box: Box | None


@st.composite
def layouts(draw: st.DrawFn, *, most_dimensions: int = 4) -> Layout:
    rank = draw(st.integers(1, most_dimensions))
    shape = tuple(draw(SIDES) if d < 2 else draw(st.integers(1, 4)) for d in range(rank))
    if draw(st.booleans()):
        shape = (shape[0] * draw(st.sampled_from([1, 100, 50257])), *shape[1:])
    boxes = [((0,) * rank, shape)]
    if shape[0] < 50 and draw(st.booleans()):
        boxes = [box for box in draw(tilings(shape)) if 0 not in box[1]]
    arrays = [
        array(offset, sizes, tuple(draw(chunk_sides(size)) for size in sizes))
        for offset, sizes in boxes
    ]
    if draw(st.booleans()):
        return Layout(shape, arrays, None)
    ends = [sorted([draw(st.integers(0, n)), draw(st.integers(0, n))]) for n in shape]
    return Layout(shape, arrays, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))


def chunk_sides(size: int) -> st.SearchStrategy[int]:
    return st.integers(1, size) | st.sampled_from([size, -(-size // 2), -(-size // 5)])


class Seen:
    """A drawing that was read back: dimensions, scales, lines, labels."""

    def __init__(self, drawn: Drawing, layout: Layout) -> None:
        above, *lines = [line.plain for line in drawn.lines]
        notes = "; ".join(drawn.notes)
        margin = lines[0].index("┏")
        self.rows = [line[margin:] for line in lines]
        ways = re.search(r"dimension (\d) down, dimension (\d) across", notes)
        self.down, self.across = (int(ways[1]), int(ways[2])) if ways else (0, 1)
        self.shape, self.arrays, self.box = layout.shape, layout.arrays, layout.box
        if len(self.shape) == 1:
            self.shape = (1, *self.shape)
            self.arrays = [
                array((0, *a.offset), (1, *a.shape), (1, *a.chunk)) for a in layout.arrays
            ]
            self.box = (
                None
                if layout.box is None
                else Box((0, *layout.box.offsets), (1, *layout.box.sizes))
            )
        self.hidden = {d: 0 for d in range(len(self.shape)) if d not in (self.down, self.across)}
        for d, at in re.findall(r"dimension (\d), \[[^)]*\)[^,]*, is drawn at (\d+)", notes):
            self.hidden[int(d)] = int(at)
        self.last = {self.down: len(self.rows) - 1, self.across: len(self.rows[0]) - 1}
        self.left = [line[:margin].strip() for line in lines]
        self.above = [(found.start() - margin, found[0]) for found in re.finditer(r"\d+", above)]
        joints = [[arms(character) for character in row] for row in self.rows]
        upright = [[min(j.get("up", 0), j.get("down", 0)) for j in row] for row in joints]
        level = [[min(j.get("left", 0), j.get("right", 0)) for j in row] for row in joints]
        self.lines = {self.across: np.array(upright), self.down: np.array(level).T}
        """Dimension -> weights [character of the other dimension, character of this one]."""

    def at(self, offset: int, d: int) -> int:
        """The character nearest to an offset."""
        return math.floor(Fraction(offset * self.last[d], self.shape[d]) + Fraction(1, 2))

    def inside(self, held: ArrayReport, d: int) -> range:
        """The characters between the outlines of an array."""
        return range(self.at(held.offset[d], d) + 1, self.at(held.offset[d] + held.shape[d], d))

    def in_plane(self) -> list[ArrayReport]:
        return [
            held
            for held in self.arrays
            if all(0 <= at - held.offset[d] < held.shape[d] for d, at in self.hidden.items())
        ]

    def outlined(self) -> list[ArrayReport]:
        """The arrays that have a character inside."""
        drawn = (self.down, self.across)
        return [held for held in self.in_plane() if all(self.inside(held, d) for d in drawn)]


def cuts(held: ArrayReport, d: int) -> list[int]:
    """The boundaries of an array's chunks."""
    stop = held.offset[d] + held.shape[d]
    return [*range(held.offset[d], stop, held.chunk[d]), stop]


def draw(layout: Layout, **size: int) -> Drawing:
    return drawing.draw(layout.shape, layout.arrays, box=layout.box, **size)


sizes = st.fixed_dictionaries(
    {}, optional={"width": st.integers(24, 100), "height": st.integers(6, 40)}
)


@given(layout=layouts(), size=sizes)
def test_a_drawing_is_no_larger_than_asked_and_always_the_same(
    layout: Layout, size: dict[str, int]
) -> None:
    drawn = draw(layout, **size)
    assert max(len(line.plain) for line in drawn.lines) <= size.get("width", 64)
    assert len(drawn.lines) <= size.get("height", 20)
    assert draw(layout, **size) == drawn


@given(layout=layouts(), size=sizes)
@examples(40, 1000)
def test_every_boundary_that_can_be_distinguished_is_a_line(
    layout: Layout, size: dict[str, int]
) -> None:
    seen = Seen(draw(layout, **size), layout)
    for held in seen.outlined():
        for d, other in ((seen.down, seen.across), (seen.across, seen.down)):
            lines = seen.lines[d][seen.inside(held, other)]
            first, last = seen.inside(held, d)[0] - 1, seen.inside(held, d)[-1] + 1
            assert (lines[:, [first, last]] == 2).all()
            starts = [seen.at(cut, d) for cut in cuts(held, d)[:-1]]
            if min(np.diff(starts), default=2) < 2:
                continue
            for cut in cuts(held, d)[1:-1]:
                if last - seen.at(cut, d) >= 2:
                    assert (lines[:, seen.at(cut, d)] == 1).all()


@given(layout=layouts(), size=sizes)
@examples(40, 1000)
def test_every_line_is_a_boundary(layout: Layout, size: dict[str, int]) -> None:
    seen = Seen(draw(layout, **size), layout)
    for held in seen.outlined():
        for d, other in ((seen.down, seen.across), (seen.across, seen.down)):
            places = {seen.at(cut, d) for cut in cuts(held, d)}
            inside = seen.inside(held, d)
            lines = seen.lines[d][seen.inside(held, other)][:, inside]
            for position, column in zip(inside, lines.T, strict=True):
                weights = set(column.tolist())
                assert weights == {0} or (weights == {1} and position in places)
    note = any("too thin" in note for note in draw(layout, **size).notes)
    assert note == (len(seen.outlined()) < len(seen.in_plane()))


@given(layout=layouts(), size=sizes)
@examples(50, 1000)
def test_labels_are_boundaries_at_their_lines(layout: Layout, size: dict[str, int]) -> None:
    seen = Seen(draw(layout, **size), layout)
    known = {
        d: {0, seen.shape[d], *(cut for held in seen.in_plane() for cut in cuts(held, d))}
        for d in (seen.down, seen.across)
    }
    for row, text in enumerate(seen.left):
        if text:
            assert int(text) in known[seen.down]
            assert seen.at(int(text), seen.down) == row
    assert {"0", str(seen.shape[seen.across])} <= {text for _, text in seen.above}
    for position, text in seen.above:
        assert int(text) in known[seen.across]
        end = int(text) == seen.shape[seen.across]
        assert end or seen.at(int(text), seen.across) == position
    if len(layout.shape) > 1:
        assert seen.left[0] == "0"
        assert seen.left[-1] == str(seen.shape[seen.down])


@given(layout=layouts(), size=sizes)
@examples(50, 1000)
def test_what_a_slice_reads_is_filled(layout: Layout, size: dict[str, int]) -> None:
    """The element in the middle of a character decides, unless cells are several chunks."""
    drawn = draw(layout, **size)
    seen = Seen(drawn, layout)
    exact = not any("a cell of the picture" in note for note in drawn.notes)
    for held in seen.outlined():
        for row, column in product(seen.inside(held, seen.down), seen.inside(held, seen.across)):
            found = seen.rows[row][column]
            if arms(found) or re.search(r"\d", seen.rows[row][column - 1 : column + 2]):
                continue
            if seen.box is None:
                assert found == " "
                continue
            places = {seen.down: row, seen.across: column}
            middle = {d: place * seen.shape[d] // seen.last[d] for d, place in places.items()}
            read = is_read(seen.box, held, seen.hidden | middle)
            if exact or read:
                assert (found in "░▓") == read
            if all(at in elements(seen.box, d) for d, at in (seen.hidden | middle).items()):
                assert found == "▓"
            if found == "▓":
                assert all(is_near(seen, place, d) for d, place in places.items())


@given(layout=layouts(), size=sizes)
def test_every_element_has_a_character_between_the_lines(
    layout: Layout, size: dict[str, int]
) -> None:
    seen = Seen(draw(layout, **size), layout)
    for held in seen.outlined():
        for d in (seen.down, seen.across):
            start = held.offset[d]
            axis = Axis(seen.shape[d], seen.last[d])
            lines = axis.cuts(start, start + held.shape[d], held.chunk[d])
            cells = [(low, high) for _, low, high in axis.between(lines)]
            assert (cells[0][0], cells[-1][1]) == (start, start + held.shape[d])
            assert all(low < high == after for (low, high), (after, _) in pairwise(cells))


def elements(box: Box, d: int) -> range:
    return range(box.offsets[d], box.ends[d])


def is_near(seen: Seen, place: int, d: int) -> bool:
    """Whether the slice has an element between a place and its neighbours, themselves included."""
    assert seen.box is not None
    low, high = (Fraction((2 * place + w) * seen.shape[d], 2 * seen.last[d]) for w in (-3, 3))
    return low < seen.box.ends[d] and seen.box.offsets[d] < high


def is_read(box: Box, held: ArrayReport, element: dict[int, int]) -> bool:
    """Whether the chunk with an element of an array meets a box."""
    for d, at in element.items():
        start = held.offset[d] + (at - held.offset[d]) // held.chunk[d] * held.chunk[d]
        stop = min(start + held.chunk[d], held.offset[d] + held.shape[d])
        if max(start, box.offsets[d]) >= min(stop, box.ends[d]):
            return False
    return True


def shown(layout: Layout, **size: int) -> str:
    drawn = draw(layout, **size)
    return "\n".join([*(line.plain for line in drawn.lines), *drawn.notes])


def test_a_regular_grid() -> None:
    layout = Layout((16, 32), whole((16, 32), (8, 8)), None)
    assert shown(layout) == dedent("""\
           0       8       16      24     32
         0 ┏━━━━━━━┯━━━━━━━┯━━━━━━━┯━━━━━━━┓
           ┃       │       │       │       ┃
           ┃       │       │       │       ┃
           ┃       │       │       │       ┃
         8 ┠───────┼───────┼───────┼───────┨
           ┃       │       │       │       ┃
           ┃       │       │       │       ┃
           ┃       │       │       │       ┃
        16 ┗━━━━━━━┷━━━━━━━┷━━━━━━━┷━━━━━━━┛""")


def test_pieces_and_a_slice() -> None:
    arrays = [
        array((0, 0), (25129, 384), (12565, 384)),
        array((0, 384), (25129, 384), (12565, 192)),
        array((25129, 0), (25128, 768), (12564, 768)),
    ]
    layout = Layout((50257, 768), arrays, parse_box("0:100, 192:400", (50257, 768)))
    assert shown(layout) == dedent("""\
              0               384     576   768
            0 ┏━━━━━━━━━━━━━━━┳━━━━━━━┯━━━━━━━┓
              ┃░░░░░░ 0 ▓▓▓▓▓▓┃▓░░░ 1 │       ┃
        12565 ┠───────────────╂───────┼───────┨
              ┃               ┃       │       ┃
        25129 ┣━━━━━━━━━━━━━━━┻━━━━━━━┷━━━━━━━┫
              ┃               2               ┃
        37693 ┠───────────────────────────────┨
              ┃                               ┃
        50257 ┗━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┛
        each axis has its own scale
        ▓ wanted, ░ read with it""")


def test_one_dimension_is_a_strip() -> None:
    layout = Layout((1000,), whole((1000,), (300,)), Box((250,), (100,)))
    assert shown(layout) == dedent("""\
        0       300     600     1000
        ┏━━━━━━━┯━━━━━━━┯━━━━━━━┯━━┓
        ┃░░░░░░▓│▓░░░░░░│       │  ┃
        ┗━━━━━━━┷━━━━━━━┷━━━━━━━┷━━┛
        ▓ wanted, ░ read with it""")


def test_three_dimensions_show_the_two_slowest_that_are_cut() -> None:
    layout = Layout((12, 64, 64), whole((12, 64, 64), (6, 64, 32)), None)
    assert shown(layout) == dedent("""\
           0                     32                  64
         0 ┏━━━━━━━━━━━━━━━━━━━━━┯━━━━━━━━━━━━━━━━━━━━┓
           ┃                     │                    ┃
         6 ┠─────────────────────┼────────────────────┨
           ┃                     │                    ┃
        12 ┗━━━━━━━━━━━━━━━━━━━━━┷━━━━━━━━━━━━━━━━━━━━┛
        dimension 0 down, dimension 2 across
        dimension 1 is whole: [0, 64)""")


def test_three_dimensions_that_are_cut_show_the_layer_of_the_slice() -> None:
    shape = (4, 4, 4)
    arrays = [array((0, 0, k), (4, 4, 2), (4 - 2 * (k // 2), 2, 1)) for k in (0, 2)]
    layout = Layout(shape, arrays, parse_box("3, :, 2", shape))
    assert shown(layout) == dedent("""\
          0           2           4
        0 ┏━━━━━━━━━━━┯━━━━━━━━━━━┓
          ┃           │           ┃
          ┃           │           ┃
          ┃           │           ┃
          ┃           │           ┃
          ┃         1 │           ┃
        2 ┠───────────┼───────────┨
          ┃░░░░░░░░░░░│░░░░░░░░░░░┃
          ┃░░░░░░░░░░░│░░░░░░░░░░░┃
          ┃▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓┃
          ┃▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓┃
          ┃▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓┃
        4 ┗━━━━━━━━━━━┷━━━━━━━━━━━┛
        dimension 0 down, dimension 1 across
        dimension 2, [0, 4) in chunks of 1, is drawn at 2
        1 of 2 pieces lie there
        ▓ wanted, ░ read with it""")


def test_chunks_and_pieces_that_are_too_thin() -> None:
    rows = [(0, 2), *((n, n + 1) for n in range(2, 20)), (20, 100)]
    arrays = [array((a, 0), (b - a, 640), (1, 640)) for a, b in rows]
    layout = Layout((100, 640), arrays, Box((18, 0), (32, 640)))
    assert shown(layout, height=10) == dedent("""\
            0                     640
          0 ┏━━━━━━━━━━━━━━━━━━━━━━━┓
            ┃░░░░░░░░░░░░░░░░░░░░░░░┃
         20 ┣━━━━━━━━━━━━━━━━━━━━━━━┫
            ┃▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓┃
         45 ┠───────────────────────┨
            ┃▓▓▓▓▓▓▓▓▓ 19 ▓▓▓▓▓▓▓▓▓▓┃
         70 ┠───────────────────────┨
            ┃                       ┃
        100 ┗━━━━━━━━━━━━━━━━━━━━━━━┛
        each axis has its own scale
        along dimension 0 a cell of the picture is up to 30 chunks
        · 19 pieces too thin for an outline
        ▓ wanted, ░ read with it""")


def test_a_cell_that_is_two_chunks() -> None:
    layout = Layout((100,), whole((100,), (2,)), None)
    assert shown(layout).endswith("along dimension 0 a cell of the picture is up to 2 chunks")
    assert "cell" not in shown(layout, width=101)


def test_pieces_have_colours_and_labels_are_dim() -> None:
    arrays = [array((n, 0), (1, 9), (1, 9)) for n in range(2)]
    _, _, *lines = draw(Layout((2, 9), arrays, None)).lines
    console = Console(force_terminal=True, width=80, _environ={"TERM": "xterm-256color"})
    styles = [
        {(part.text.strip(), str(part.style)) for part in line.render(console) if part.text.strip()}
        for line in lines
    ]
    found = {pair for pairs in styles for pair in pairs}
    assert {("0", "bold cyan"), ("1", "bold magenta"), ("1", "dim")} <= found
    assert all(style != "dim" or text.isdigit() for text, style in found)


def test_nothing_to_draw_is_said_in_words() -> None:
    assert shown(Layout((), whole((), ()), None)) == "a scalar, in one chunk"
    assert shown(Layout((0, 4), whole((0, 4), (1, 4)), None)) == "no elements, so no chunks"


def test_pieces_without_elements_are_not_drawn() -> None:
    arrays = [array((0,), (4,), (4,)), array((4,), (0,), (1,))]
    assert "1 of 2 pieces lie there" in shown(Layout((4,), arrays, None))


def test_a_drawing_needs_some_room() -> None:
    for size in ({"width": 23}, {"height": 5}):
        with pytest.raises(ValueError, match="24 x 6 characters at least"):
            draw(Layout((4,), whole((4,), (2,)), None), **size)
