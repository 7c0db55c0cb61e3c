"""A plan on a page, as values."""

from __future__ import annotations

import msgspec

from xckpt.viewer.shown import CutsOfDimension, Shown


class RankShown(Shown, frozen=True):
    """The part of one rank in a load."""

    wanted: int
    """Bytes of its shards."""
    read: int
    """Bytes of the chunks that it reads itself, whole."""
    chunks: int
    """How many these are."""
    given: int
    """Bytes of chunks that it hands over, counted once for each that takes them."""
    taken: int
    """Bytes of chunks that others read for it."""


class HostShown(Shown, frozen=True):
    """The part of one host's ranks in a load."""

    wanted: int
    """Bytes of their shards, replicas counted once."""
    read: int
    """Bytes that they read."""


class TargetShown(Shown, frozen=True):
    """How leaves of one kind are wanted."""

    spec: str
    cuts: tuple[int, ...]
    """For each dimension the number of its cuts in `PlanShown.cuts`."""
    grid: str = ""
    """How a save with this mesh would lay the leaf out."""


class PlanShown(Shown, frozen=True):
    """The plan of a load, and of a save, with another mesh."""

    text: str
    """The request."""
    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[RankShown, ...]
    hosts: tuple[HostShown, ...]
    written: tuple[int, ...]
    """Bytes that each rank would write in a save."""
    targets: tuple[TargetShown, ...]
    target: tuple[int, ...]
    """For each leaf the number of its target; -1 for a value."""
    cuts: tuple[CutsOfDimension, ...]
    wanted: tuple[int, ...]
    """For each leaf the bytes wanted, replicas on one host counted once."""
    read: tuple[int, ...]
    """For each leaf the bytes read."""
    readers: dict[str, tuple[tuple[int, ...], ...]] = msgspec.field(default_factory=dict)
    """Number of a leaf -> (chunk, rank that reads it, ranks that take it) of its chunks; only where
    that is little in all."""
