"""What a checkpoint says about its tensors: the types that planner, storage and user share.

All of them are framework-neutral values: offsets and sizes are tuples of ints counted in
elements, dtypes are the format's names (see `xckpt.core.dtypes`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.geometry.grid import Grid
from xckpt.core.near_names import no_such_name
from xckpt.core.text.shown import brief

JSONValue = None | bool | int | float | str | list["JSONValue"] | dict[str, "JSONValue"]
"""What `json` can carry."""


def copied_json(value: JSONValue, what: str) -> JSONValue:
    """A copy of a value that is checked later; what cannot be copied is refused now.

    Raises:
        ManifestError: as `xckpt.core.json_values.check_json`; it cannot be copied.

    Example:
        >>> copied_json({"loss": (each for each in ())}, "metadata")
        Traceback (most recent call last):
        ...
        xckpt.errors.ManifestError: metadata cannot be written as JSON
          - metadata/loss: a builtins.generator is not a JSON value
    """
    try:
        return copy.deepcopy(value)
    except Exception:
        from xckpt.core.json_values import check_json  # few saves come here

        check_json(value, what)
        raise


ChunkStorageMetadata = Box
"""torch's name of a box."""


@dataclass(frozen=True, slots=True)
class TensorProperties:
    """What a tensor is, apart from its shape.

    Example:
        >>> TensorProperties("bfloat16").dtype
        'bfloat16'
    """

    dtype: str
    """The format's name of the element type, such as ``"bfloat16"``."""


class Sharding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sharding that a leaf had when it was saved, for readers that want the same.

    Exactly one of `placements` and `spec` is set, the one that the framework speaks.

    Example:
        >>> str(Sharding(axes=(("data", 2), ("model", 4)), spec=(("data", "model"), ())))
        'PartitionSpec(data+model, -) on data=2 x model=4'
        >>> str(Sharding(axes=(("dp", 2), ("tp", 2)), placements=("Shard(0)", "Replicate()")))
        'Shard(0), Replicate() on dp=2 x tp=2'
    """

    axes: tuple[tuple[str, int], ...]
    """The mesh: name and size of each axis, slowest first."""
    placements: tuple[str, ...] | None = None
    """torch's view: a placement for each mesh axis, as its repr."""
    spec: tuple[tuple[str, ...], ...] | None = None
    """jax's view: for each tensor dimension the mesh axes that shard it."""

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.axes)
        if self.placements is not None:
            return f"{', '.join(self.placements)} on {mesh}"
        spec = ", ".join("+".join(axes) or "-" for axes in self.spec or ())
        return f"PartitionSpec({spec}) on {mesh}"


@dataclass(frozen=True, slots=True)
class TensorStorageMetadata:
    """A tensor in a checkpoint, or in the plan of one.

    Example:
        >>> halves = [Box((0,), (2,)), Box((2,), (2,))]
        >>> saved = TensorStorageMetadata(TensorProperties("int8"), (4,), halves)
        >>> saved.shape, saved.dtype, saved.arrays
        ((4,), 'int8', Boxes([0, 2), [2, 4)))
    """

    properties: TensorProperties
    size: tuple[int, ...]
    """The global shape in elements."""
    chunks: Sequence[Box]
    """Disjoint boxes that cover the tensor: the shards of a plan, or the arrays of a checkpoint."""
    grid: Grid | None = None
    """How the boxes are laid out in zarr arrays; None until a planner or a storage has chosen."""
    sharding: Sharding | None = None
    """The sharding that wrote it, where the framework knows one."""
    annotation: str = ""
    """What the leaf is to its framework beyond an array, such as ``"prng_key:threefry2x32"``."""
    dimension_names: tuple[str, ...] | None = None
    """A name for each dimension, for zarr and xarray; None where nothing names them."""

    __repr__ = brief

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape in elements, as `size`, which is torch's name of it."""
        return self.size

    @property
    def dtype(self) -> str:
        """The format's name of the element type."""
        return self.properties.dtype

    @property
    def arrays(self) -> Boxes:
        """The box that each array of a stored tensor holds."""
        boxes = self.chunks if self.grid is None else self.grid.arrays
        if isinstance(boxes, Boxes):
            return boxes
        return Boxes.of([(box.offsets, box.sizes) for box in boxes], rank=len(self.size))


@dataclass(frozen=True, slots=True)
class BytesStorageMetadata:
    """A leaf that is not a tensor: a Python value or opaque bytes.

    Example:
        >>> BytesStorageMetadata("int").kind
        'int'
    """

    kind: str = ""
    """The Python type's name (``"int"``, ``"str"``, ...), or ``"opaque"``."""


@dataclass(frozen=True, slots=True)
class MetadataIndex:
    """Where an item belongs: a leaf, and the box in it.

    Two indices are equal if name and offset are; ``index`` is a hint that saves a search.

    Example:
        >>> MetadataIndex("wte", (0, 0), 3) == MetadataIndex("wte", (0, 0))
        True
    """

    fqn: str
    """The leaf name."""
    offset: tuple[int, ...] | None = None
    """The box's offset in the tensor, in elements; None for a leaf that is one whole."""
    index: int | None = field(default=None, compare=False)
    """The ordinal of the box where that is known."""


@dataclass(frozen=True, slots=True)
class Metadata(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """All that a checkpoint says about itself: a mapping from leaf name to what the leaf is.

    Example:
        >>> saved = Metadata({"w": TensorStorageMetadata(TensorProperties("int8"), (3,), ())})
        >>> list(saved), saved["w"].shape, saved["w"].dtype
        (['w'], (3,), 'int8')
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    """Leaf name -> what the leaf is, in the order in which the leaves were saved."""
    containers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of each container that is not a plain dict -> its kind; see `xckpt.core.tree`."""
    user_metadata: JSONValue = None
    """What the caller passed as ``metadata=`` to `xckpt.save`."""
    planner_data: object = None
    """What planners merged in `SavePlanner.create_global_plan`."""
    storage_data: object = None
    """What the storage adds for its own use."""

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """What a leaf is.

        Raises:
            KeyError: there is no such leaf; the message names the nearest.
        """
        leaf = self.state_dict_metadata.get(name)
        if leaf is None:
            raise KeyError(no_such_name(name, self.state_dict_metadata, "the checkpoint"))
        return leaf

    def described(self) -> Metadata:
        """The same, with what each leaf is made now: for callers that ask for it several times."""
        return replace(self, state_dict_metadata=dict(self.state_dict_metadata))

    def __contains__(self, name: object) -> bool:
        return name in self.state_dict_metadata

    def __iter__(self) -> Iterator[str]:
        return iter(self.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.state_dict_metadata)

    def __repr__(self) -> str:
        names = list(islice(self.state_dict_metadata, 4))
        shown = ", ".join(repr(name[:80]) for name in names[:3])
        count = "1 leaf" if len(self) == 1 else f"{len(self):,} leaves"
        more = ", ..." if len(names) > 3 else ""
        return f"<Metadata of {count}{': ' if names else ''}{shown}{more}>"

    def __bool__(self) -> bool:
        return True  # A checkpoint without leaves is one, too.
