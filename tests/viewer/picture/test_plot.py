"""Figures of random leaves: patches are the boxes of the plan, and colours fill them."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from click.testing import CliRunner, Result

import xckpt
from tests.viewer.grids import random_grids
from xckpt.cli.commands import commands
from xckpt.core.manifest.entries import TensorEntry
from xckpt.core.metadata import Sharding
from xckpt.viewer.picture import plot
from xckpt.viewer.picture.plane import COLOURS, PicturePlane, picture_of
from xckpt.viewer.picture.plot import figure_of

if TYPE_CHECKING:  # each worker would import it, for half a second, where one runs these tests
    from matplotlib.figure import Figure

MESH = Sharding(axes=(("data", 2), ("model", 4)), spec=(("data",), ("model",)))


def patches(figure: Figure) -> dict[str, dict[tuple[float, ...], str | None]]:
    """Kind -> place -> hatch; no rectangle lies there twice."""
    from matplotlib.patches import Rectangle

    kinds = ("chunk", "unit", "array", "shard")
    found: dict[str, dict[tuple[float, ...], str | None]] = {kind: {} for kind in kinds}
    for patch in figure.axes[0].patches:
        assert isinstance(patch, Rectangle)
        place = (*patch.get_xy(), patch.get_width(), patch.get_height())
        layer = found[str(patch.get_gid())]
        assert place not in layer
        layer[place] = patch.get_hatch()
    return found


def test_patches_are_the_boxes_of_the_plan() -> None:
    manifest, expected = random_grids(seed=4, count=40)
    for entry, drawn in zip(manifest.leaves, expected, strict=True):
        assert isinstance(entry, TensorEntry)
        plane = PicturePlane.of(entry, drawn.down, drawn.across, drawn.at)
        found = patches(figure_of(picture_of(entry, plane)))
        assert set(found["chunk"]) == drawn.chunks
        assert set(found["unit"]) == drawn.units
        assert set(found["array"]) == drawn.arrays
        shards = drawn.shards or {}
        assert found["shard"].keys() == shards.keys()
        assert {place for place, hatch in found["shard"].items() if hatch} == {
            place for place, devices in shards.items() if " " in devices
        }


def test_the_areas_of_the_colours_are_those_of_the_shards(tmp_path: Path) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    entry = TensorEntry("w", "int8", (60, 120), (30, 30), sharding=MESH)
    figure_of(picture_of(entry, PicturePlane.of(entry))).savefig(tmp_path / "w.png")
    pixels = np.round(imread(tmp_path / "w.png")[..., :3] * 255).astype(int)
    counted = Counter(map(tuple, pixels.reshape(-1, 3).tolist()))
    areas = [counted[tuple(round(255 * part) for part in to_rgb(colour))] for colour in COLOURS]
    # 640 x 320 pixels in eight parts; lines and numbers take some.
    assert min(areas) > 0.85 * 640 * 320 / 8
    assert max(areas) <= 640 * 320 / 8


def test_names_are_no_formulas() -> None:
    entry = TensorEntry(r"$\frac$ _^", "int8", (2, 2), (2, 2))
    figure = figure_of(picture_of(entry, PicturePlane.of(entry)))
    figure.canvas.draw()
    assert [text.get_text() for text in figure.texts] == [r"$\frac$ _^"]


def test_a_view_saves_what_the_ending_says(tmp_path: Path) -> None:
    xckpt.save("memory://test-plot", {"w": np.zeros((4, 6)), "step": 3})
    view = xckpt.view("memory://test-plot")
    starts = {"a.png": b"\x89PNG", "a.PDF": b"%PDF", "a.svg": b"<svg"}
    for name, start in starts.items():
        view.save(tmp_path / name, leaf="w")
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"a .png file shows one leaf: save\(file, leaf=name\)"):
        view.save(tmp_path / "b.png")
    with pytest.raises(ValueError, match=r"b\.html: a leaf is drawn to \.svg, \.png"):
        view.save(tmp_path / "b.html", leaf="w")
    with pytest.raises(ValueError, match="has no tensor 'step'"):
        view.save(tmp_path / "b.png", leaf="step")
    assert {path.name for path in tmp_path.iterdir()} == set(starts)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": np.zeros((4, 6))})
    found = importlib.util.find_spec
    monkeypatch.setattr(
        plot.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    with pytest.raises(ImportError, match=r'pip install "xckpt\[plot\]"'):
        xckpt.view(tmp_path / "ckpt").figure("w")
    done = draw_by_command(tmp_path, "w.png")
    assert (done.exit_code, done.stdout) == (2, "")
    assert 'pip install "xckpt[plot]"' in done.stderr
    assert draw_by_command(tmp_path, "w.svg").exit_code == 0


def draw_by_command(folder: Path, name: str) -> Result:
    arguments = ["view", str(folder / "ckpt"), "--leaf", "w", "--output", str(folder / name)]
    return CliRunner().invoke(commands, arguments)


def test_the_command_draws_a_leaf(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": np.zeros((4, 6))})
    assert draw_by_command(tmp_path, "w.png").exit_code == 0
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    for arguments, words in (
        (["--leaf", "x", "-o", "x.png"], "has no tensor 'x'"),
        (["-o", "x.png"], "add --leaf NAME"),
        (["--leaf", "w"], "add --output"),
        (["--leaf", "w", "-o", "/nowhere/x.png"], "cannot be written"),
    ):
        done = CliRunner().invoke(commands, ["view", str(tmp_path / "ckpt"), *arguments])
        assert done.exit_code == 2
        assert words in done.stderr
