"""The tree that a conversion saves: a leaf for each target, and the source's Python values.

1. Without a mapping it is the source's own tree, as far as the source describes it.
2. With a mapping it is nested dicts with string keys, split at the names' slashes.
3. With a target tree it is that tree, containers included. It must have a place for each Python
   value of the source, and each of its own values must be in the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.conversion import Opened
from xckpt.convert.units.unit import WorkUnit
from xckpt.core.geometry.box import Boxes, Shape
from xckpt.core.leaf import LazySource
from xckpt.core.names import join_keys
from xckpt.core.text.arguments import named
from xckpt.core.tree import flatten, rebuild, unflatten
from xckpt.engine.adapters import loaded_adapters
from xckpt.errors import MappingError
from xckpt.formats.source import TensorSource
from xckpt.mapping.names import by_mapping_name, keys_of, tree_of


def find_places(opened: Opened, like: object) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Where the target's leaves, tensors and Python values, lie in its tree.

    Args:
        opened: the source, and what is made of it.
        like: the target's tree; None if it is not known.

    Returns:
        Mapping name -> leaf name, and the containers of the tree (see `xckpt.core.tree`).

    Raises:
        MappingError: Python values have no place, or the names of targets; all are listed.

    Example:
        >>> import xckpt
        >>> from xckpt.convert.conversion import Conversion
        >>> _ = xckpt.save("memory://placed", {"layers": [np.zeros(2)], "step": 7})
        >>> find_places(Conversion("memory://placed").open(), None)
        ({'layers/0': 'layers/0', 'step': 'step'}, {'layers': 'list'})
    """
    source, targets = opened.source, opened.resolved.targets
    _check_values(source, targets)
    names = {**targets, **source.values}
    if like is not None:
        return _places_in(like, names)
    if opened.as_it_is:
        return source.leaf_names, source.containers
    return {name: join_keys(keys_of(name)) for name in names}, {}


def target_tree(
    opened: Opened, units: Iterable[WorkUnit], like: object
) -> tuple[Mapping[str, str], Mapping[str, object]]:
    """Mapping name -> leaf name, and the tree to save: a `LazySource` for each tensor.

    Args:
        opened: see `find_places`.
        units: those that this rank makes.
        like: see `find_places`.

    Raises:
        MappingError: see `find_places`; or leaves lie inside others. All such are listed.

    Example:
        >>> import xckpt
        >>> from xckpt.convert.conversion import Conversion
        >>> _ = xckpt.save("memory://planted", {"layers": [np.zeros(2)], "step": 7})
        >>> names, tree = target_tree(Conversion("memory://planted").open(), [], None)
        >>> names, tree["layers"][0].shape, tree["step"]
        ({'layers/0': 'layers/0', 'step': 'step'}, (2,), 7)
    """
    leaf_names, containers = find_places(opened, like)
    leaves = {**_tensors(opened, units), **opened.source.values}
    by_leaf_name = {leaf: leaves[name] for name, leaf in leaf_names.items()}
    tree: object
    if like is not None:
        tree = rebuild(like, lambda name, _: by_leaf_name[name], loaded_adapters())
    elif opened.as_it_is:
        tree = unflatten(by_leaf_name, containers)
    else:
        tree = tree_of(leaves)
    return leaf_names, tree  # type: ignore[return-value]  # our planners take any tree


def _check_values(source: TensorSource, targets: Mapping[str, object]) -> None:
    both = sorted(set(source.values) & set(targets))
    if both:
        raise MappingError.listing(
            "Python values of the source have the names of targets; rename the targets",
            [f"{name}: {named(type(source.values[name]).__name__)}" for name in both],
        )


def _tensors(opened: Opened, units: Iterable[WorkUnit]) -> dict[str, object]:
    """Target tensor -> the boxes of it that units make."""
    boxes: defaultdict[str, list[tuple[Shape, Shape]]] = defaultdict(list)
    for unit in units:
        for part in unit.parts:
            boxes[part.name].append((part.box.offsets, part.box.sizes))
    source = opened.source
    shardings = source.shardings if opened.as_it_is else {}
    annotations = source.annotations if opened.as_it_is else {}
    return {
        name: LazySource(
            spec.shape,
            spec.dtype,
            Boxes.of(boxes[name], rank=len(spec.shape)),
            _not_here,
            sharding=shardings.get(name),
            annotation=annotations.get(name, ""),
        )
        for name, spec in opened.resolved.targets.items()
    }


def _places_in(like: object, names: Collection[str]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Where the leaves of a tree are that has just these."""
    flat = flatten(like, loaded_adapters())
    known = by_mapping_name(flat.leaves)
    problems = [f"{name}: in the source, but not in like" for name in names if name not in known]
    problems += [f"{name}: in like, but not in the source" for name in known if name not in names]
    if problems:
        raise MappingError.listing("like does not have the leaves that are made", problems)
    return known, flat.containers


def _not_here(index: int) -> NDArray[np.generic]:
    raise AssertionError("the writer makes what it writes")
