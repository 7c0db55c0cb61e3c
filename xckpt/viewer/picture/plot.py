"""A picture as a figure of matplotlib, which is imported here alone: for PNG, PDF, notebooks.

The figure belongs to no window: it is made without `matplotlib.pyplot`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from xckpt.core.text.printable import printable
from xckpt.viewer.picture.plane import COLOURS, Picture
from xckpt.viewer.picture.svg import has_room, size_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI: Final = 100
_MARGIN: Final = 0.6
"""Inches around the picture, for the title and the numbers of the axes."""


def figure_of(picture: Picture) -> Figure:
    """The picture as a figure; its patches have the elements as their units.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise ImportError(
            'PNG and PDF files are drawn by matplotlib: pip install "xckpt[plot]"; SVG and HTML '
            "files need nothing",
            name="matplotlib",
        )
    from matplotlib.figure import Figure

    width, height = size_of(picture)
    inches = width / _DPI + 2 * _MARGIN, height / _DPI + 2 * _MARGIN
    figure = Figure(figsize=inches, dpi=_DPI)
    across, down = _MARGIN / inches[0], _MARGIN / inches[1]
    axes = figure.add_axes((across, down, 1 - 2 * across, 1 - 2 * down))
    _add_patches(axes, picture)
    for shard in picture.shards:
        if has_room(shard, (width / picture.columns, height / picture.rows)):
            x, y, columns, rows = shard.place
            halo = {"facecolor": "#ffffff99", "edgecolor": "none", "pad": 1.5}
            middle = {"ha": "center", "va": "center", "fontweight": "bold", "bbox": halo}
            axes.text(x + columns / 2, y + rows / 2, shard.label, **middle)
    axes.set(xlim=(0, picture.columns), ylim=(picture.rows, 0))
    axes.set(xticks=(0, picture.columns), yticks=(0, picture.rows) if picture.rows > 1 else ())
    axes.xaxis.tick_top()
    axes.set_frame_on(False)
    # What looks like TeX in a name stays what it is.
    figure.text(0.5, 0.03, printable(picture.name), ha="center", parse_math=False)
    return figure


def _add_patches(axes: Axes, picture: Picture) -> None:
    """The rectangles; the `gid` of a patch says what it is."""
    from matplotlib.patches import Rectangle

    for shard in picture.shards:
        x, y, columns, rows = shard.place
        patch = Rectangle((x, y), columns, rows, gid="shard", clip_on=False)
        patch.set(facecolor=COLOURS[shard.devices[0] % len(COLOURS)], edgecolor="#1b1f24")
        if len(shard.devices) > 1:
            patch.set_hatch("////")
        axes.add_patch(patch)
    for kind, places, line, dashes in (
        ("chunk", picture.chunks, 0.8, "dashed"),
        ("unit", picture.units, 1.4, "solid"),
        ("array", picture.arrays, 2.4, "solid"),
    ):
        for x, y, columns, rows in places:
            patch = Rectangle((x, y), columns, rows, gid=kind, fill=False, clip_on=False)
            patch.set(linewidth=line, linestyle=dashes, edgecolor="#1b1f24")
            axes.add_patch(patch)
