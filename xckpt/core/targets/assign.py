"""Putting loaded leaves into the caller's own containers, at the end of a load in place."""

# An object that is a mapping, a list or a tuple has keys and elements of unknown type.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping

from xckpt.core.adapter import NO_ADAPTERS, Adapters
from xckpt.core.names import component
from xckpt.core.part.per_rank import PerRank
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError


def assign(
    tree: object,
    leaves: Mapping[str, object],
    adapters: Adapters = NO_ADAPTERS,
    *,
    keep: Collection[str] = (),
) -> object:
    """Put leaves into a tree's own dicts and lists.

    A tuple and a `PerRank`, which cannot be changed, are replaced inside their parents.

    Args:
        tree: what to change.
        leaves: by name, a value for each leaf.
        adapters: open the frameworks' containers.
        keep: names of subtrees that stay as they are.

    Returns:
        The tree itself, unless its root is a tuple, a `PerRank` or a leaf.

    Raises:
        UnsupportedLeafError: a leaf changes in a container that is not a dict, list or tuple.

    Example:
        >>> tree = {"step": 1, "betas": (0.9, 0.99)}
        >>> assign(tree, {"step": 2, "betas/0": 0.8, "betas/1": 0.99}) is tree, tree
        (True, {'step': 2, 'betas': (0.8, 0.99)})
    """
    return leaves[""] if "" in leaves else _assign(tree, "", leaves, adapters, keep)


def _assign(
    node: object,
    name: str,
    leaves: Mapping[str, object],
    adapters: Adapters,
    keep: Collection[str],
) -> object:
    if name in keep:
        return node
    container = adapters.open_container(node)
    assert container is not None  # what is no container is a leaf
    changed: dict[str | int, object] = {}
    for key, child in container[1]:
        below = f"{name}/{component(key)}" if name else component(key)
        # Without a call for each leaf: there may be very many.
        is_leaf = below in leaves
        new = leaves[below] if is_leaf else _assign(child, below, leaves, adapters, keep)
        if new is not child:
            changed[key] = new
    return _changed(node, name, container[1], changed) if changed else node


def _changed(
    node: object,
    name: str,
    children: Iterable[tuple[str | int, object]],
    changed: Mapping[str | int, object],
) -> object:
    """A container with some other children: itself, or a new one in place of an immutable one."""
    if isinstance(node, MutableMapping | list):
        for key, new in changed.items():
            node[key] = new  # type: ignore[index]  # a list's keys are ints
        return node
    if isinstance(node, tuple):
        from xckpt.core.targets.other_children import tuple_like  # few trees have such tuples

        return tuple_like(node, [changed.get(key, child) for key, child in children])
    if isinstance(node, PerRank):
        return PerRank(*changed.values())
    raise UnsupportedLeafError(
        f"{name or 'the root'}: {named(type(node).__name__)} cannot be changed in place; "
        f"use load, which returns a new one"
    )
