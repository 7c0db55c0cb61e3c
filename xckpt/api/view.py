"""`view`: a checkpoint as a page for a browser or a notebook."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xckpt.api.open import open
from xckpt.api.save import Path, check_path, names_limits
from xckpt.core.text.arguments import wrong_argument
from xckpt.options import LoadOptions, checked_options, with_progress

if TYPE_CHECKING:
    from xckpt.storage.checkpoint import Checkpoint
    from xckpt.viewer.view import CheckpointView


@names_limits
def view(
    path: Path, *, plan: str = "", diff: Path | None = None, options: LoadOptions | None = None
) -> CheckpointView:
    """Look at a checkpoint: its tree, and how each leaf lies in shards and chunks, to scale.

    For the root of a run it shows the steps: their metrics, their own and shared bytes, and the
    rule that keeps each.

    In a notebook the result shows itself. ``save`` writes one HTML file that needs nothing else,
    or the picture of one leaf as SVG, PNG or PDF. It pickles, with all that was read for the page.
    From a terminal, ``xckpt view PATH`` shows the same in a browser, with values of slices.

    Args:
        path: where a checkpoint is, of any format that `open` reads, or the root of a run.
        plan: a mesh and specs of a reader, such as ``"data, model on data=2 x model=4"``: the page
            then shows who reads which chunks for whom, and how many unwanted bytes.
        diff: another checkpoint; the page then lists all that differs, contents included. Digests
            tell where both are cut into the same chunks; else both are read.
        options: threads, memory, and the progress of the comparison with ``diff``.

    Raises:
        NotACheckpointError: neither a checkpoint nor a run is at the path, or a run is there and
            ``plan`` or ``diff`` are about one of its steps.
        ManifestError: the manifest cannot be trusted.
        TypeError: an argument makes no sense; it is named.
        ValueError: the plan cannot be understood.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://view", {"w": np.zeros((4, 8)), "step": 3})
        >>> view = xckpt.view("memory://view")
        >>> view
        <CheckpointView of memory://view>
        >>> view.save("view.html")
    """
    check_path(path, "view(path)")
    if not isinstance(plan, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise wrong_argument("view", "plan", "a mesh and specs, as text", plan)
    options = checked_options(options, LoadOptions, "view")
    from xckpt.viewer.view import CheckpointView

    if diff is not None:
        check_path(diff, "view(diff=)")
    other = "" if diff is None else os.fspath(diff)
    with with_progress(options, "compare", rank=0) as chosen:
        seen = CheckpointView(
            path,
            _Opener(options),
            plan=plan,
            diff=other,
            progress=chosen.progress,
        )
        seen.page  # noqa: B018  Faults show themselves now.
    return seen


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens checkpoints for a view; it pickles, without the functions that are for this process."""

    options: LoadOptions

    def __call__(self, path: str) -> Checkpoint:
        return open(path, options=self.options)

    def __reduce__(self) -> tuple[object, ...]:
        return _Opener, (replace(self.options, progress=None, metrics=None),)
