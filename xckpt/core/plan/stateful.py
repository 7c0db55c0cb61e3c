"""Loading into objects that keep their own state: models, optimizers, schedulers, data loaders.

Such an object gives its state as a dict (`ObjectState.tree`), and takes one. Its state now may have
another shape than its state when it was saved: a new optimizer has no moments yet, a history is
shorter. So the checkpoint decides wherever the object has nothing to load into:

1. `places` finds those: a None, an empty dict, and a list or tuple without tensors in it, if the
   checkpoint has anything there.
2. At such a place the leaves and containers are the checkpoint's. The object gives a target for
   each tensor there (`ObjectState.like`); it is always a new one.
3. So it does under the keys where the object takes what it gave in any form
   (`ObjectState.opaque`), as modules of torch take their extra state.
4. An empty dict that is stored for the states of an optimizer is their state. What the optimizer
   has made since is neither loaded nor kept (`ObjectState.clears`, `cleared`).
5. Everywhere else the object's leaves are targets as in any tree, and none is filled in place if
   the object takes new tensors in their place (`ObjectState.replaces`). `PerRank.all`, which has
   none, is a leaf itself where the checkpoint has nothing for it: else no error would name it.
6. What the object takes in one length alone, such as an optimizer's lists of parameters, has to
   have that length in the checkpoint (`ObjectState.lengths`, `misfits`).
7. Once all is read, the state is built from both, and handed to the object.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

from xckpt.core.adapter import Adapters
from xckpt.core.leaf import ObjectState
from xckpt.core.metadata import Metadata, TensorStorageMetadata
from xckpt.core.names import component, join_keys, split_name
from xckpt.core.part.per_rank import NOT_IN_PLACE, AllRanks
from xckpt.core.problem import Problem
from xckpt.core.tree import FlatTree, rebuild, unflatten
from xckpt.core.values import value_kind


class Names:
    """Leaf or container names, and a quick way to those at and below a place.

    Example:
        >>> Names(["a/b/c", "a", "a-b", "a/b"]).below("a/b")
        ['a/b/c', 'a/b']
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self._names)}

    @cached_property
    def _sorted(self) -> Sequence[str]:
        return sorted(self._names)

    def below(self, name: str) -> list[str]:
        """The name itself, if it is one of these, and those beneath it, in the order given."""
        if not name:
            return list(self._names)
        itself = [name] if name in self._places else []
        # "0" is what follows "/".
        first, last = (bisect_left(self._sorted, name + end) for end in "/0")
        return sorted([*itself, *self._sorted[first:last]], key=self._places.__getitem__)


def places(
    flat: FlatTree, name: str, stored: Names, opaque: Collection[str | int] = ()
) -> list[str]:
    """Where an object has nothing to load into, but a checkpoint has something.

    Args:
        flat: the leaves and containers of the tree that the object is in.
        name: the object's.
        stored: names of the checkpoint's leaves and containers.
        opaque: keys under which the object takes anything.

    Example:
        >>> flat = FlatTree({"opt/lr": 0.1, "opt/best": None}, {"opt/state": "dict"})
        >>> stored = Names(["opt/best", "opt/lr", "opt/state", "opt/state/0/mu"])
        >>> places(flat, "opt", stored)
        ['opt/best', 'opt/state']
    """
    leaves = Names(flat.leaves)
    taken_as_given = (_at(name, key) for key in opaque)
    open_places = {place: None for place in taken_as_given if stored.below(place)}
    open_to_all = {leaf for leaf, value in flat.leaves.items() if value is None}
    open_to_all |= {at for at, kind in flat.containers.items() if kind in ("dict", "list", "tuple")}
    # An outer place comes before the places inside it.
    for place in sorted(Names(open_to_all).below(name)):
        if any(outer in open_places for outer in (place, *_outer(place))):
            continue
        has_tensors = any(value_kind(flat.leaves[leaf]) is None for leaf in leaves.below(place))
        # A leaf stored under the object's own name, not below it, is not its state.
        if not has_tensors and set(stored.below(place)) - {name}:
            open_places[place] = None
    return list(open_places)


def cleared(
    state: ObjectState, name: str, own: Names, known: Names, kinds: Mapping[str, str]
) -> list[str]:
    """Where an object has leaves, but the checkpoint says for certain that its state is empty.

    Args:
        state: the object's.
        name: the object's.
        own: names of the leaves of the tree that the object is in.
        known: names of the checkpoint's leaves and containers.
        kinds: container name -> kind, the checkpoint's.
    """
    return [
        place
        for place in (_at(name, key) for key in state.clears)
        if kinds.get(place) == "dict" and known.below(place) == [place] and own.below(place)
    ]


def misfits(
    state: ObjectState, name: str, known: Names, kinds: Mapping[str, str]
) -> Iterator[Problem]:
    """The lists that the checkpoint holds in another length than an object takes.

    Args:
        state: the object's.
        name: the object's.
        known: names of the checkpoint's leaves and containers.
        kinds: container name -> kind, the checkpoint's.
    """
    for keys, (length, held) in state.lengths.items():
        place = join_keys((*split_name(name), *keys))
        inside = (_from(each, place) for each in known.below(place) if each != place)
        there = len({each.partition("/")[0] for each in inside})
        if there != length and kinds.get(place) == "list":
            text = (
                f"{there} in the checkpoint, {length} in the target, which takes no other number "
                f"of {held}: give it those that were saved, or load the rest alone (select=)"
            )
            yield Problem(place, kind="length", text=text)


class LoadedObjects:
    """The objects of a target tree, and what of the checkpoint goes to each.

    Raises:
        TypeError: `PerRank.all` is to be loaded in place.
    """

    def __init__(
        self, flat: FlatTree, metadata: Metadata, adapters: Adapters, *, in_place: bool = False
    ) -> None:
        self.flat = flat
        # Without objects they are the tree's leaves, of which there may be very many.
        self.likes: Final = dict(flat.leaves) if flat.objects else flat.leaves
        """Leaf name -> target, for the whole tree."""
        self.cleared: list[str] = []
        """The leaves that are gone once all is loaded: the checkpoint says that there are none."""
        self.problems: list[Problem] = []
        """Why states cannot be handed to their objects."""
        self.fresh: set[str] = set()
        """The targets that stand for new leaves, even in a load in place."""
        self._metadata = metadata
        self._adapters = adapters
        self._stored = Names(metadata.state_dict_metadata)
        self._places: dict[str, list[str]] = {}
        """Object name -> the places where the checkpoint decides; none is inside another."""
        own = Names(flat.leaves)
        known = Names([*metadata.state_dict_metadata, *metadata.containers])
        for name, state in flat.objects.items():
            self._places[name] = places(flat, name, known, state.opaque)
            emptied = cleared(state, name, own, known, metadata.containers)
            self._places[name] += emptied
            self.cleared += (leaf for place in emptied for leaf in own.below(place))
            self.fresh.update(own.below(name) if state.replaces else ())
            if in_place:  # else it is returned, and the caller may change it
                self.problems += misfits(state, name, known, metadata.containers)
            if isinstance(state, AllRanks):
                if in_place:
                    raise TypeError(f"{name or 'the root'}: {NOT_IN_PLACE}")
                if name and not known.below(name):
                    self.likes[name] = None
            for place in self._places[name]:
                for leaf in own.below(place):
                    del self.likes[leaf]
                for leaf in self._stored.below(place):
                    self.likes[leaf] = self._like(state, leaf, name)
                    self.fresh.add(leaf)

    def states(self, loaded: Mapping[str, object]) -> dict[str, object]:
        """Object name -> its loaded state.

        Args:
            loaded: leaf name -> what was loaded.
        """
        kinds = self._metadata.containers
        containers = Names(kinds)
        states: dict[str, object] = {}
        for name, state in self.flat.objects.items():
            finished: dict[str, object] = {}
            for place in self._places[name]:
                leaves = {_from(leaf, place): loaded[leaf] for leaf in self._stored.below(place)}
                inside = {_from(at, place): kinds[at] for at in containers.below(place)}
                finished[place] = unflatten(leaves, inside)
            states[name] = rebuild(
                state.tree,
                lambda leaf, _: loaded[leaf],
                self._adapters,
                at=split_name(name),
                finished=finished,
            )
        return states

    def hand_over(self, loaded: Mapping[str, object]) -> None:
        """Give each object its loaded state; what one raises names it."""
        for name, tree in self.states(loaded).items():
            try:
                self.flat.objects[name].load(tree)
            except Exception as error:
                error.add_note(f"{name or 'the root'}: its load_state_dict() failed.")
                raise

    def _like(self, state: ObjectState, leaf: str, name: str) -> object:
        stored = self._metadata.state_dict_metadata[leaf]
        if not isinstance(stored, TensorStorageMetadata):
            return None
        keys = split_name(_from(leaf, name))
        return state.like(keys, tuple(stored.size), stored.properties.dtype)


def _at(name: str, key: str | int) -> str:
    """The name of what an object has under a key."""
    return f"{name}/{component(key)}" if name else component(key)


def _outer(name: str) -> Iterator[str]:
    """The names of the containers around a place."""
    while name:
        name = name.rpartition("/")[0]
        yield name


def _from(name: str, place: str) -> str:
    """A name as it is seen from a place above it."""
    return name[len(place) + 1 :] if place else name
