"""The tree that a conversion saves: a leaf for each target, and the source's Python values.

1. Without a mapping it is the source's own tree, as far as the source tells it.
2. With a mapping it is nested dicts with string keys, split at the names' slashes.
3. With a tree of the target's it is that tree, containers and all; it must have a place for each
   Python value of the source, and each of its own must be in the source.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.convert.conversion import Opened
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.leaf import LazySource
from xckpt.core.metadata import JSONValue, Sharding
from xckpt.core.names import join_keys
from xckpt.core.tree import flatten, rebuild, unflatten
from xckpt.engine.adapters import loaded_adapters
from xckpt.errors import MappingError
from xckpt.formats.source import USER, TensorSource
from xckpt.mapping.names import by_mapping_name, keys_of, tree_of

__all__ = ["target_tree", "user_metadata"]


def user_metadata(told: Mapping[str, str]) -> JSONValue:
    """The checkpoint's user metadata, from a source's."""
    if USER in told:
        return msgspec.json.decode(told[USER])
    return dict(told) or None


def target_tree(
    opened: Opened, boxes: Mapping[str, Boxes], *, as_it_is: bool, like: object = None
) -> tuple[dict[str, str], Mapping[str, object]]:
    """Target tensor -> leaf name, and the tree to save: a `LazySource` for each tensor.

    Args:
        opened: the source, and what is made of it.
        boxes: target -> the boxes that this rank makes.
        as_it_is: keep the source's own tree, where it tells.
        like: the target's tree; None if it is not known.

    Raises:
        MappingError: Python values have no place, or the names of targets; or leaves lie inside
            others. All such are listed.
    """
    targets = opened.resolved.targets
    _check_values(opened.source, targets)
    leaves = _leaves(opened, boxes, as_it_is)
    if like is not None:
        names, tree = _like(leaves, like)
    elif as_it_is:
        names, tree = _as_it_is(leaves, opened.source)
    else:
        names, tree = _leaf_names(leaves), tree_of(leaves)
    told: Mapping[str, object] = tree  # type: ignore[assignment]  # our planners take any tree
    return {name: names[name] for name in targets}, told


def _check_values(source: TensorSource, targets: Mapping[str, object]) -> None:
    both = sorted(set(source.values) & set(targets))
    if both:
        raise MappingError.listing(
            "Python values of the source have the names of targets; rename the targets",
            [f"{name}: a {type(source.values[name]).__name__}" for name in both],
        )


def _leaves(opened: Opened, boxes: Mapping[str, Boxes], as_it_is: bool) -> dict[str, object]:
    """Mapping name -> leaf: the targets' tensors and the source's Python values."""
    source = opened.source
    shardings: Mapping[str, Sharding] = getattr(source, "shardings", {}) if as_it_is else {}
    annotations: Mapping[str, str] = getattr(source, "annotations", {}) if as_it_is else {}
    tensors = {
        name: LazySource(
            spec.shape,
            spec.dtype,
            boxes[name],
            _not_here,
            sharding=shardings.get(name),
            annotation=annotations.get(name, ""),
        )
        for name, spec in opened.resolved.targets.items()
    }
    return {**tensors, **source.values}


def _leaf_names(leaves: Mapping[str, object]) -> dict[str, str]:
    """Mapping name -> leaf name, in nested dicts with string keys."""
    return {name: join_keys(keys_of(name)) for name in leaves}


def _as_it_is(
    leaves: Mapping[str, object], source: TensorSource
) -> tuple[Mapping[str, str], object]:
    """Mapping name -> leaf name, and the source's own tree."""
    names: Mapping[str, str] = getattr(source, "leaf_names", _leaf_names(leaves))
    containers: Mapping[str, str] = getattr(source, "containers", {})
    return names, unflatten({leaf: leaves[name] for name, leaf in names.items()}, containers)


def _like(leaves: Mapping[str, object], like: object) -> tuple[Mapping[str, str], object]:
    """Mapping name -> leaf name, and a tree with these leaves in place of its own."""
    adapters = loaded_adapters()
    names = by_mapping_name(flatten(like, adapters).leaves)
    problems = [f"{name}: in the source, but not in like" for name in leaves if name not in names]
    problems += [f"{name}: in like, but not in the source" for name in names if name not in leaves]
    if problems:
        raise MappingError.listing("like has not the leaves of what is made", problems)
    placed = {leaf: leaves[name] for name, leaf in names.items()}
    return names, rebuild(like, lambda name, _: placed[name], adapters)


def _not_here(index: int) -> NDArray[np.generic]:
    raise AssertionError("the writer makes what it writes")
