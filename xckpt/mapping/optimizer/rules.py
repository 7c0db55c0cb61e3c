"""Rules for optimizer states: moments follow their parameter, step counts their counterparts.

1. A mapping speaks of a model's leaves. `with_optimizer` finds where these lie in the two states,
   and where the optimizer's leaves lie (`xckpt.mapping.optimizer.states`).
2. For each rule, and each slot that both optimizers have, there is one more rule: the parameters'
   names replaced by their moments', the operations the same. A moment is laid out as its parameter
   is, so an exact operation on the one is the operation on the other.
3. A lossy operation is refused: the gradient of ``scale * w`` is not scaled as ``w`` is, and a
   square of it is scaled otherwise again. A cast is left out: moments have dtypes of their own,
   which are cast into one another where they differ.
4. All counts of steps must be equal, which is asserted on the data, and become all counts of the
   other side.

The hyperparameters (rates, decays) are no tensors of either state: they stay with the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from xckpt.errors import MappingError
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.match import match_rules
from xckpt.mapping.operations import Cast, Each, Operation, Pad, Strip, Tie, Untie
from xckpt.mapping.optimizer.moments import moment_pattern
from xckpt.mapping.optimizer.states import MomentLeaf, Moments, find_moments
from xckpt.mapping.pattern import Pattern, literal, skeleton
from xckpt.mapping.rule import Rule


def with_optimizer(
    mapping: LeafMapping,
    source: object,
    target: object,
    *,
    parameters: Sequence[str] | None = None,
) -> LeafMapping:
    """The mapping of a whole training state, from the mapping of its model.

    Both states hold the model's leaves and the optimizer's, under names of their own: say
    ``{"model": ..., "optim": ...}`` and ``{"params": ..., "opt_state": ...}``. torch's ``exp_avg``
    is Optax's ``mu``, ``exp_avg_sq`` is ``nu``, ``max_exp_avg_sq`` is ``nu_max``, and
    ``momentum_buffer`` is ``trace``; each ``step`` is the ``count``.

    Args:
        mapping: how the model's leaves become the other's, without or with the names of the
            containers that hold them in the states.
        source: the state to convert: a tree of anything with ``.shape`` and ``.dtype``, or a
            dict of `TensorSpec` and Python values by mapping name.
        target: the state to make, likewise.
        parameters: names of the torch model's parameters in the order in which its optimizer
            numbers them; needed where it does and was not given names. The names that
            ``get_optimizer_state_dict`` uses need none.

    Returns:
        The rules of the model, under the states' names, and those of the optimizer.

    Raises:
        MappingError: a rule of a parameter is lossy; the mapping fits no part of a state, or
            several; moments belong to no parameter. All problems are listed.

    Example:
        >>> import numpy as np
        >>> from xckpt.mapping.operations import Transpose
        >>> weight, kernel = np.zeros((4, 2), "f4"), np.zeros((2, 4), "f4")
        >>> moments = {"exp_avg": weight, "exp_avg_sq": weight, "step": np.zeros((), "f4")}
        >>> torch = {"model": {"fc.weight": weight}, "optim": {"state": {"fc.weight": moments}}}
        >>> params = {"fc": {"kernel": kernel}}
        >>> adam = {"count": np.zeros((), "i4"), "mu": params, "nu": params}
        >>> mapping = LeafMapping([Rule("fc.weight", "fc/kernel", [Transpose((1, 0))])])
        >>> whole = with_optimizer(mapping, torch, {"params": params, "opt_state": [adam]})
        >>> for rule in whole.rules:
        ...     print(rule, *rule.operations)
        model/fc.weight -> params/fc/kernel transpose [1, 0]
        optim/state/fc.weight/exp_avg -> opt_state/0/mu/fc/kernel transpose [1, 0]
        optim/state/fc.weight/exp_avg_sq -> opt_state/0/nu/fc/kernel transpose [1, 0]
        optim/state/fc.weight/step -> opt_state/0/count cast ['float32', 'int32'], exact True
    """
    here, there = find_moments(source, parameters), find_moments(target, parameters)
    slots = [slot for slot in here.slots if slot in there.slots]
    if not slots:
        raise MappingError("the two states have no moments in common: no Adam, no momentum")
    model = _placed(mapping, here, there)
    tables = [(_Table.of(here.slots[slot]), _Table.of(there.slots[slot])) for slot in slots]
    moments = _moment_rules(model.rules, tables)
    return LeafMapping([*model.rules, *moments, *_step_rules(here, there)])


def _placed(mapping: LeafMapping, source: Moments, target: Moments) -> LeafMapping:
    """The mapping under the names that the model's leaves have in the states."""
    model = {name: spec for name, spec in source.specs.items() if name not in source.leaves}
    before = _source_container(mapping, model, source)
    inside = {
        name.removeprefix(before): spec for name, spec in model.items() if name.startswith(before)
    }
    after = _target_container(mapping.resolve(inside).targets, target)
    return LeafMapping(_under(rule, literal(before), literal(after)) for rule in mapping.rules)


def _source_container(mapping: LeafMapping, model: Collection[str], state: Moments) -> str:
    """What stands before the names that the mapping's rules take."""
    matched = {
        prefix: len(inside) - len(match_rules(mapping.rules, inside).unused)
        for prefix, inside in _containers(model, state).items()
    }
    return _most(matched, "source")


def _target_container(made: Collection[str], state: Moments) -> str:
    """What stands before the names that the mapping's rules give."""
    containers = _containers(set(state.specs) - state.leaves, state)
    found = {prefix: len(set(made) & set(inside)) for prefix, inside in containers.items()}
    return _most(found, "target")


def _containers(names: Collection[str], state: Moments) -> dict[str, list[str]]:
    """What may stand before the names of a model's leaves -> the names without it."""
    prefixes = {""}
    for slot in state.slots.values():
        for owner in slot:
            parts = owner.split("/")
            prefixes |= {"/".join(parts[:length]) + "/" for length in range(1, len(parts))}
    return {
        prefix: [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        for prefix in prefixes
    }


def _most(matched: Mapping[str, int], side: str) -> str:
    """The container in which most names are the mapping's."""
    most = max(matched.values())
    found = sorted(prefix for prefix, count in matched.items() if count == most)
    if not most or len(found) > 1:
        where = f"{' and '.join(map(repr, found))} alike" if most else "no part"
        raise MappingError(f"the mapping's {side} names fit {where} of the {side} state")
    return found[0]


def _under(rule: Rule, before: str, after: str) -> Rule:
    """A rule whose leaves lie in containers."""
    return Rule(
        [f"{before}{pattern}" for pattern in rule.source],
        [f"{after}{pattern}" for pattern in rule.target],
        rule.operations,
        rule.indices,
        [f"{before if each in rule.source else after}{each}" for each in rule.optional],
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """The moments of one slot, by the skeletons of their parameters' names."""

    places: Mapping[str, MomentLeaf]
    by_skeleton: Mapping[str, list[str]]

    @classmethod
    def of(cls, places: Mapping[str, MomentLeaf]) -> _Table:
        by_skeleton: dict[str, list[str]] = {}
        for owner in places:
            by_skeleton.setdefault(skeleton(owner)[0], []).append(owner)
        return cls(places, by_skeleton)

    def of_pattern(self, pattern: Pattern, ranges: Mapping[str, range]) -> dict[str, MomentLeaf]:
        """The moments of the parameters that a pattern matches."""
        alike = pattern.skeleton
        owners = self.places if alike is None else self.by_skeleton.get(alike[0], ())
        return {
            owner: self.places[owner]
            for owner in owners
            if pattern.match(owner, ranges) is not None
        }


def _moment_rules(rules: Iterable[Rule], slots: Sequence[tuple[_Table, _Table]]) -> list[Rule]:
    """The rules of the moments of all slots; all problems are listed in one error."""
    made: list[Rule] = []
    problems: list[str] = []
    for rule in rules:
        try:
            for before, after in slots:
                made += _moment_rule(rule, before, after)
        except MappingError as error:
            problems.append(f"rule {rule}: {error}")
    if problems:
        raise MappingError.listing("the optimizer's state cannot follow the parameters", problems)
    return made


def _moment_rule(rule: Rule, before: _Table, after: _Table) -> list[Rule]:
    """The rule of one slot's moments; none where the rule's leaves have no moments."""
    one = _Side.of(rule.source_patterns, rule.indices, before)
    other = _Side.of(rule.target_patterns, rule.indices, after)
    if not one.names or not other.names:
        return []
    steps = [each for each in _flattened(rule.operations) if not isinstance(each, Cast)]
    lossy = [str(each) for each in steps if each.exactness == "lossy"]
    if lossy:
        raise MappingError(
            f"{', '.join(lossy)} is lossy on a parameter; its effect on a moment is "
            "not known: give the moments rules of their own"
        )
    operations = _without_absent(rule.operations, one, other)
    if one.dtype != other.dtype:
        operations.append(Cast((one.dtype, other.dtype)))
    return [
        Rule(one.names, other.names, operations, {**one.indices, **other.indices, **rule.indices})
    ]


def _flattened(operations: Sequence[Operation]) -> list[Operation]:
    found: list[Operation] = []
    for each in operations:
        found.append(each)
        if isinstance(each, Each):
            found += [inner for branch in each.branches for inner in _flattened(branch)]
    return found


def _without_absent(
    operations: Sequence[Operation], source: _Side, target: _Side
) -> list[Operation]:
    """The operations without the names that a tied tensor has no moments for."""
    found = [_on_moments(each) for each in operations if not isinstance(each, Cast)]
    missing = source.absent, target.absent
    if missing[0]:
        untie = found[0] if found else None
        if not isinstance(untie, Untie):
            raise MappingError(f"there are no moments of {', '.join(missing[0])}")
        found[:1] = [Untie(len(source.names))] if len(source.names) > 1 else []
    if missing[1]:
        tie = found[-1] if found else None
        if not isinstance(tie, Tie):
            raise MappingError(f"there are no moments of {', '.join(missing[1])}")
        found[-1:] = [Tie(len(target.names))] if len(target.names) > 1 else []
    return found


def _on_moments(operation: Operation) -> Operation:
    """The operation on moments: a pad is zeros, and their dtypes are their own."""
    if isinstance(operation, Each):
        inner = (
            tuple(_on_moments(each) for each in branch if not isinstance(each, Cast))
            for branch in operation.branches
        )
        return Each(tuple(inner))
    if isinstance(operation, Pad):
        return Pad(operation.size, operation.axis)
    if isinstance(operation, Strip):
        return Strip(operation.size, operation.axis)
    return operation


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a rule, in terms of one slot's moments."""

    absent: tuple[str, ...]
    """The patterns whose leaves have no moments."""
    names: tuple[str, ...]
    """The patterns of the moments of the others."""
    indices: dict[str, range]
    """Ranges that the new patterns need."""
    dtype: str
    """The moments' element type."""

    @classmethod
    def of(cls, patterns: Sequence[Pattern], ranges: Mapping[str, range], table: _Table) -> _Side:
        """The side of a rule that has these patterns."""
        absent: list[str] = []
        names: list[str] = []
        indices: dict[str, range] = {}
        dtype = ""
        for pattern in patterns:
            places = table.of_pattern(pattern, ranges)
            if not places:
                absent.append(pattern.text)
                continue
            dtype = dtype or next(iter(places.values())).spec.dtype
            name, needed = moment_pattern(pattern, ranges, places)
            names.append(name)
            indices |= needed
        return cls(tuple(absent), tuple(names), indices, dtype)


def _step_rules(source: Moments, target: Moments) -> list[Rule]:
    """One rule: all counts of steps are equal, and become all of the other side's."""
    if not source.steps or not target.steps:
        return []
    specs = {source.specs[name] for name in source.steps}
    wanted = {target.specs[name] for name in target.steps}
    if len(specs) > 1 or len(wanted) > 1:
        listed = ", ".join(sorted({str(spec) for spec in specs | wanted}))
        raise MappingError(f"counts of steps are of several types: {listed}")
    dtypes = specs.pop().dtype, wanted.pop().dtype
    operations: list[Operation] = []
    if len(source.steps) > 1:
        operations.append(Untie(len(source.steps)))
    if dtypes[0] != dtypes[1]:
        operations.append(Cast(dtypes, exact=True))
    if len(target.steps) > 1:
        operations.append(Tie(len(target.steps)))
    names = [[literal(name) for name in state.steps] for state in (source, target)]
    return [Rule(names[0], names[1], operations)]
