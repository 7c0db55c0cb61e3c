"""What `xckpt info` prints of a whole checkpoint: facts, and a line for each container and leaf.

A terminal gets a rich table of the cells; a pipe gets them in plain columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xckpt.cli.listing import ROOT, shape_text
from xckpt.cli.render.columns import columns
from xckpt.cli.report import (
    CheckpointReport,
    LeafReport,
    TreeRow,
    counted,
    holdings,
    tree_rows,
)
from xckpt.core.text.printable import printable
from xckpt.core.text.shown import readable_bytes

TREE_COLUMNS: Final = ("leaf", "dtype", "shape or value", "size", "chunk", "chunks", "saved as")
"""The titles of `tree_cells`."""

LONGEST: Final = 40
"""Most characters of a value in the tree."""


def checkpoint_facts(report: CheckpointReport) -> list[tuple[str, str]]:
    """(what, fact) of a checkpoint as a whole.

    Example:
        >>> checkpoint_facts(CheckpointReport("ckpt", 0, 1, 0, 0, {"run": 3}, {}, ()))
        [('checkpoint', 'ckpt'), ('holds', '0 tensors and 1 value, 0 B in 0 chunks'),
         ('user metadata', "{'run': 3}")]
    """
    facts = [("checkpoint", report.path), ("holds", holdings(report))]
    if report.user_metadata is not None:
        facts.append(("user metadata", repr(report.user_metadata)))
    return facts


def checkpoint_lines(report: CheckpointReport) -> Iterator[str]:
    """The facts and the tree, for a pipe.

    Example:
        >>> step = LeafReport("step", "value", "int", None, 0, "manifest", value="7")
        >>> for line in checkpoint_lines(CheckpointReport("ckpt", 0, 1, 0, 0, None, {}, (step,))):
        ...     print(line)
        checkpoint  ckpt
        holds       0 tensors and 1 value, 0 B in 0 chunks
        <BLANKLINE>
        leaf  dtype  shape or value  size  chunk  chunks  saved as
        step  int    7
    """
    facts = ((name, printable(fact)) for name, fact in checkpoint_facts(report))
    yield from columns(facts)
    yield ""
    cells = [tree_cells(row) for row in tree_rows(report.leaves, report.containers)]
    yield from columns([TREE_COLUMNS, *cells], right=[3, 5])


def tree_cells(row: TreeRow) -> tuple[str, ...]:
    """A container or a leaf, in the order of `TREE_COLUMNS`.

    Example:
        >>> step = LeafReport("opt/step", "value", "int", None, 0, "manifest", value="7")
        >>> tree_cells(TreeRow(1, "step", "", 0, 0, step))
        ('  step', 'int', '7', '', '', '', '')
    """
    label = "  " * row.depth + printable(row.label or ROOT)
    leaf = row.leaf
    if leaf is None:
        kind = printable(row.kind.partition(":")[0])
        size = readable_bytes(row.bytes) if row.chunks else ""
        return label, kind, "", size, "", str(row.chunks or ""), ""
    shape = printable(shortened(leaf.value, LONGEST)) if leaf.value else shape_text(leaf.shape)
    size = "" if leaf.layout == "manifest" else readable_bytes(leaf.bytes)
    chunks = str(leaf.chunks) if leaf.arrays else ""
    saved = printable(str(leaf.sharding)) if leaf.sharding else ""
    return label, leaf.dtype, shape, size, _chunk(leaf), chunks, saved


def shortened(text: str, longest: int) -> str:
    """A text, or its beginning and how long it is.

    Example:
        >>> shortened("a long value", 6)
        'a long... (12 characters)'
    """
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def _chunk(leaf: LeafReport) -> str:
    if leaf.layout == "pieces":
        return counted(len(leaf.arrays), "piece")
    return shape_text(leaf.arrays[0].chunk) if leaf.arrays else ""
