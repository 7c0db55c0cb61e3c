"""Tied weights in a load: leaves that are missing, but that another leaf fills.

safetensors' and Hugging Face's files hold a tensor once, under one of its names. A model whose
weights are tied (``lm_head.weight`` is ``embed_tokens.weight``) has both names for one memory.

1. `ties` finds the leaves that the checkpoint lacks and that are all of another leaf's memory: the
   same boxes of the same shape and dtype, at the same addresses.
2. Leaves of one dict, such as a module's state dict, are tied on purpose: the one that is there
   fills both, and the load is whole (`filled_by_others`).
3. Others, such as an average that was not copied from the weights, stay missing; the error of a
   load in place says what they share memory with.
4. A load that makes new leaves makes one for both. The adapter says which likes share memory
   (`Adapter.memory_of`). There, one object under two names is not tied: it may be a mere pattern.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from xckpt.core.adapter import Adapters
from xckpt.core.leaf import TargetLeaf


def ties(targets: Mapping[str, TargetLeaf | None], stored: Collection[str]) -> dict[str, str]:
    """Name of a missing leaf -> that of a stored leaf that fills the same memory.

    Where several are stored, it is one of the same dict, if there is one.

    Args:
        targets: leaf name -> target; None for a Python value.
        stored: names of the checkpoint's leaves.

    Example:
        >>> import numpy as np
        >>> from xckpt.numpy import ADAPTER
        >>> w = np.zeros(3)
        >>> likes = {"a/w": w, "a/tied": w, "b/w": w, "a/part": w[:2], "a/other": np.zeros(3)}
        >>> targets = {n: ADAPTER.target_for(like, n, in_place=True) for n, like in likes.items()}
        >>> ties(targets, {"a/w"})
        {'a/tied': 'a/w', 'b/w': 'a/w'}
    """
    return _ties({name: _memory(target) for name, target in targets.items()}, stored)


def _ties(memory: Mapping[str, object], stored: Collection[str]) -> dict[str, str]:
    missing = [name for name in memory if name not in stored]
    wanted = {place for name in missing if (place := memory[name])}
    if not wanted:
        return {}
    fills: dict[object, str] = {}
    for name, place in memory.items():
        if name in stored and place in wanted:
            fills.setdefault(place, name)
            fills.setdefault((place, _dict_of(name)), name)
    found: dict[str, str] = {}
    for name in missing:
        place = memory[name]
        if other := fills.get((place, _dict_of(name))) or fills.get(place):
            found[name] = other
    return found


def filled_by_others(
    targets: Mapping[str, TargetLeaf | None],
    likes: Mapping[str, object],
    adapters: Adapters,
    stored: Collection[str],
) -> dict[str, str]:
    """Name of a missing leaf -> that of a stored leaf of the same dict that fills both.

    Args:
        targets: leaf name -> target; None for a Python value.
        likes: leaf name -> what it is to be like.
        adapters: know the memory of likes that are not filled themselves.
        stored: names of the checkpoint's leaves.
    """
    memory: dict[str, object] = {}
    new: set[str] = set()
    for name, target in targets.items():
        memory[name] = _memory(target)
        if target is None or memory[name] is not None:
            continue
        if adapter := adapters.owner(likes[name]):
            memory[name] = adapter.memory_of(likes[name])
            new.add(name)
    return {
        name: other
        for name, other in _ties(memory, stored).items()
        if _dict_of(name) == _dict_of(other) and not (name in new and likes[name] is likes[other])
    }


def _memory(target: TargetLeaf | None) -> object:
    """All of the caller's memory that a target fills; None where the load makes the memory.

    A rank may hold none of a tensor's elements; its tensors of that shape count as tied there, and
    the ranks that hold some decide.
    """
    where = getattr(target, "extent", None)
    if target is None or where is None or 0 in target.shape:
        return None
    boxes = [(box.offsets, box.sizes) for box in target.boxes]
    extents = [where(number) if 0 not in sizes else "" for number, (_, sizes) in enumerate(boxes)]
    if None in extents:
        return None
    return tuple(target.shape), target.dtype, tuple(boxes), tuple(extents)


def _dict_of(name: str) -> str:
    return name.rpartition("/")[0]
