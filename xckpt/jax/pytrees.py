"""Containers that are registered with JAX: Flax, Optax, Equinox and custom pytree nodes.

1. One level of a node is flattened through JAX's default registry, with `is_leaf` true for
   everything but the node itself.
2. Each key entry becomes a str or an int: a dict key, an attribute name or an index. If two
   children would share a key, all are numbered instead.
3. The node is rebuilt from its treedef and other children.

Dicts, lists, tuples, namedtuples and None are left to the core.
"""

from __future__ import annotations

from collections import OrderedDict

import jax
import numpy as np
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    tree_flatten_with_path,
    tree_unflatten,
)

_OF_THE_CORE = (dict, OrderedDict, list, tuple, type(None))


def children(node: object) -> tuple[str, list[tuple[str | int, object]]] | None:
    """(kind, (key, child) pairs) of a registered node, or None for leaves and builtin containers.

    Example:
        >>> from collections import defaultdict
        >>> children(defaultdict(list, a=1))
        ('pytree:collections.defaultdict', [('a', 1)])
        >>> children({"a": 1}) is None, children(1.5) is None
        (True, True)
    """
    opened = _open(node)
    if opened is None:
        return None
    entries, _ = opened
    keys = [_key(entry) for entry, _ in entries]
    if len({(type(key), key) for key in keys}) < len(keys):
        keys = list(range(len(entries)))
    kind = f"pytree:{type(node).__module__}.{type(node).__qualname__}"
    return kind, [(key, child) for key, (_, child) in zip(keys, entries, strict=True)]


def rebuild(node: object, children: list[object]) -> object | None:
    """A node like ``node`` with other children, in the order of `children`, or None.

    Example:
        >>> from collections import defaultdict
        >>> rebuild(defaultdict(list, a=1), [2])
        defaultdict(<class 'list'>, {'a': 2})
    """
    opened = _open(node)
    return None if opened is None else tree_unflatten(opened[1], children)


def _open(node: object) -> tuple[list[tuple[object, object]], object] | None:
    """(key entry, child) pairs and the treedef of one level; None for any other object."""
    if type(node) in _OF_THE_CORE or isinstance(node, jax.Array | np.ndarray):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return None
    flat, treedef = tree_flatten_with_path(node, is_leaf=lambda other: other is not node)
    if len(flat) == 1 and not flat[0][0]:
        return None  # An empty path leads to a leaf: the object itself.
    return [(path[0], child) for path, child in flat], treedef


def _key(entry: object) -> str | int:
    key: object = entry
    match entry:
        case DictKey() | FlattenedIndexKey():
            key = entry.key
        case GetAttrKey():
            key = entry.name
        case SequenceKey():
            key = entry.idx
    return key if isinstance(key, str | int) and not isinstance(key, bool) else str(key)
