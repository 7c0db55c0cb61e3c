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
from typing import Final

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


def parse_tree(text: bytes) -> Tree:
    """What a ``_METADATA`` says.

    Raises:
        ManifestError: it is damaged, or of a kind that is unknown; all such leaves are listed.

    Example:
        >>> parse_tree(encode_tree([Leaf(("a", "b"), "np.ndarray")])).leaves
        (Leaf(keys=('a', 'b'), kind='np.ndarray'),)
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"damaged: {str(error)[:200]}") from error
    entries = document.get("tree_metadata") if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise ManifestError("damaged: there is no tree_metadata")
    leaves: list[Leaf] = []
    problems: list[str] = []
    for name, entry in entries.items():
        leaf = _leaf(entry)
        if isinstance(leaf, Leaf):
            leaves.append(leaf)
        else:
            problems.append(f"{name}: {leaf}")
    if problems:
        raise ManifestError.listing("the tree cannot be read", problems)
    flags = {key: document.get(key) for key in ("use_ocdbt", "use_zarr3")}
    if not all(flag is None or isinstance(flag, bool) for flag in flags.values()):
        raise ManifestError("damaged: use_ocdbt and use_zarr3 are no booleans")
    return Tree(
        tuple(leaves),
        flags["use_ocdbt"],
        3 if flags["use_zarr3"] else 2,
        document.get("store_array_data_equal_to_fill_value") is not True,
        document.get("custom_metadata"),
    )


def _leaf(entry: object) -> Leaf | str:
    """A leaf, or what is wrong with it."""
    if not isinstance(entry, dict):
        return "no entry"
    value = entry.get("value_metadata")
    kind = value.get("value_type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return f"a leaf of kind {str(kind)[:60]!r}, which is unknown"
    path = entry.get("key_metadata")
    if not isinstance(path, list):
        return "no key path"
    keys: list[str | int] = []
    for each in path:
        key = each.get("key") if isinstance(each, dict) else None
        if not isinstance(key, str) or each.get("key_type") not in (SEQUENCE, DICT):
            return "a key without a type"
        if each["key_type"] == SEQUENCE and not (key.isascii() and key.isdigit()):
            return f"the position {key[:40]!r} in a sequence"
        keys.append(int(key) if each["key_type"] == SEQUENCE else key)
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
