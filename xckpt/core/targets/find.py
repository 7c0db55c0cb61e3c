"""What a target tree asks for: a target for each leaf, a place for a value, or nothing.

1. A Python value takes what is stored; a number also what a 0-d array holds
   (`xckpt.core.targets.numbers`).
2. What an adapter owns becomes a target. A like that says only where (a sharding) takes the stored
   shape and dtype first (`Adapter.prepared`).
3. A None takes a stored container without leaves. A function, and in a registered class (an
   Equinox module) any other object without elements, is part of the program, not of its state: it
   comes back untouched. `is_code` is the rule of saves, which put a None in the place of such
   functions.
4. A registered class around one leaf called ``value`` (``nnx.Param``) and the leaf itself are one
   (`with_names_of`): a state of NNX and its pure dict load into each other.
5. A leaf that the checkpoint lacks is filled by the stored one that it is tied to
   (`xckpt.core.targets.tied`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from xckpt.core.adapter import Adapters
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.plan.wanted import WantedLeaf
from xckpt.core.problem import Problem
from xckpt.core.targets.numbers import number_target
from xckpt.core.targets.objects import check_object_target
from xckpt.core.tree import FlatTree
from xckpt.core.values import value_kind
from xckpt.errors import UnsupportedLeafError

_VALUE = "/value"
_FIXED = ("tuple", "namedtuple:")
"""Kinds of containers that a load in place replaces in those around them."""
Stored = TensorStorageMetadata | BytesStorageMetadata | None


@dataclass(frozen=True, slots=True)
class Targets:
    """What was found for the leaves of a target tree."""

    wanted: dict[str, WantedLeaf | None] = field(default_factory=dict[str, WantedLeaf | None])
    """Leaf name -> what is wanted of it; None for a value."""
    untouched: dict[str, object] = field(default_factory=dict[str, object])
    """The leaves that are not state."""
    tied: dict[str, str] = field(default_factory=dict[str, str])
    """Leaf that the checkpoint lacks -> the leaf that fills both."""


def find_targets(
    likes: Mapping[str, object],
    metadata: Metadata,
    containers: Mapping[str, str],
    adapters: Adapters,
    *,
    in_place: Callable[[str], bool],
    deserialises: bool = False,
    ties: bool = False,
) -> Targets:
    """A target for each leaf of a tree.

    Args:
        likes: leaf name -> what it is to be like.
        metadata: the checkpoint's.
        containers: the tree's, by name, as `FlatTree` has them.
        adapters: know the frameworks' leaves.
        in_place: whether a leaf of this name is to be filled itself.
        deserialises: whether stored bytes may become objects.
        ties: whether a leaf may be filled by another that it is tied to.

    Raises:
        UnsupportedLeafError: targets that cannot be loaded; all are listed by name.
    """
    found = Targets()
    problems: list[str] = []
    for adapter in adapters.known:
        likes = adapter.prepared(likes, metadata)
    for name, like in likes.items():
        stored = metadata.state_dict_metadata.get(name)
        try:
            is_tensor = isinstance(stored, TensorStorageMetadata)  # as most are
            empty = like is None and stored is None and name in metadata.containers
            if not is_tensor and (empty or _untouched(like, name, stored, containers, adapters)):
                found.untouched[name] = like
            else:
                wanted = _want(like, name, stored, adapters, in_place(name))
                if wanted is None and value_kind(like) is None:
                    check_object_target(name, like, metadata, deserialises)
                found.wanted[name] = wanted
        except UnsupportedLeafError as error:
            problems.append(Problem.about(name, str(error)))
    problems += _not_replaced(found.wanted, likes, containers, metadata, in_place)
    if problems:
        raise UnsupportedLeafError.leaves("cannot be loaded into", problems)
    if ties and not found.wanted.keys() <= metadata.state_dict_metadata.keys():
        from xckpt.core.targets.tied import filled_by_others  # most loads lack nothing

        targets = {name: wanted and wanted.target for name, wanted in found.wanted.items()}
        about = likes, adapters, metadata.state_dict_metadata
        for name, other in filled_by_others(targets, *about).items():
            del found.wanted[name]
            found.tied[name] = other
    return found


def _not_replaced(
    wanted: Mapping[str, WantedLeaf | None],
    likes: Mapping[str, object],
    containers: Mapping[str, str],
    metadata: Metadata,
    in_place: Callable[[str], bool],
) -> Iterator[Problem]:
    """What a load in place cannot give its caller: values that lie in nothing but tuples."""
    for name in wanted if containers.get("", "").startswith(_FIXED) else ():
        around = name.rpartition("/")[0]
        while around and containers.get(around, "").startswith(_FIXED):
            around = around.rpartition("/")[0]
        is_value = value_kind(likes[name]) is not None or isinstance(likes[name], np.generic)
        if not around and is_value and name in metadata.state_dict_metadata and in_place(name):
            text = (
                "a value in a tuple at the root cannot be changed in place: put it into a dict or "
                "a list, or use xckpt.load, which returns a new one"
            )
            yield Problem(name, kind="type", text=text)


def _want(
    like: object, name: str, stored: Stored, adapters: Adapters, in_place: bool
) -> WantedLeaf | None:
    if kind := value_kind(like):
        number = number_target(name, kind, stored)
        return None if number is None else WantedLeaf(name, number)
    target = adapters.target_for(like, name, in_place=in_place)
    return None if target is None else WantedLeaf(name, target)


def _untouched(
    like: object, name: str, stored: Stored, containers: Mapping[str, str], adapters: Adapters
) -> bool:
    """Whether a leaf is not state: the checkpoint has no tensor for it and says nothing else."""
    if value_kind(like) is not None:
        return False
    if stored not in (None, BytesStorageMetadata("None")):
        return False
    has_elements = hasattr(like, "shape") and hasattr(like, "dtype")
    if has_elements or not (callable(like) or in_class(name, containers)):
        return False
    return not adapters.is_leaf(like)


def is_code(leaf: object, name: str, containers: Mapping[str, str]) -> bool:
    """Whether a leaf to be saved is a function in a registered class, which goes with the class.

    Args:
        leaf: no adapter's, and no Python value.
        name: the leaf's.
        containers: the tree's, by name, as `FlatTree` has them.

    Example:
        >>> is_code(print, "mlp/activation", {"mlp": "pytree:equinox.MLP"})
        True
        >>> is_code(print, "mlp/activation", {})
        False
    """
    return callable(leaf) and not hasattr(leaf, "shape") and in_class(name, containers)


def in_class(name: str, containers: Mapping[str, str]) -> bool:
    """Whether a leaf lies in an object of a registered class that is not a builtin collection."""
    while name:
        name = name.rpartition("/")[0]
        kind = containers.get(name, "")
        if kind.startswith("pytree:") and not kind.startswith("pytree:collections."):
            return True
    return False


def with_names_of(flat: FlatTree, metadata: Metadata) -> tuple[Metadata, dict[str, str]]:
    """The metadata with leaves named as in a target tree, and their names in the checkpoint.

    Only leaves that one side has in a class around their ``value`` are named otherwise.

    Example:
        >>> stored = Metadata({"bias": BytesStorageMetadata("int")})
        >>> flat = FlatTree({"bias/value": 0}, {"bias": "pytree:flax.nnx.variablelib.Param"})
        >>> renamed, names = with_names_of(flat, stored)
        >>> list(renamed.state_dict_metadata), names
        (['bias/value'], {'bias/value': 'bias'})
    """
    stored = metadata.state_dict_metadata
    names: dict[str, str] = {}
    for name in flat.leaves:
        if name in stored:
            continue
        inner = name.removesuffix(_VALUE)
        if inner != name and inner in stored and _is_class(flat.containers, inner):
            names[name] = inner
        elif name + _VALUE in stored and _is_class(metadata.containers, name):
            names[name] = name + _VALUE
    if not names:
        return metadata, names
    new = {old: name for name, old in names.items()}
    renamed = {new.get(old, old): leaf for old, leaf in stored.items()}
    return replace(metadata, state_dict_metadata=renamed), names


def _is_class(containers: Mapping[str, str], name: str) -> bool:
    return containers.get(name, "").startswith("pytree:")
