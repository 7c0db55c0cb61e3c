"""The content of a page as values, which it embeds as JSON.

A checkpoint of 100,000 leaves has few kinds of leaves, so the page has a table of kinds
(`LeafKind`) and, for each leaf, a name and the number of its kind. Cuts and meshes are tables too.
All texts are already printable (`xckpt.core.text.printable`).
"""

from __future__ import annotations

import msgspec

from xckpt.core.geometry.box import Shape
from xckpt.viewer.plan.shown import PlanShown
from xckpt.viewer.shown import CutsOfDimension, Shown


class StoredBox(Shown, frozen=True):
    """A zarr array of a leaf: all of it, or a piece."""

    offset: Shape
    """Its first element in the tensor."""
    shape: Shape
    chunk: Shape
    shard: Shape | None = None
    """Elements of a zarr shard, where several chunks are one object."""


class LeafKind(Shown, frozen=True):
    """The common part of leaves of one kind."""

    kind: str
    """``tensor``, or ``value`` for a Python value or opaque bytes."""
    dtype: str
    """The format's dtype name, or a value's Python type."""
    shape: Shape | None = None
    """Elements in each dimension; None for a value."""
    bytes: int = 0
    """Bytes of all elements."""
    chunks: int = 0
    """Number of chunks in all arrays."""
    layout: str = "manifest"
    """``regular``, ``pieces``; ``manifest`` for a value that the manifest holds."""
    arrays: tuple[StoredBox, ...] = ()
    sharding: str = ""
    """The sharding that wrote it, in words; empty if none is known."""
    mesh: int | None = None
    """The number of its mesh in `CheckpointPage.meshes`, where `cuts` are known."""
    cuts: tuple[int, ...] | None = None
    """For each dimension the number of its cuts in `CheckpointPage.cuts`."""
    annotation: str = ""
    dimensions: tuple[str, ...] | None = None
    """The caller's name for each dimension."""


class CheckpointPage(Shown, frozen=True):
    """A checkpoint: its leaves in the saved order."""

    names: tuple[str, ...]
    kind: tuple[int, ...]
    """For each leaf the number of its kind."""
    kinds: tuple[LeafKind, ...]
    meshes: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Name and size of each axis."""
    cuts: tuple[CutsOfDimension, ...] = ()
    values: dict[str, str] = msgspec.field(default_factory=dict)
    """Number of a leaf -> its value in words, of values that the manifest holds."""
    containers: dict[str, str] = msgspec.field(default_factory=dict)
    """Name -> kind of each container that is not a plain dict."""
    shared: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of a leaf -> bytes of its local files that other checkpoints have too."""
    metadata: str = ""
    """What was passed to the save as ``metadata=``, as JSON text."""


class StepShown(Shown, frozen=True):
    """A step of a run."""

    number: int
    name: str
    """The name of its folder."""
    time: str = ""
    """When it was saved, in UTC; empty if no manager wrote it."""
    bytes: int = 0
    shared: int = 0
    """Bytes of its local files that other checkpoints have too."""
    metrics: dict[str, float | str] = msgspec.field(default_factory=dict)
    """Numbers; what is not finite as text."""
    kept_by: tuple[str, ...] = ()
    format: str = "xckpt"


class DifferenceShown(Shown, frozen=True):
    """One thing in which a second checkpoint differs."""

    name: str
    kind: str
    first: str
    second: str
    bytes: int = 0
    """Bytes of the leaf."""


class DiffPage(Shown, frozen=True):
    """What differs between the checkpoint and another."""

    other: str
    """Where the other one is."""
    differences: tuple[DifferenceShown, ...]
    equal: int = 0
    """How many leaves of the first are equal."""
    equal_bytes: int = 0


class ProgressShown(Shown, frozen=True):
    """Progress of a comparison."""

    done: int
    """Bytes that are compared."""
    total: int
    """Bytes to compare; 0 where that is not known yet."""


class TextShown(Shown, frozen=True):
    """A Python value that is stored as bytes."""

    text: str
    """All of it, or its beginning."""
    characters: int
    """How many it has in all."""


class Page(Shown, frozen=True):
    """The content of one page."""

    title: str
    path: str
    format: str = ""
    served: bool = False
    """Whether a server answers questions about values, plans and other checkpoints."""
    token: str = ""
    """For a served page: the look at the checkpoint that its questions are about."""
    beside: tuple[str, ...] = ()
    """The places of the run's other steps, to compare with; only for a step of a run."""
    checkpoint: CheckpointPage | None = None
    run: tuple[StepShown, ...] | None = None
    shared_once: int = 0
    """Bytes of the files that a run's steps share, each file counted once; only for a run."""
    diff: DiffPage | None = None
    plan: PlanShown | None = None


def as_json(shown: object) -> bytes:
    """The JSON of a page or of an answer.

    Example:
        >>> as_json(StoredBox((0,), (4,), (2,)))
        b'{"offset":[0],"shape":[4],"chunk":[2]}'
    """
    return msgspec.json.encode(shown)
