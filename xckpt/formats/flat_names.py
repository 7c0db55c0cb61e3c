"""Mapping names -> the flat names of a format that has no nesting (safetensors, torch state dicts).

The other way needs no function: a flat name, dots and all, is one key of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable

from xckpt.errors import UnsupportedLeafError
from xckpt.mapping.names import keys_of


def flat_names(names: Iterable[str]) -> dict[str, str]:
    """Mapping name -> its keys joined with dots.

    Raises:
        UnsupportedLeafError: two names become one; all such are listed.

    Example:
        >>> flat_names(["params/dense/kernel", "model.layers.0.weight"])
        {'params/dense/kernel': 'params.dense.kernel',
         'model.layers.0.weight': 'model.layers.0.weight'}
    """
    joined: dict[str, str] = {}
    owners: dict[str, str] = {}
    problems: list[str] = []
    for name in names:
        joined[name] = ".".join(keys_of(name))
        owner = owners.setdefault(joined[name], name)
        if owner != name:
            problems.append(f"{name}: joined with dots, its name is that of {owner}")
    if problems:
        raise UnsupportedLeafError.listing("the format has flat names, and some collide", problems)
    return joined
