"""Finding an optimizer's moments in a state, and the parameter of each.

torch names them in three ways: ``state/3/exp_avg`` (a number in the order of the parameters, as
``Optimizer.state_dict`` has it), ``state/layers.0.weight/exp_avg`` (a name, as
``get_optimizer_state_dict`` has it) and ``state.layers.0.weight.exp_avg`` (that flattened). Optax
holds trees like the parameters': ``opt_state/0/mu/params/layers/0/kernel``, deeper in a chain.

1. `find_moments` looks for these names, and keeps those whose parameter is a leaf of the state.
2. Each *slot* (first moment, second moment, ...) is then a table: parameter -> leaf.
3. The steps are torch's one number for each parameter, or Optax's ``count`` beside the moments, and
   the ``step`` of a training state that holds the optimizer's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from xckpt.core.names import split_name
from xckpt.core.tree import flatten
from xckpt.engine.adapters import loaded_adapters
from xckpt.errors import MappingError
from xckpt.mapping.names import mapping_name, metadata_of, specs_of
from xckpt.mapping.operations.base import is_table
from xckpt.mapping.spec import TensorSpec

SLOTS = {
    "exp_avg": "first moment",
    "mu": "first moment",
    "exp_avg_sq": "second moment",
    "nu": "second moment",
    "max_exp_avg_sq": "largest second moment",
    "nu_max": "largest second moment",
    "momentum_buffer": "momentum",
    "trace": "momentum",
}
"""A framework's name of a slot -> the slot."""

SIBLINGS = {"mu": "nu", "nu": "mu", "nu_max": "nu"}
"""Optax's slots that have another beside them, so that no model's layer is taken for one."""

TORCH_SLOTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
OPTAX_SLOTS = ("mu", "nu", "nu_max", "trace")

_TORCH = re.compile(
    rf"(?P<before>(?:.*[/.])?state(?P<mark>[/.]))(?P<key>.+)"
    rf"(?P<after>(?P=mark)(?P<slot>{'|'.join(TORCH_SLOTS)}|step))"
)
_OPTAX = re.compile(rf"(?<![^/])(?P<slot>{'|'.join(OPTAX_SLOTS)})/")
_LISTED = re.compile(r"(?P<root>(?:.*/)?)param_groups/(\d+)/(?P<what>params|param_names)/(\d+)")


@dataclass(frozen=True, slots=True)
class MomentLeaf:
    """The leaf of a moment.

    Example:
        >>> MomentLeaf("opt/0/mu/", "fc/kernel", "", "mu", TensorSpec((2,), "float32")).leaf
        'opt/0/mu/fc/kernel'
    """

    before: str
    key: str
    """The parameter's name, or the end of it; or its number."""
    after: str
    slot: str
    """The framework's name of it; torch's ``step`` too."""
    spec: TensorSpec
    """Shape and dtype."""
    is_number: bool = False
    """Whether `key` is a number."""

    @property
    def leaf(self) -> str:
        """The leaf's name."""
        return f"{self.before}{self.key}{self.after}"


@dataclass(frozen=True, slots=True)
class Moments:
    """The optimizer's leaves of a state."""

    specs: Mapping[str, TensorSpec]
    """Every tensor of the state."""
    slots: dict[str, dict[str, MomentLeaf]] = field(
        default_factory=dict[str, dict[str, MomentLeaf]]
    )
    """Slot -> name of a parameter's leaf -> where its moment is."""
    steps: list[str] = field(default_factory=list[str])
    """Leaves that hold the number of steps."""

    @property
    def leaves(self) -> set[str]:
        """All leaves of the optimizer."""
        moments = {place.leaf for slot in self.slots.values() for place in slot.values()}
        return moments | set(self.steps)


_Place = tuple[int, int]
"""A parameter group's number, and a parameter's place in the group."""

ParameterNames = Sequence[str] | Sequence[Sequence[str]]
"""Names of parameters in the order in which torch's optimizer numbers them: those of its one
group, or a sequence of names for each of its groups."""


def find_moments(state: object, parameters: ParameterNames | None = None) -> Moments:
    """The moments of a state.

    Args:
        state: a tree of the model's leaves and the optimizer's; or a flat dict of `TensorSpec` and
            Python values by mapping name.
        parameters: names of torch's parameters, for moments that are numbered; by default the
            state's own ``param_names``.

    Raises:
        MappingError: moments are numbered and nothing names their parameters, or a moment belongs
            to no parameter of the state, or to several; all such are listed. Or ``parameters`` are
            not those of the optimizer's groups.

    Example:
        >>> import numpy as np
        >>> moment = {"exp_avg": np.zeros(2), "exp_avg_sq": np.zeros(2), "step": np.zeros(())}
        >>> moments = find_moments({"model": {"w": np.zeros(2)}, "optim": {"state": {"w": moment}}})
        >>> {owner: place.leaf for owner, place in moments.slots["first moment"].items()}
        {'model/w': 'optim/state/w/exp_avg'}
        >>> moments.steps
        ['optim/state/w/step']
    """
    specs, values = _contents(state)
    numbers = _numbers(values, parameters)
    places = [place for name in specs if (place := _place(name, specs))]
    moments = Moments(specs)
    by_ending = _by_ending(specs.keys() - {place.leaf for place in places})
    problems: list[str] = []
    for place in places:
        if place.slot == "step":
            moments.steps.append(place.leaf)
            continue
        key = place.key
        if place.is_number:
            root = place.before.removesuffix("state/")
            key = numbers.get((root, key), numbers.get(("", key), ""))
        owners = by_ending.get(key, [])
        candidates = [key] if key in owners else owners
        slot = moments.slots.setdefault(SLOTS[place.slot], {})
        if len(candidates) == 1:
            other = slot.setdefault(candidates[0], place)
            if other is not place:
                problems.append(f"{other.leaf} and {place.leaf}: both are of {candidates[0]}")
        else:
            problems.append(_unknown(key, place, owners))
    moments.steps.extend(_counts(specs, places))
    if problems:
        raise MappingError.listing("the parameters of some moments are unknown", problems)
    return moments


def _place(name: str, specs: Mapping[str, TensorSpec]) -> MomentLeaf | None:
    """The part of a leaf's name that identifies a moment's parameter; None for other leaves."""
    if match := _TORCH.fullmatch(name):
        before, key, after = match["before"], match["key"], match["after"]
        beside = (f"{before}{key}{match['mark']}{slot}" in specs for slot in TORCH_SLOTS)
        if match["slot"] != "step" or any(beside):
            is_number = match["mark"] == "/" and key.isdigit()
            return MomentLeaf(before, key, after, match["slot"], specs[name], is_number)
    for match in _OPTAX.finditer(name):
        root, key = name[: match.start()], name[match.end() :]
        sibling = SIBLINGS.get(match["slot"])
        if key and (sibling is None or f"{root}{sibling}/{key}" in specs):
            return MomentLeaf(name[: match.end()], key, "", match["slot"], specs[name])
    return None


def _contents(state: object) -> tuple[dict[str, TensorSpec], dict[str, object]]:
    """Tensors and Python values by mapping name."""
    if is_table(state) and any(isinstance(value, TensorSpec) for value in state.values()):
        specs = {name: each for name, each in state.items() if isinstance(each, TensorSpec)}
        return specs, {name: each for name, each in state.items() if name not in specs}
    values: dict[str, object] = {
        mapping_name(split_name(name)): leaf
        for name, leaf in _leaves(state).items()
        if isinstance(leaf, bool | int | float | str)
    }
    return specs_of(state), values


def _leaves(state: object) -> Mapping[str, object]:
    """The leaves of a tree, or of an open checkpoint, by leaf name."""
    if metadata_of(state) is not None:
        return cast("Mapping[str, object]", state)
    return flatten(state, loaded_adapters()).leaves


def _numbers(
    values: Mapping[str, object], parameters: ParameterNames | None
) -> dict[tuple[str, str], str]:
    """(optimizer, number as text) -> name of the parameter that the optimizer numbers so.

    An optimizer is what stands before its leaf names; ``""`` if none says which numbers it has.
    """
    numbers: defaultdict[str, dict[_Place, object]] = defaultdict(dict)
    names: defaultdict[str, dict[_Place, object]] = defaultdict(dict)
    for name, value in values.items():
        if match := _LISTED.fullmatch(name):
            listed = numbers if match["what"] == "params" else names
            listed[match["root"]][int(match[2]), int(match[4])] = value
    if parameters is not None:
        roots = sorted({*numbers, *names})
        if len(roots) > 1:
            raise MappingError(
                f"the state has the optimizers {', '.join(roots)}, each with numbers of "
                "its own, and parameters= is about one; save what get_optimizer_state_dict gives"
            )
        [root] = roots or [""]
        given = _by_place(parameters, numbers[root])
        _check_names(given, names[root])
        names[root] = given
        if not numbers[root]:
            return {
                ("", str(number)): str(name) for number, name in enumerate(names[root].values())
            }
    return {
        (root, str(number)): str(names[root][place])
        for root, places in numbers.items()
        for place, number in places.items()
        if place in names[root]
    }


def _check_names(given: Mapping[_Place, object], stored: Mapping[_Place, object]) -> None:
    """Refuse the names that the optimizer has, in another order."""
    known = set(stored.values())
    problems = [
        f"group {place[0]}, place {place[1]}: {name}, where the optimizer has {stored[place]}"
        for place, name in given.items()
        if name in known and stored.get(place, name) != name
    ]
    if problems:
        raise MappingError.listing(
            "parameters= has another order than the optimizer's own param_names: leave it out, "
            "or give their order",
            problems,
        )


def _by_place(parameters: ParameterNames, listed: Mapping[_Place, object]) -> dict[_Place, object]:
    """Place -> the parameter's name, for as many as the groups have.

    torch numbers parameters group by group, whatever their order in the model is.
    """
    flat = [each for each in parameters if isinstance(each, str)]
    groups = [flat] if flat or not parameters else [list(each) for each in parameters]
    wanted = Counter(group for group, _ in listed)
    given = {number: len(group) for number, group in enumerate(groups)}
    if listed and given != wanted:
        sizes = ", ".join(str(wanted[group]) for group in sorted(wanted))
        raise MappingError(
            f"the optimizer has {len(wanted)} parameter groups, of {sizes} parameters, and numbers "
            f"them group by group; parameters= has {', '.join(map(str, given.values()))}: give a "
            "list of names for each group, parameters=[[...], ...], in the order of "
            "optimizer.param_groups"
        )
    return {
        (group, place): name
        for group, names in enumerate(groups)
        for place, name in enumerate(names)
    }


def _by_ending(names: Iterable[str]) -> dict[str, list[str]]:
    """The end of a name, from some key on -> the names that have it."""
    by_ending: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        keys = name.split("/")
        for start in range(len(keys)):
            by_ending["/".join(keys[start:])].append(name)
    return by_ending


def _unknown(key: str, place: MomentLeaf, owners: Sequence[str]) -> str:
    """Why the parameter of a moment is not known."""
    if place.is_number and not key:
        return (
            f"{place.leaf}: nothing says which parameter number {place.key} is; pass "
            "parameters= (the names of each parameter group, in its order), or save what "
            "get_optimizer_state_dict gives"
        )
    which = f"may be any of {' and '.join(owners)}" if owners else "is no parameter"
    return f"{place.leaf}: its parameter {key!r} {which}"


def _counts(specs: Mapping[str, TensorSpec], places: Sequence[MomentLeaf]) -> list[str]:
    """Integer scalars called ``count`` near Optax's moments, and ``step`` of the whole state."""
    optax = [place.before for place in places if place.slot in OPTAX_SLOTS]
    if not optax:
        return []
    # The optimizer's own container: "opt_state/" of "opt_state/1/0/mu/".
    outermost = {before.split("/")[0] + "/" for before in optax}
    outer = outermost.pop() if len(outermost) == 1 else ""
    counts: list[str] = []
    for name, spec in specs.items():
        *above, last = name.split("/")
        inside = last == "count" and name.startswith(outer)
        if spec.shape == () and "int" in spec.dtype and (inside or (last == "step" and not above)):
            counts.append(name)
    return counts
