"""Containers registered with JAX, opened one level at a time through its default registry."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
)

_OF_THE_CORE: Final = (dict, OrderedDict, list, tuple, type(None))
"""Containers that the core opens itself."""


def opened_once(node: object) -> tuple[list[tuple[object, object]], object] | None:
    """(key entry, child) pairs and the treedef of one level; None for any other object."""
    if type(node) in _OF_THE_CORE or isinstance(node, jax.Array | np.ndarray):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return None
    flat, treedef = tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    if len(flat) == 1 and not flat[0][0]:
        return None  # An empty path leads to a leaf: the object itself.
    return [(path[0], child) for path, child in flat], treedef


def key_of(entry: object) -> str | int:
    """A key entry of JAX as a dict key, an attribute's name or an index."""
    key: object = entry
    match entry:
        case DictKey() | FlattenedIndexKey():
            key = entry.key
        case GetAttrKey():
            key = entry.name
        case SequenceKey():
            key = entry.idx
    return key if isinstance(key, str | int) and not isinstance(key, bool) else str(key)
