"""A view of a checkpoint or a run: as a page, a file, a notebook's cell, or served.

`CheckpointView` holds what is open and makes the description of the page once; values are read when
they are asked for.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from xckpt.core.run.record import StepRecord
from xckpt.core.text.printable import printable
from xckpt.errors import NotACheckpointError
from xckpt.storage.budget import Watcher
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.contents.differences import differences
from xckpt.storage.location import Location
from xckpt.viewer.diff import diff_page
from xckpt.viewer.leaves import checkpoint_page
from xckpt.viewer.model import CheckpointPage, DiffPage, Page
from xckpt.viewer.page import page_html
from xckpt.viewer.picture.plane import leaf_picture
from xckpt.viewer.picture.plot import figure_of
from xckpt.viewer.picture.svg import svg
from xckpt.viewer.plan.load import plan_shown
from xckpt.viewer.plan.mesh_text import reader_mesh
from xckpt.viewer.plan.shown import PlanShown
from xckpt.viewer.run import is_run, run_shown, shared_by_leaf, steps_at

if TYPE_CHECKING:
    from xckpt.viewer.picture.plot import Figure

Opener = Callable[[str], Checkpoint]
"""Opens the checkpoint at a path; see `xckpt.open`."""

PICTURES: Final = (".svg", ".png", ".pdf", ".jpg", ".webp")
"""Endings of files that hold the picture of one leaf."""
CELL: Final = 16 << 20
"""Bytes of a page that a notebook shows in a cell, at most."""
FRAME: Final = (
    '<iframe title="{title}" style="width: 100%; height: 560px; border: 1px solid" '
    'sandbox="allow-scripts" srcdoc="{page}"></iframe>'
)
"""What a notebook's cell holds."""


class CheckpointView:
    """A checkpoint or a run to look at; see `xckpt.view`.

    Args:
        path: where it is.
        open: opens checkpoints.
        plan: a mesh and specs that a load is planned for.
        diff: where another checkpoint is, to compare with.
        beside: where the other steps of its run are, of a step.
        progress: called with the progress of the comparison with ``diff``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        open: Opener,
        *,
        plan: str = "",
        diff: str = "",
        beside: Sequence[str] = (),
        progress: Watcher = None,
    ) -> None:
        self.path: str = os.fspath(path)
        self._open, self._plan, self._other = open, plan, diff
        self._beside, self._progress = beside, progress
        self._seen: dict[str, CheckpointView] = {}
        self.token: str = secrets.token_hex(8)
        """Identifies this look at the path; later ones may have other leaves."""

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, open."""
        return self._open(self.path)

    @cached_property
    def page(self) -> Page:
        """The description of the page: of the checkpoint, or of the run, that is at the path."""
        shown = printable(self.path)
        page = Page(f"{shown} - xckpt", shown)
        try:
            checkpoint = self.checkpoint
        except NotACheckpointError:
            if not self.steps or self._plan or self._other:
                raise
            checkpoint = None
        if checkpoint is None or is_run(checkpoint.format, lambda: self.steps):
            steps, once = run_shown(self.path, self.steps)
            return msgspec.structs.replace(page, run=steps, shared_once=once)
        beside = tuple(map(printable, self._beside))
        plan = self.plan(self._plan) if self._plan else None
        diff = self.diff(self._other, self._progress) if self._other else None
        about = {"format": checkpoint.format, "checkpoint": self._described, "beside": beside}
        return msgspec.structs.replace(page, **about, plan=plan, diff=diff)

    def again(self) -> CheckpointView:
        """What is at the path now: this view while that is the same, else another one.

        Raises:
            NotACheckpointError: nothing is there any more.
        """
        now = copy(self)
        now._progress, now.token = self._progress, secrets.token_hex(8)
        for cached in ("checkpoint", "page", "steps", "_described"):
            now.__dict__.pop(cached, None)
        has_run = None in (now.page.checkpoint, self.page.checkpoint)  # its steps are asked later
        return now if has_run or now.checkpoint.manifest != self.checkpoint.manifest else self

    @cached_property
    def steps(self) -> list[StepRecord]:
        """The steps of the run at the path, by number; none if no run is there."""
        return steps_at(self.path)

    def step(self, name: str, *, refresh: bool = False) -> CheckpointView:
        """A step of the run, to look at.

        Args:
            name: of its folder.
            refresh: look whether it is still what it was.

        Raises:
            ValueError: the run has no step of that folder name.
            NotACheckpointError: it has been deleted.
        """
        if name not in [record.name for record in self.steps]:
            raise ValueError(f"the run has no step {printable(name)!r}")
        if refresh and name in self._seen:
            self._seen[name] = self._seen[name].again()
        elif name not in self._seen:
            root = Location.parse(self.path)
            beside = [str(root.within(each.name)) for each in self.steps if each.name != name]
            self._seen[name] = CheckpointView(str(root.within(name)), self._open, beside=beside)
        return self._seen[name]

    @cached_property
    def _described(self) -> CheckpointPage:
        return checkpoint_page(self.checkpoint.manifest, shared_by_leaf(self.checkpoint))

    def diff(self, other: str, progress: Watcher = None) -> DiffPage:
        """What differs between the checkpoint and another, contents included.

        Args:
            other: where the other one is.
            progress: called with the bytes that are compared.

        Raises:
            NotACheckpointError: it is not a checkpoint.
            CorruptCheckpointError: a chunk that was compared is not what was saved.
        """
        opened = self._open(other)
        found = differences(self.checkpoint, opened, values=True, progress=progress)
        return diff_page(other, found, self._described, checkpoint_page(opened.manifest))

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
        token = self.token if served else ""
        return page_html(msgspec.structs.replace(self.page, served=served, token=token))

    def save(self, file: str | os.PathLike[str], leaf: str | None = None) -> None:
        """Write the page to a file, which needs nothing else, or the picture of a leaf.

        Args:
            file: where to. Without a leaf it is HTML; with one, the name ends with ``.svg``, or
                with ``.png``, ``.pdf``, ``.jpg`` or ``.webp``, which matplotlib draws.
            leaf: the tensor to draw; `svg` and `figure` choose a plane of it.

        Raises:
            OSError: it cannot be written.
            ValueError: there is no such tensor, or the ending does not fit.
            ImportError: matplotlib is not installed (``pip install "xckpt[plot]"``).

        Example:
            >>> import numpy as np, xckpt
            >>> _ = xckpt.save("memory://view-save", {"w": np.zeros((4, 8))})
            >>> xckpt.view("memory://view-save").save("w.svg", leaf="w")
        """
        kind = Path(file).suffix.lower()
        if leaf is None and kind in PICTURES:
            raise ValueError(f"a {kind} file shows one leaf: save(file, leaf=name)")
        if leaf is None:
            Path(file).write_text(self.html(), encoding="utf-8")
        elif kind == ".svg":
            Path(file).write_text(self.svg(leaf), encoding="utf-8")
        elif kind in PICTURES:
            self.figure(leaf).savefig(file)
        else:
            raise ValueError(f"{os.fspath(file)}: a leaf is drawn to {', '.join(PICTURES)}")

    def svg(
        self,
        name: str,
        down: int | None = None,
        across: int | None = None,
        at: Sequence[int] | None = None,
    ) -> str:
        """The picture of a tensor as SVG, for a document.

        Args:
            name: the tensor's name.
            down: the dimension down; by default, with ``across``, the slowest two that are cut.
            across: the dimension across.
            at: a position in each dimension, for those that are not drawn; by default the first.

        Raises:
            ValueError: there is no such tensor, or no such plane of it, or more chunks than can
                be drawn lie there.
        """
        return svg(leaf_picture(self.checkpoint.manifest, name, down, across, at))

    def figure(
        self,
        name: str,
        down: int | None = None,
        across: int | None = None,
        at: Sequence[int] | None = None,
    ) -> Figure:
        """The picture of a tensor as a `matplotlib.figure.Figure`, with the arguments of `svg`.

        Raises:
            ValueError: as `svg` does.
            ImportError: matplotlib is not installed (``pip install "xckpt[plot]"``).
        """
        return figure_of(leaf_picture(self.checkpoint.manifest, name, down, across, at))

    def _repr_html_(self) -> str:
        """A notebook's cell: the page in a frame of its own, which may run its scripts alone."""
        html = self.html()
        if len(html) > CELL:
            return f"<p>{escape(self.page.path)}: too long for a cell; save it with .save(file)</p>"
        return FRAME.format(
            title=escape(self.page.title, quote=True), page=escape(html, quote=True)
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_progress": None}  # it is shown where the view was made

    def __repr__(self) -> str:
        return f"<CheckpointView of {printable(self.path)}>"
