"""Shards in characters: each character shows the shard that owns the element in its middle."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.support.examples import examples
from tests.viewer.grids import Drawn, random_grids
from xckpt.cli.commands import commands
from xckpt.cli.render.draw import Drawing
from xckpt.cli.render.shards import SIGNS, draw_shards
from xckpt.cli.render.tables import shard_drawing
from xckpt.core.manifest.entries import TensorEntry
from xckpt.core.metadata import Sharding
from xckpt.viewer.picture.plane import COLOURS, Picture, PicturePlane, shards_of

MESH = (("data", 2), ("model", 4))


def pictures(seed: int) -> list[tuple[Drawn, Picture]]:
    """Sharded leaves of 0 to 5 dimensions, with what NumPy has painted of them."""
    manifest, expected = random_grids(seed, count=6)
    found = []
    for entry, drawn in zip(manifest.leaves, expected, strict=True):
        assert isinstance(entry, TensorEntry)
        plane = PicturePlane.of(entry, drawn.down, drawn.across, drawn.at)
        found.append((drawn, shards_of(entry, plane)))
    return found


def body(drawing: Drawing, picture: Picture) -> list[list[tuple[str, str]]]:
    """(sign, style) of each character of the map: labels above and at the left are left out."""
    margin = len(str(picture.rows)) + 1 if picture.rows > 1 else 0
    rows = []
    for line in drawing.lines[1:]:
        styles = [""] * len(line.plain)
        for span in line.spans:
            styles[span.start : span.end] = [str(span.style)] * (span.end - span.start)
        rows.append(list(zip(line.plain, styles, strict=True))[margin:])
    return rows


def painted(drawn: Drawn, picture: Picture) -> np.ndarray:
    """For each element of the plane the devices that hold it, as text."""
    plane = np.full((picture.rows, picture.columns), "", dtype=object)
    for (x, y, width, height), devices in (drawn.shards or {}).items():
        plane[y : y + height, x : x + width] = devices
    return plane


sizes = st.tuples(st.integers(24, 100), st.integers(6, 40))


@examples(20)
@given(st.integers(0, 10_000), sizes)
def test_each_character_shows_the_shard_that_owns_its_middle(
    seed: int, size: tuple[int, int]
) -> None:
    for drawn, picture in pictures(seed):
        drawing = draw_shards(picture, width=size[0], height=size[1])
        assert max(len(line.plain) for line in drawing.lines) <= size[0]
        assert len(drawing.lines) <= size[1]
        rows, plane = body(drawing, picture), painted(drawn, picture)
        labels = {shard.label for shard in picture.shards}
        for i, row in enumerate(rows):
            line = "".join(sign for sign, _ in row)
            for j, (sign, style) in enumerate(row):
                y = (2 * i + 1) * picture.rows // (2 * len(rows))
                x = (2 * j + 1) * picture.columns // (2 * len(row))
                devices = [int(each) for each in plane[y, x].split()]
                if not devices:
                    assert sign == " "
                    continue
                assert style == f"black on {COLOURS[devices[0] % len(COLOURS)]}"
                in_label = any(f" {label} " in line for label in labels) and sign in " +0123456789"
                signs = SIGNS[devices[0] % len(SIGNS)] + ("+" if len(devices) > 1 else "")
                assert sign in signs or in_label


@examples(20)
@given(st.integers(0, 10_000), sizes)
def test_it_is_to_scale_or_says_that_it_is_not(seed: int, size: tuple[int, int]) -> None:
    for _, picture in pictures(seed):
        drawing = draw_shards(picture, width=size[0], height=size[1])
        rows = body(drawing, picture)
        across, down = len(rows[0]) / picture.columns, 2 * len(rows) / picture.rows
        # Whole characters: half of one may be lacking or too much at each side.
        even = abs(across - down) <= across / len(rows[0]) + down / len(rows)
        assert even or picture.rows == 1 or "each axis has its own scale" in drawing.notes


def test_replicas_are_told_apart() -> None:
    sharding = Sharding(axes=MESH, spec=((), ("model",)))
    entry = TensorEntry("w", "int8", (4, 32), (4, 8), sharding=sharding)
    drawing = draw_shards(shards_of(entry, PicturePlane.of(entry)), width=34)
    lines = [line.plain for line in drawing.lines]
    assert lines[1] == "0 0+0+0+0+1+1+1+1+2+2+2+2+3+3+3+3+"
    assert " 0 +1 " in lines[2] and " 3 +1 " in lines[2]


def test_shards_too_thin_are_counted() -> None:
    sharding = Sharding(axes=(("a", 1000),), spec=(("a",),))
    entry = TensorEntry("w", "int8", (1000,), (1,), sharding=sharding)
    drawing = draw_shards(shards_of(entry, PicturePlane.of(entry)), width=50)
    assert "950 of 1,000 shards too thin for a character" in drawing.notes


def test_one_device_and_none_are_not_drawn() -> None:
    alone = Sharding(axes=(("a", 1),), spec=((),))
    for sharding, shape in ((None, (4,)), (alone, (4,)), (alone, (0,))):
        assert shard_drawing(TensorEntry("w", "int8", shape, (4,), sharding=sharding)) is None


def printed(terminal: bool, environ: dict[str, str]) -> str:
    sharding = Sharding(axes=MESH, spec=(("data",), ("model",)))
    entry = TensorEntry("w", "int8", (8, 32), (4, 8), sharding=sharding)
    screen = io.StringIO()
    console = Console(
        file=screen,
        force_terminal=terminal,
        width=80,
        _environ={"TERM": "xterm-256color", **environ},
    )
    drawing = shard_drawing(entry, width=40)
    assert drawing is not None
    console.print(drawing)
    return screen.getvalue()


def test_colours_are_off_by_no_color() -> None:
    plain = printed(False, {})
    assert "\x1b" not in plain
    assert "0000000011111111" in plain.replace(" ", "")
    coloured, without = printed(True, {}), printed(True, {"NO_COLOR": "1"})
    assert ";48;5;" in coloured
    assert ";48;" not in without and "[30" not in without
    assert Text.from_ansi(without).plain.split() == Text.from_ansi(coloured).plain.split()


def test_info_draws_the_shards(tmp_path: Path) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import xckpt

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "data", "model"))
    state = {"w": jax.device_put(np.zeros((3, 16, 32), np.float32), sharding), "v": np.zeros(4)}
    xckpt.save(tmp_path / "ckpt", state)
    arguments = ["info", str(tmp_path / "ckpt"), "w", "--box", "2"]
    output = CliRunner().invoke(commands, arguments).stdout
    assert "dimension 1 down, dimension 2 across\ndimension 0 is cut open at 2\n" in output
    assert "0000000011111111" in output.replace(" ", "")
    assert (
        "shards" not in CliRunner().invoke(commands, ["info", str(tmp_path / "ckpt"), "v"]).stdout
    )


@pytest.mark.parametrize("colour", COLOURS)
def test_black_is_read_on_every_colour(colour: str) -> None:
    style = Style.parse(f"black on {colour}")
    assert style.bgcolor == Color.parse(colour)
    red, green, blue = Color.parse(colour).get_truecolor()
    assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 140
