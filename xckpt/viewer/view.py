"""What one looks at: a checkpoint or a run, as a page, a file, a notebook's cell, or served.

`CheckpointView` holds what is open and makes the description of the page once; values are read when
they are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from xckpt.core.text.printable import printable
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.stored_array import StoredArray
from xckpt.viewer.leaves import checkpoint_page
from xckpt.viewer.model import Page
from xckpt.viewer.page import page_html
from xckpt.viewer.plan.load import plan_shown
from xckpt.viewer.plan.mesh_text import reader_mesh
from xckpt.viewer.plan.shown import PlanShown
from xckpt.viewer.values import PlaneValues, plane_values

Opener = Callable[[str], Checkpoint]
"""Opens the checkpoint at a path; see `xckpt.open`."""

CELL: Final = 16 << 20
"""Bytes of a page that a notebook shows in a cell, at most."""


class CheckpointView:
    """A checkpoint to look at; see `xckpt.view`.

    Args:
        path: where it is.
        open: opens checkpoints.
        plan: a mesh and specs that a load is planned for.
    """

    def __init__(self, path: str | os.PathLike[str], open: Opener, plan: str = "") -> None:
        self.path = os.fspath(path)
        self._open, self._plan = open, plan

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, open."""
        return self._open(self.path)

    @cached_property
    def page(self) -> Page:
        """The description of the page."""
        checkpoint = self.checkpoint
        shown = printable(self.path)
        return Page(
            f"{shown} - xckpt",
            shown,
            checkpoint.format,
            checkpoint=checkpoint_page(checkpoint.manifest),
            plan=self.plan(self._plan) if self._plan else None,
        )

    def plan(self, text: str) -> PlanShown:
        """The plan of a load with another mesh; `xckpt.viewer.plan.mesh_text` says how to write it.

        Raises:
            ValueError: the text says nothing that can be planned for.
        """
        return plan_shown(self.checkpoint.manifest, reader_mesh(text), text)

    def html(self, *, served: bool = False) -> str:
        """The page as one HTML file.

        Args:
            served: whether a server answers questions about values.
        """
        return page_html(msgspec.structs.replace(self.page, served=served))

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the page to a file, which needs nothing else.

        Raises:
            OSError: it cannot be written.
        """
        Path(file).write_text(self.html(), encoding="utf-8")

    def values(self, leaf: int, down: int | None, across: int | None, at: list[int]) -> PlaneValues:
        """The values of a plane of the leaf of a number; see `plane_values`.

        Raises:
            ValueError: there is no such plane.
        """
        names = [entry.name for entry in self.checkpoint.manifest.leaves]
        if not 0 <= leaf < len(names):
            raise ValueError(f"there is no leaf {leaf}")
        stored = self.checkpoint[names[leaf]]
        if not isinstance(stored, StoredArray):
            raise ValueError(f"{names[leaf]} is no tensor")
        return plane_values(stored, down, across, at)

    def _repr_html_(self) -> str:
        """A notebook's cell: the page in a frame of its own, which may run its scripts alone."""
        html = self.html()
        if len(html) > CELL:
            return f"<p>{escape(self.page.path)}: too long for a cell; save it with .save(file)</p>"
        title = escape(self.page.title, quote=True)
        style = "width: 100%; height: 560px; border: 1px solid"
        return (
            f'<iframe title="{title}" style="{style}" sandbox="allow-scripts" '
            f'srcdoc="{escape(html, quote=True)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<CheckpointView of {printable(self.path)}>"
