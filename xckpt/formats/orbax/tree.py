"""Orbax's description of a tree: ``_METADATA``, read strictly and written; neither Orbax nor JAX.

Each leaf has a key path, in which a key belongs to a sequence (1) or to a dict or a class's fields
(2), and a kind: ``jax.Array``, ``np.ndarray``, ``scalar`` (a Python number), ``string``, or, for
what takes no space, ``None``, ``Dict``, ``List``, ``Tuple`` and ``NamedTuple`` of nothing. The
leaf's array is stored under its keys joined with dots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, TypeVar

import msgspec

from xckpt.core.names import KeyPath, join_keys, split_name
from xckpt.core.struct_types import prepare_structs
from xckpt.errors import ManifestError
from xckpt.storage.foreign.paths import AnyPath, FilePath, entries_in

TREE: Final = "_METADATA"
CHECKPOINT: Final = "_CHECKPOINT_METADATA"
STRINGS: Final = "_strings.json"
ARRAY_METADATA: Final = "array_metadatas"
AGGREGATE: Final = "checkpoint"
"""The file of an aggregated tree."""

STEP: Final = re.compile(r"(?:.*_)?[0-9]+")
"""The name of a step's folder: a number, perhaps after a prefix."""

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
EMPTY: Final[Mapping[str, str]] = {"dict": "Dict", "list": "List", "tuple": "Tuple"}
"""Kind of `xckpt.core.tree` -> kind of an empty container."""
KINDS: Final = ARRAYS | frozenset(CONTAINERS) | {"scalar", "string", "None"}


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf.

    Example:
        >>> Leaf(("opt", 0, "mu"), "np.ndarray").stored_name
        'opt.0.mu'
    """

    keys: KeyPath
    """Positions in sequences are ints."""
    kind: str

    @property
    def stored_name(self) -> str:
        """Its name in Orbax."""
        return ".".join(str(key) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Tree:
    """The content of a ``_METADATA``."""

    leaves: tuple[Leaf, ...]
    ocdbt: bool | None
    """Whether arrays lie in an OCDBT database; None if it does not say."""
    zarr_version: int
    fill_missing: bool
    """Whether a missing chunk is one of zeros."""
    custom: object
    """The user's own metadata."""


class _Key(msgspec.Struct):
    key: str
    key_type: Literal[1, 2]


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _TreeEntry(msgspec.Struct):
    """The document's entry of one leaf."""

    key_metadata: list[_Key]
    value_metadata: _Value


prepare_structs(_TreeEntry)


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

    Example:
        >>> parse_json(b'{"step": 7}', dict[str, int])
        {'step': 7}
    """
    try:
        # Unlike msgspec's decoder, Python's reads the NaN that Python's encoder writes.
        return msgspec.convert(json.loads(text), type)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"damaged: {str(error)[:200]}") from error


def parse_tree(text: bytes) -> Tree:
    """The tree in a ``_METADATA``.

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
        ValueError: it is of an unknown kind, or a position in a sequence is not a number.
    """
    kind = entry.value_metadata.value_type
    if kind not in KINDS:
        raise ValueError(f"a leaf of kind {kind[:60]!r}, which is unknown")
    if entry.value_metadata.skip_deserialize and kind in ARRAYS | {"scalar", "string"}:
        raise ValueError(
            f"its {kind} lies in the msgpack file {AGGREGATE!r}, where SaveArgs(aggregate=True) "
            f"puts it, which is not read; restore it with Orbax and save it again"
        )
    keys: list[str | int] = []
    for each in entry.key_metadata:
        in_sequence = each.key_type == SEQUENCE
        if in_sequence and not (each.key.isascii() and each.key.isdigit()):
            raise ValueError(f"the position {each.key[:40]!r} in a sequence")
        keys.append(int(each.key) if in_sequence else each.key)
    return Leaf(tuple(keys), kind)


def orbax_keys(name: str, containers: Mapping[str, str]) -> KeyPath:
    """The keys by which Orbax knows a leaf: ints in sequences only.

    Args:
        name: its leaf name.
        containers: those of the tree; see `xckpt.core.tree`.

    Example:
        >>> orbax_keys("opt/0/7", {"opt": "list"})
        ('opt', 0, '7')
    """
    keys = split_name(name)
    return tuple(
        key
        if isinstance(key, str) or _is_sequence(containers.get(join_keys(keys[:depth]), ""))
        else str(key)
        for depth, key in enumerate(keys)
    )


def _is_sequence(kind: str) -> bool:
    """Whether ints below a container are positions; a class without named fields has them too."""
    return kind in ("list", "tuple") or kind.startswith("pytree:")


def empty_containers(names: Iterable[str], containers: Mapping[str, str]) -> Iterator[Leaf]:
    """The empty containers, as Orbax records them: all but builtin ones as None.

    Args:
        names: the names of all leaves.
        containers: see `xckpt.core.tree`.

    Example:
        >>> list(empty_containers(["w/0"], {"w": "list", "b": "list", "e": "namedtuple:E:"}))
        [Leaf(keys=('b',), kind='List'), Leaf(keys=('e',), kind='None')]
    """
    full = {""}
    for name in (*names, *containers):
        parts = name.split("/")
        full.update(accumulate(parts[:-1], "{}/{}".format))
    for name, kind in containers.items():
        if name not in full:
            yield Leaf(orbax_keys(name, containers), EMPTY.get(kind, "None"))


def encode_tree(leaves: list[Leaf], custom: object = None) -> bytes:
    """A ``_METADATA`` for zarr v3 arrays in plain files.

    Example:
        >>> parse_tree(encode_tree([Leaf(("step",), "scalar")])).zarr_version
        3
    """
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
    """Whether a folder is an item, a step, or the root of steps.

    Example:
        >>> from pathlib import Path
        >>> Path("item").mkdir()
        >>> Path("item", TREE).touch()
        >>> looks_like_orbax(Path("item"))
        True
    """
    if (folder / TREE).is_file() or (folder / CHECKPOINT).is_file():
        return True
    return bool(items_in(folder) or steps_in(folder))


def items_in(folder: AnyPath) -> list[AnyPath]:
    """The items of a step that are trees."""
    return [each for each in folders_in(folder) if (each / TREE).is_file()]


def steps_in(folder: AnyPath) -> list[AnyPath]:
    """The steps of a `CheckpointManager` in a folder.

    Before 0.5 Orbax put no file beside the items: there a step is a folder with a number and items.

    Example:
        >>> from pathlib import Path
        >>> Path("run/100/default").mkdir(parents=True)
        >>> Path("run/100/default", TREE).touch()
        >>> [step.name for step in steps_in(Path("run"))]
        ['100']
    """
    return [
        each
        for each in folders_in(folder)
        if (each / CHECKPOINT).is_file() or (STEP.fullmatch(each.name) and items_in(each))
    ]


def folders_in(folder: AnyPath) -> Iterator[AnyPath]:
    """The folders in a folder, by name."""
    return (each for each in entries_in(folder) if each.is_dir())
