"""Containers of a given one's class, attributes included, with other children.

A load puts them in the place of the caller's own containers, so that a subclass (`OrderedDict`,
``torch.Size``, a list with methods) stays what it is.
"""

# An object that is a mapping, a list or a tuple has keys and elements of unknown type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import MutableMapping


def other_children(node: object, children: dict[str | int, object]) -> object:
    """A dict, list or tuple of the node's class with other children.

    Args:
        node: the container.
        children: key -> child, for each key of the node and in its order.

    Example:
        >>> other_children([1, 2], {0: 3, 1: 4}), other_children({"a": 1}, {"a": 2})
        ([3, 4], {'a': 2})
    """
    if isinstance(node, tuple):
        return tuple_like(node, list(children.values()))
    if isinstance(node, list):
        return _list_like(node, list(children.values()))
    return _dict_like(node, children)


def _dict_like(node: object, children: dict[str | int, object]) -> object:
    if type(node) is dict or not isinstance(node, MutableMapping):
        return children
    new = copy.copy(node)
    for key, child in children.items():
        new[key] = child
    return new


def _list_like(node: list[object], children: list[object]) -> list[object]:
    if type(node) is list:
        return children
    new = copy.copy(node)
    new[:] = children
    return new


def tuple_like(node: tuple[object, ...], children: list[object]) -> tuple[object, ...]:
    """A tuple of the node's class with other elements; a plain one if the class takes no such.

    Example:
        >>> class Pair(tuple): pass
        >>> type(tuple_like(Pair((1, 2)), [3, 4])).__name__, tuple_like((1,), [2])
        ('Pair', (2,))
    """
    made: type[tuple[object, ...]] = type(node)
    if made is tuple or hasattr(made, "_make"):
        return getattr(made, "_make", tuple)(children)
    plain: type[tuple[object, ...]] = tuple
    try:
        new = plain.__new__(made, children)
    except TypeError:  # a class in C has a constructor of its own
        return _constructed(made, children)
    if hasattr(node, "__dict__"):
        vars(new).update(vars(node))
    return new


def _constructed(made: type[tuple[object, ...]], children: list[object]) -> tuple[object, ...]:
    try:
        return made(children)
    except TypeError:  # torch.Size holds ints alone
        return tuple(children)
