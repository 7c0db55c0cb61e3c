"""Orbax's description of a tree: ``_METADATA``, read strictly and written; neither Orbax nor JAX.

Each leaf has a key path, in which a key belongs to a sequence (1) or to a dict or a class's fields
(2), and a kind: ``jax.Array``, ``np.ndarray``, ``scalar`` (a Python number), ``string``, or, for
what takes no space, ``None``, ``Dict``, ``List``, ``Tuple`` and ``NamedTuple`` of nothing. The
leaf's array is stored under its keys joined with dots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

from xckpt.core.names import KeyPath
from xckpt.errors import ManifestError
from xckpt.storage.foreign.paths import FilePath, named

TREE: Final = "_METADATA"
CHECKPOINT: Final = "_CHECKPOINT_METADATA"
STRINGS: Final = "_strings.json"

SEQUENCE: Final = 1
DICT: Final = 2
ARRAYS: Final = frozenset(("jax.Array", "np.ndarray"))
CONTAINERS: Final[Mapping[str, str]] = {
    "Dict": "dict",
    "List": "list",
    "Tuple": "tuple",
    "NamedTuple": "tuple",
}
"""Kind of an empty container -> kind of `xckpt.core.tree`."""
KINDS: Final = ARRAYS | frozenset(CONTAINERS) | {"scalar", "string", "None"}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf."""

    keys: KeyPath
    """Positions in sequences are ints."""
    kind: str

    @property
    def stored_name(self) -> str:
        """What Orbax calls it."""
        return ".".join(str(key) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Tree:
    """What ``_METADATA`` says."""

    leaves: tuple[Leaf, ...]
    ocdbt: bool | None
    """Whether arrays lie in an OCDBT database; None if it does not say."""
    zarr_version: int
    fill_missing: bool
    """Whether a chunk that is not there is one of zeros."""
    custom: object
    """What the user gave along."""


class _Key(msgspec.Struct):
    key: str
    key_type: Literal[1, 2]


class _Value(msgspec.Struct):
    value_type: str


class _TreeEntry(msgspec.Struct):
    """What the document says of one leaf."""

    key_metadata: list[_Key]
    value_metadata: _Value


class _Document(msgspec.Struct):
    tree_metadata: dict[str, object]
    use_ocdbt: bool | None = None
    use_zarr3: bool | None = None
    store_array_data_equal_to_fill_value: object = None
    custom_metadata: object = None


def parse_json(text: bytes, type: type[T]) -> T:
    """A JSON document of a type.

    Raises:
        ManifestError: it is damaged, or of another type.
    """
    try:
        # Unlike msgspec's decoder, Python's reads the NaN that Python's encoder writes.
        return msgspec.convert(json.loads(text), type)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"damaged: {str(error)[:200]}") from error


def parse_tree(text: bytes) -> Tree:
    """What a ``_METADATA`` says.

    Raises:
        ManifestError: it is damaged, or of a kind that is unknown; all such leaves are listed.

    Example:
        >>> parse_tree(encode_tree([Leaf(("a", "b"), "np.ndarray")])).leaves
        (Leaf(keys=('a', 'b'), kind='np.ndarray'),)
    """
    document = parse_json(text, _Document)
    leaves: list[Leaf] = []
    problems: list[str] = []
    for name, entry in document.tree_metadata.items():
        try:
            leaves.append(_leaf(msgspec.convert(entry, _TreeEntry)))
        except ValueError as error:
            problems.append(f"{name}: {str(error)[:200]}")
    if problems:
        raise ManifestError.listing("the tree cannot be read", problems)
    return Tree(
        tuple(leaves),
        document.use_ocdbt,
        3 if document.use_zarr3 else 2,
        document.store_array_data_equal_to_fill_value is not True,
        document.custom_metadata,
    )


def _leaf(entry: _TreeEntry) -> Leaf:
    """The leaf of an entry.

    Raises:
        ValueError: it is of an unknown kind, or a position in a sequence is no number.
    """
    kind = entry.value_metadata.value_type
    if kind not in KINDS:
        raise ValueError(f"a leaf of kind {kind[:60]!r}, which is unknown")
    keys: list[str | int] = []
    for each in entry.key_metadata:
        in_sequence = each.key_type == SEQUENCE
        if in_sequence and not (each.key.isascii() and each.key.isdigit()):
            raise ValueError(f"the position {each.key[:40]!r} in a sequence")
        keys.append(int(each.key) if in_sequence else each.key)
    return Leaf(tuple(keys), kind)


def encode_tree(leaves: list[Leaf], custom: object = None) -> bytes:
    """A ``_METADATA`` for zarr v3 arrays in plain files."""
    entries = {}
    for leaf in leaves:
        keys = [
            {"key": str(key), "key_type": SEQUENCE if isinstance(key, int) else DICT}
            for key in leaf.keys
        ]
        skip = leaf.kind in CONTAINERS or leaf.kind == "None"
        entries[str(tuple(str(key) for key in leaf.keys))] = {
            "key_metadata": keys,
            "value_metadata": {"value_type": leaf.kind, "skip_deserialize": skip},
        }
    document = {
        "tree_metadata": entries,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom,
    }
    return json.dumps(document).encode()


def looks_like_orbax(folder: FilePath) -> bool:
    """Whether a folder is an item, a step, or the root of steps."""
    return (folder / TREE).is_file() or (folder / CHECKPOINT).is_file() or bool(steps_in(folder))


def steps_in(folder: FilePath) -> list[FilePath]:
    """The steps of a `CheckpointManager` in a folder."""
    return [each for each in folders_in(folder) if (each / CHECKPOINT).is_file()]


def folders_in(folder: FilePath) -> Iterator[FilePath]:
    """The folders in a folder, by name."""
    return (each for each in named(folder) if each.is_dir())
