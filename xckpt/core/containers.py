"""What a node of a tree is: a container, an object that keeps its own state, or a leaf."""

# An object that is a mapping, a list or a tuple has keys and elements of unknown type.
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from xckpt.core.adapter import Adapters, Children
from xckpt.core.leaf import ObjectState

_BUILTIN = frozenset(
    (dict, OrderedDict, list, tuple, type(None), bool, int, float, complex, str, bytes)
)
"""Types whose instances are what they seem, so that no adapter need be asked."""


def open_object(node: object, name: str, adapters: Adapters) -> ObjectState | None:
    """The state of an object that keeps its own; None for any other node.

    Raises:
        UnsupportedLeafError: its state is nothing that can be saved or loaded; names it.
    """
    if type(node) in _BUILTIN or adapters.is_leaf(node):
        return None
    return adapters.open_object(node, name)


def open_container(node: object, adapters: Adapters) -> Children | None:
    """A container's kind and (key, child) pairs, or None for a leaf.

    Example:
        >>> from xckpt.core.adapter import NO_ADAPTERS
        >>> open_container({"a": 1}, NO_ADAPTERS), open_container(5, NO_ADAPTERS)
        (('dict', [('a', 1)]), None)
    """
    if isinstance(node, Mapping):
        # A framework may have registered a mapping of its own (flax's FrozenDict, nnx.State).
        registered = None if type(node) in (dict, OrderedDict) else adapters.children(node)
        return registered or ("dict", list(node.items()))
    if isinstance(node, list):
        return "list", list(enumerate(node))
    if isinstance(node, tuple):
        fields = getattr(type(node), "_fields", None)
        if fields is None:
            return "tuple", list(enumerate(node))
        kind = f"namedtuple:{type(node).__name__}:{','.join(fields)}"
        return kind, list(zip(fields, node, strict=True))
    if node is None or isinstance(node, bool | int | float | complex | str | bytes):
        return None
    return None if adapters.is_leaf(node) else adapters.children(node)
