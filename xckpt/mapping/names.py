"""Mapping names: what rules call the leaves of a tree, whether it is nested or flat.

1. A mapping name is the key path joined with ``/``, each key as its text: the int key 0 and the
   string "0" are equal, since a layer's number is an int in one framework and a string in another.
2. Inside a key, ``%`` and ``/`` become ``%25`` and ``%2F``.
3. `by_mapping_name` turns leaf names into mapping names; two leaves of one name are refused.
4. `specs_of` has the shapes and dtypes of a tree's arrays by mapping name.
5. `tree_of` makes nested dicts with string keys of mapping names.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard
from urllib.parse import unquote

import numpy as np

from xckpt.core.dtypes import DTYPES, dtype_name
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.names import join_keys, split_name
from xckpt.core.tree import flatten, unflatten
from xckpt.engine.adapters import loaded_adapters
from xckpt.errors import ManifestError, MappingError
from xckpt.mapping.operations.base import is_table
from xckpt.mapping.spec import TensorSpec


def mapping_name(keys: Sequence[str | int]) -> str:
    """The mapping name of a key path.

    Example:
        >>> mapping_name(("layers", 0, "kernel")), mapping_name(("layers", "0", "kernel"))
        ('layers/0/kernel', 'layers/0/kernel')
        >>> mapping_name(("a/b.weight",))
        'a%2Fb.weight'
    """
    return "/".join(str(key).replace("%", "%25").replace("/", "%2F") for key in keys)


def keys_of(name: str) -> tuple[str, ...]:
    """The string keys of a mapping name.

    Example:
        >>> keys_of("layers/0/a%2Fb")
        ('layers', '0', 'a/b')
    """
    return tuple(unquote(part) for part in name.split("/")) if name else ()


def of_one_leaf(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of mapping names that mean one leaf, since one of them escapes what needs no escape.

    Example:
        >>> of_one_leaf(["A", "%41", "a%2Fb", "a/b"])
        [('A', '%41')]
    """
    first: dict[str, str] = {}
    # A name without a % is as `mapping_name` makes it.
    plain = ((mapping_name(keys_of(name)) if "%" in name else name, name) for name in names)
    return [(first[key], name) for key, name in plain if first.setdefault(key, name) != name]


def by_mapping_name(leaf_names: Iterable[str]) -> dict[str, str]:
    """Mapping name -> leaf name.

    Raises:
        MappingError: two leaves have one mapping name; all such are listed.

    Example:
        >>> by_mapping_name(["layers/0/w", "%30/w"])
        {'layers/0/w': 'layers/0/w', '0/w': '%30/w'}
    """
    names: dict[str, str] = {}
    problems: list[str] = []
    for leaf in leaf_names:
        name = mapping_name(split_name(leaf))
        if name in names:
            problems.append(f"{name}: {names[name]} and {leaf} are two leaves with this name")
        names[name] = leaf
    if problems:
        fault = (
            "neither a mapping nor another format tells an int key from its text, 0 from %30; "
            "rename one of each"
        )
        raise MappingError.listing(fault, problems)
    return names


def specs_of(tree: object) -> dict[str, TensorSpec]:
    """Mapping name -> shape and dtype of every array of a tree.

    Leaves that are not arrays of the format's dtypes (numbers, texts, JAX's random keys) are left
    out.

    Args:
        tree: nested containers of anything with ``.shape`` and ``.dtype``; an open checkpoint; or
            `TensorSpec` by mapping name, which is returned as it is.

    Raises:
        MappingError: two leaves have one mapping name; all such are listed.
        TypeError: it is a path, or no tree.

    Example:
        >>> specs_of({"layers": [{"kernel": np.zeros((2, 3), np.float16)}], "step": 7})
        {'layers/0/kernel': TensorSpec(shape=(2, 3), dtype='float16')}
    """
    if _are_specs(tree):
        return dict(tree)
    if isinstance(tree, str | os.PathLike):
        raise TypeError(
            f"shapes and dtypes are taken from a tree, not a path: xckpt.open({tree!r})"
        )
    described = metadata_of(tree)
    if described is not None:
        return described_specs(described)
    specs: dict[str, TensorSpec] = {}
    leaves = flatten(tree, loaded_adapters()).leaves
    if "" in leaves and not hasattr(leaves[""], "shape"):
        raise TypeError(f"shapes and dtypes are taken from a tree of arrays, not from {tree!r}")
    for name, leaf in leaves.items():
        shape, dtype = getattr(leaf, "shape", None), _dtype(getattr(leaf, "dtype", None))
        if shape is not None and dtype is not None:
            specs[name] = TensorSpec(tuple(int(size) for size in shape), dtype)
    return {name: specs[leaf_name] for name, leaf_name in by_mapping_name(specs).items()}


def metadata_of(tree: object) -> Metadata | None:
    """What an open checkpoint says of its leaves; None of any other tree.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://its-metadata", {"step": 7})
        >>> list(metadata_of(xckpt.open("memory://its-metadata")).state_dict_metadata)
        ['step']
        >>> metadata_of({"step": 7}) is None
        True
    """
    metadata = getattr(tree, "metadata", None)
    return metadata if isinstance(metadata, Metadata) else None


def described_specs(metadata: Metadata) -> dict[str, TensorSpec]:
    """Mapping name -> shape and dtype of every tensor that a checkpoint's metadata describe.

    Raises:
        MappingError: two leaves have one mapping name; all such are listed.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://in-specs", {"w": np.zeros((2, 3)), "step": 7})
        >>> described_specs(xckpt.open("memory://in-specs").metadata)
        {'w': TensorSpec(shape=(2, 3), dtype='float64')}
    """
    described = metadata.state_dict_metadata
    return {
        name: TensorSpec(tuple(stored.size), stored.properties.dtype)
        for name, leaf in by_mapping_name(described).items()
        if isinstance(stored := described[leaf], TensorStorageMetadata)
    }


def _are_specs(tree: object) -> TypeGuard[Mapping[str, TensorSpec]]:
    """Whether a tree is a dict of nothing but specs."""
    return is_table(tree) and all(isinstance(value, TensorSpec) for value in tree.values())


def _dtype(dtype: object) -> str | None:
    """The format's name of a dtype of any framework; None if it has none."""
    text = str(dtype).removeprefix("torch.")
    if text in DTYPES:
        return text
    try:
        return dtype_name(np.dtype(dtype))  # type: ignore[call-overload]  # any other object: TypeError
    except TypeError:
        return None


def tree_of(leaves: Mapping[str, object]) -> object:
    """Nested dicts with string keys, from mapping names.

    Raises:
        MappingError: a leaf lies inside another; all such are listed.

    Example:
        >>> tree_of({"params/w": 1, "params/b": 2, "step": 3})
        {'params': {'w': 1, 'b': 2}, 'step': 3}
    """
    try:
        return unflatten({join_keys(keys_of(name)): leaf for name, leaf in leaves.items()}, {})
    except ManifestError as error:
        raise MappingError.listing(
            "the leaves make up no tree", error.problems or (str(error),)
        ) from error
