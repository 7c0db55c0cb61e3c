"""What DCP calls a leaf (its fqn) <-> the leaf's name in a checkpoint.

DCP flattens nested dicts and lists into fqns, key paths joined with dots, and its planners keep the
key path of each in their ``planner_data``. A checkpoint keeps the tree.

To save (`name_leaves`):

1. The key path of an fqn comes from any rank's mapping; without one the fqn is a single key.
2. The leaf's name is the key path joined as everywhere (`xckpt.core.names`).
3. An int in a key path is a list's index, so the container above it is recorded as a list.

To load (`stored_objects`):

1. Walk the saved tree as DCP would walk it: into dicts, and into lists that hold a tensor, a dict
   or another such list. A container that it does not walk into (a tuple, or a list of plain values)
   is one object to DCP.
2. The fqn is the key path joined with dots, unless the save noted another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from xckpt.core.names import KeyPath, join_keys, split_name
from xckpt.core.tree import flatten, unflatten
from xckpt.errors import ManifestError, PlanError, TreeMismatchError

METADATA_FILE: Final = ".metadata"
"""The file that describes a DCP folder."""


@dataclass(frozen=True, slots=True)
class LeafNames:
    """The leaves of a save.

    Example:
        >>> LeafNames({"model.w": "model/w", "a.b": "x"}, {}).odd
        {'x': 'a.b'}
    """

    names: dict[str, str]
    """fqn -> leaf name, in the order of the leaves."""
    containers: dict[str, str]
    """Name of each list -> ``"list"``."""

    @property
    def paths(self) -> dict[str, KeyPath]:
        """fqn -> key path."""
        return {fqn: split_name(name) for fqn, name in self.names.items()}

    @property
    def odd(self) -> dict[str, str]:
        """Leaf name -> fqn, for leaves whose fqn does not follow from the name."""
        return {self.names[fqn]: fqn for fqn, path in self.paths.items() if join_fqn(path) != fqn}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that DCP knows by one fqn: a leaf, or a list or tuple that is one object to DCP.

    Example:
        >>> StoredObject(("betas",), ("betas/0", "betas/1")).leaves
        ['betas/0', 'betas/1']
    """

    path: KeyPath
    """The key path as DCP writes it: an int is a list's index, all else is a str."""
    node: object
    """A leaf name, or lists, tuples and dicts of leaf names."""

    @property
    def leaf(self) -> str | None:
        """The leaf's name, if it is one."""
        return self.node if isinstance(self.node, str) else None

    @property
    def leaves(self) -> list[str]:
        """The names of all leaves in it."""
        return [str(name) for name in flatten(self.node).leaves.values()]

    def build(self, values: Mapping[str, object]) -> object:
        """The object with a value for each leaf name; a namedtuple becomes a tuple.

        Example:
            >>> StoredObject(("betas",), ("betas/0", "betas/1")).build({"betas/0": 1, "betas/1": 2})
            (1, 2)
        """
        return _build(self.node, values)


def join_fqn(path: KeyPath) -> str:
    """The fqn that DCP gives to a key path.

    Example:
        >>> join_fqn(("opt", 0, "mu"))
        'opt.0.mu'
    """
    return ".".join(map(str, path))


def key_paths(planner_data: object) -> dict[str, KeyPath]:
    """The flattening mapping in a planner's data: fqn -> key path; empty if there is none.

    Example:
        >>> key_paths({"a.b": ("a", "b"), "run": "mine"})
        {'a.b': ('a', 'b')}
    """
    if not isinstance(planner_data, Mapping):
        return {}
    return {
        fqn: path
        for fqn, path in planner_data.items()
        if isinstance(fqn, str)
        and isinstance(path, tuple)
        and path
        and all(type(key) in (str, int) for key in path)
    }


def name_leaves(fqns: Iterable[str], mappings: Iterable[Mapping[str, KeyPath]]) -> LeafNames:
    """The names of the leaves that DCP knows by their fqns.

    Raises:
        PlanError: two fqns lead to one leaf, or a leaf would also be a container.

    Example:
        >>> name_leaves(["model.w", "x.y"], [{"model.w": ("model", "w")}]).names
        {'model.w': 'model/w', 'x.y': 'x.y'}
    """
    paths: dict[str, KeyPath] = {}
    for mapping in mappings:
        paths.update(mapping)
    chosen = {fqn: paths.get(fqn, (fqn,)) for fqn in dict.fromkeys(fqns)}
    names = {fqn: join_keys(path) for fqn, path in chosen.items()}
    takers: dict[str, str] = {}
    problems: list[str] = []
    for fqn, name in names.items():
        other = takers.setdefault(name, fqn)
        if other != fqn:
            problems.append(f"{name}: both {other!r} and {fqn!r} lead there")
    # With gaps, ints stay keys of a dict: a pipeline stage may have some entries of a list.
    containers = {
        join_keys(path): "list"
        for path, below in keys_below(chosen.values()).items()
        if below == set(range(len(below)))
    }
    try:
        unflatten(dict.fromkeys(names.values()), containers)
    except ManifestError as error:
        problems.append(str(error))
    if problems:
        raise PlanError.listing("the planner's keys make no tree", problems)
    return LeafNames(names, containers)


def stored_objects(
    leaves: Iterable[str],
    containers: Mapping[str, str],
    is_tensor: Callable[[str], bool],
    odd: Mapping[str, str],
) -> dict[str, StoredObject]:
    """fqn -> what a checkpoint holds under it.

    Args:
        leaves: the names of all leaves.
        containers: the checkpoint's; see `xckpt.core.tree`.
        is_tensor: whether a leaf is one.
        odd: leaf name -> fqn, where the save noted one.

    Raises:
        TreeMismatchError: several leaves have one fqn; all are listed.

    Example:
        >>> objects = stored_objects(["a/b", "c/0"], {"c": "list"}, lambda name: name == "c/0", {})
        >>> {fqn: stored.path for fqn, stored in objects.items()}
        {'a.b': ('a', 'b'), 'c.0': ('c', 0)}
    """
    tree = unflatten({name: name for name in leaves}, containers)
    objects: dict[str, StoredObject] = {}
    problems: list[str] = []
    for path, node in _walk(tree, (), is_tensor):
        name = node if isinstance(node, str) else join_keys(path)
        fqn = odd.get(name, join_fqn(path))
        before = objects.setdefault(fqn, StoredObject(path, node))
        if before.node is not node:
            problems.append(f"{fqn}: both {before.leaf or before.path} and {name}")
    if problems:
        raise TreeMismatchError.listing(
            "torch.distributed.checkpoint joins keys with dots, and two leaves have one name "
            "there; load them with xckpt.load",
            problems,
        )
    return objects


def keys_below(paths: Iterable[KeyPath]) -> dict[KeyPath, set[str | int]]:
    """Key path of each container -> its keys.

    Example:
        >>> keys_below([("a", "b"), ("a", "c")])[("a",)] == {"b", "c"}
        True
    """
    keys: dict[KeyPath, set[str | int]] = {}
    for path in paths:
        for depth, key in enumerate(path):
            keys.setdefault(path[:depth], set()).add(key)
    return keys


def _walk(
    node: object, path: KeyPath, is_tensor: Callable[[str], bool]
) -> Iterator[tuple[KeyPath, object]]:
    """The objects that are leaves to DCP, in order, each with its key path."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(child, (*path, str(key)), is_tensor)
    elif isinstance(node, list) and not _is_object(node, is_tensor):
        for index, child in enumerate(node):
            yield from _walk(child, (*path, index), is_tensor)
    else:
        yield path, node


def _is_object(node: object, is_tensor: Callable[[str], bool]) -> bool:
    """Whether DCP counts an entry of a list as part of one object."""
    if isinstance(node, dict):
        return False
    if isinstance(node, list):
        return all(_is_object(child, is_tensor) for child in node)
    return not (isinstance(node, str) and is_tensor(node))


def _build(node: object, values: Mapping[str, object]) -> object:
    if isinstance(node, str):
        return values[node]
    if isinstance(node, dict):
        return {key: _build(child, values) for key, child in node.items()}
    assert isinstance(node, list | tuple)
    children = [_build(child, values) for child in node]
    return children if isinstance(node, list) else tuple(children)
