"""Mapping names: what rules call the leaves of a tree, whether it is nested or flat.

1. A mapping name is the key path joined with ``/``, each key as its text: the int key 0 and the
   string "0" are one, since a layer's number is the one here and the other there.
2. Inside a key, ``%`` and ``/`` become ``%25`` and ``%2F``.
3. `by_mapping_name` turns leaf names into mapping names; two leaves of one name are refused.
4. `tree_of` makes nested dicts with string keys of mapping names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from xckpt.core.names import join_keys, split_name
from xckpt.core.tree import unflatten
from xckpt.errors import ManifestError, MappingError


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


def by_mapping_name(leaf_names: Iterable[str]) -> dict[str, str]:
    """Mapping name -> leaf name.

    Raises:
        MappingError: two leaves have one mapping name; all such are listed.

    Example:
        >>> by_mapping_name(["layers/0/w", "%30/w"])
        {'layers/0/w': 'layers/0/w', '0/w': '%30/w'}
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    for leaf in leaf_names:
        name = mapping_name(split_name(leaf))
        if name in found:
            problems.append(f"{name}: {found[name]} and {leaf} are two leaves with this name")
        found[name] = leaf
    if problems:
        raise MappingError.listing("a mapping cannot tell some leaves apart", problems)
    return found


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
