"""Shared parts of a page: a strict struct, the cuts of a dimension, tables."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

import msgspec

T = TypeVar("T", bound=Hashable)


class Shown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of the page."""


class CutsOfDimension(Shown, frozen=True):
    """How a dimension is cut: see `xckpt.core.geometry.shard_cuts.DimensionCuts`."""

    axes: tuple[int, ...]
    intervals: tuple[tuple[tuple[int, int], ...], ...]


class Numbered(dict[T, int]):
    """Distinct values, numbered in the order in which they came.

    Example:
        >>> numbered = Numbered()
        >>> numbered.of("a"), numbered.of("b"), numbered.of("a"), list(numbered)
        (0, 1, 0, ['a', 'b'])
    """

    def of(self, thing: T) -> int:
        """The number of a value."""
        return self.setdefault(thing, len(self))
