"""Pieces of a leaf, in columns."""

from __future__ import annotations

from tests.support.steps import steps
from xckpt.core.manifest.pieces import Pieces


def test_leaves_that_are_cut_alike_are_counted_once() -> None:
    pieces = Pieces.listed([((0,), (3,), (3,)), ((3,), (9,), (2,))])
    first = steps(lambda: pieces.packed_chunks(2))
    assert pieces.packed_chunks(2) == 5 and pieces.packed_chunks(3) == 6
    assert 4 * steps(lambda: pieces.packed_chunks(2)) < first
