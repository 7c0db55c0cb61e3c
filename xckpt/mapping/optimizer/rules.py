"""Rules for optimizer states: moments follow their parameter, step counts their counterparts.

1. A mapping is about a model's leaves. `with_optimizer` finds where these lie in the two states,
   and where the optimizer's leaves lie (`xckpt.mapping.optimizer.states`).
2. For each rule, and each slot that both optimizers have, there is one more rule: the parameters'
   names replaced by their moments', the operations the same. A moment is laid out as its parameter
   is, so an exact operation on the one is the operation on the other.
   Where the optimizer's names hold the parameter's whole name, something stands before it and after
   it: ``state/{name...}/exp_avg``. Where it numbers the parameters, the number is a sum of the
   pattern's indices, if the layers are numbered alike: ``state/{4*layer+2}/exp_avg``.
3. A lossy operation is refused: the gradient of ``scale * w`` is not scaled as ``w`` is, and the
   scale of its square differs again. A cast is left out: moments have dtypes of their own, which
   are cast into one another where they differ.
4. All counts of steps must be equal, which is asserted on the data, and become all counts of the
   other side.

The hyperparameters (rates, decays) are not tensors of either state: they stay with the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from xckpt.errors import MappingError
from xckpt.mapping.infer.fold import range_of
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.match import match_rules
from xckpt.mapping.operations import Cast, Each, Operation, Pad, Strip, Tie, Untie
from xckpt.mapping.optimizer.states import MomentLeaf, Moments, ParameterNames, find_moments
from xckpt.mapping.pattern import Affine, Pattern, literal, skeleton
from xckpt.mapping.rule import Rule

_Slot = Mapping[str, Mapping[str, MomentLeaf]]
"""The moments of one slot: skeleton of a parameter's name -> the name -> where its moment is."""


def with_optimizer(
    mapping: LeafMapping,
    source: object,
    target: object,
    *,
    parameters: ParameterNames | None = None,
) -> LeafMapping:
    """The mapping of a whole training state, from the mapping of its model.

    Both states hold the model's leaves and the optimizer's, under names of their own: say
    ``{"model": ..., "optim": ...}`` and ``{"params": ..., "opt_state": ...}``. torch's ``exp_avg``
    is Optax's ``mu``, ``exp_avg_sq`` is ``nu``, and ``momentum_buffer`` is ``trace``; each ``step``
    is the ``count``. AMSGrad's ``max_exp_avg_sq`` is not Optax's ``nu_max``, the largest of the
    bias-corrected moments: neither can be made of the other.

    Args:
        mapping: how the model's leaves become the other's, without or with the names of the
            containers that hold them in the states.
        source: the state to convert: a tree of anything with ``.shape`` and ``.dtype``, or a
            dict of `TensorSpec` and Python values by mapping name.
        target: the state to make, likewise.
        parameters: names of the torch model's parameters in the order in which its optimizer
            numbers them; needed where it does and was not given names. That is the order of its
            parameter groups: where it has several, give a list of names for each. The names that
            ``get_optimizer_state_dict`` uses need none.

    Returns:
        The rules of the model, under the states' names, and those of the optimizer.

    Raises:
        MappingError: a rule of a parameter is lossy; the mapping fits no part of a state, or
            several; moments belong to no parameter; torch's AMSGrad is to become Optax's, or the
            reverse. All problems are listed.

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
    _check_meaning(slots, here, there)
    model = _placed(mapping, here, there)
    by_skeleton = [
        (_by_skeleton(here.slots[slot]), _by_skeleton(there.slots[slot])) for slot in slots
    ]
    moments = _moment_rules(model.rules, by_skeleton)
    return LeafMapping([*model.rules, *moments, *_step_rules(here, there)])


def _check_meaning(slots: Iterable[str], source: Moments, target: Moments) -> None:
    """Refuse a slot of one purpose that holds other numbers in the other framework."""
    for slot in slots:
        one, other = (
            {place.slot for place in side.slots[slot].values()} for side in (source, target)
        )
        if slot == "largest second moment" and one != other:
            raise MappingError(
                "AMSGrad's maximum cannot be carried over: torch's max_exp_avg_sq is the largest "
                "second moment, Optax's nu_max the largest bias-corrected one; use Adam without "
                "AMSGrad on one side, or let the other side's maximum start fresh"
            )


def _placed(mapping: LeafMapping, source: Moments, target: Moments) -> LeafMapping:
    """The mapping under the names that the model's leaves have in the states."""
    containers = _containers(source)
    taken = {
        prefix: len(names) - len(match_rules(mapping.rules, names).unused)
        for prefix, names in containers.items()
    }
    before = _most(taken, "source")
    model = {name: source.specs[f"{before}{name}"] for name in containers[before]}
    given = mapping.resolve(model).targets.keys()
    after = _most(
        {prefix: len(given & set(names)) for prefix, names in _containers(target).items()},
        "target",
    )
    return LeafMapping(_under(rule, literal(before), literal(after)) for rule in mapping.rules)


def _containers(state: Moments) -> dict[str, list[str]]:
    """Possible prefixes of a model's leaf names -> the names without them."""
    optimizer = state.leaves
    names = [name for name in state.specs if name not in optimizer]
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
    """The container with the most names of the mapping."""
    most = max(matched.values())
    prefixes = sorted(prefix for prefix, count in matched.items() if count == most)
    if not most or len(prefixes) > 1:
        where = f"{' and '.join(map(repr, prefixes))}, equally well, in" if most else "no part of"
        raise MappingError(f"the mapping's {side} names fit {where} the {side} state")
    return prefixes[0]


def _under(rule: Rule, before: str, after: str) -> Rule:
    """A rule whose leaves lie in containers."""
    return Rule(
        [f"{before}{pattern}" for pattern in rule.source],
        [f"{after}{pattern}" for pattern in rule.target],
        rule.operations,
        rule.indices,
        [f"{before if each in rule.source else after}{each}" for each in rule.optional],
        rule.assumes,
    )


def _by_skeleton(places: Mapping[str, MomentLeaf]) -> _Slot:
    by_skeleton: dict[str, dict[str, MomentLeaf]] = {}
    for owner, place in places.items():
        by_skeleton.setdefault(skeleton(owner)[0], {})[owner] = place
    return by_skeleton


def _moment_rules(rules: Iterable[Rule], slots: Sequence[tuple[_Slot, _Slot]]) -> list[Rule]:
    """The rules of the moments of all slots; all problems are listed in one error."""
    moments: list[Rule] = []
    problems: list[str] = []
    for rule in rules:
        try:
            for before, after in slots:
                moments += _moment_rule(rule, before, after)
        except MappingError as error:
            problems.append(f"rule {rule}: {error}")
    if problems:
        raise MappingError.listing("the optimizer's state cannot follow the parameters", problems)
    return moments


def _moment_rule(rule: Rule, before: _Slot, after: _Slot) -> list[Rule]:
    """The rule of one slot's moments; none where the rule's leaves have no moments."""
    one = _side(rule.source_patterns, rule.indices, before)
    other = _side(rule.target_patterns, rule.indices, after)
    if not one.names or not other.names:
        return []
    parameter_steps = [each for each in rule.operations if not isinstance(each, Cast)]
    lossy = [str(each) for each in parameter_steps if each.exactness == "lossy"]
    if lossy:
        raise MappingError(
            f"{', '.join(lossy)} is lossy on a parameter; its effect on a moment is "
            "not known: give the moments rules of their own"
        )
    operations = _without_absent(_on_moments(rule.operations), one, Untie)
    operations = _without_absent(operations, other, Tie)
    if one.dtype != other.dtype:
        operations.append(Cast((one.dtype, other.dtype)))
    indices = {**one.indices, **other.indices, **rule.indices}
    return [Rule(one.names, other.names, operations, indices, assumes=rule.assumes)]


def _on_moments(operations: Iterable[Operation]) -> list[Operation]:
    """The operations on moments: a pad is zeros, and their dtypes are their own."""
    changed: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Each):
            branches = tuple(tuple(_on_moments(branch)) for branch in operation.branches)
            changed.append(Each(branches))
        elif isinstance(operation, Pad | Strip):
            changed.append(type(operation)(operation.size, operation.axis))
        elif not isinstance(operation, Cast):
            changed.append(operation)
    return changed


@dataclass(slots=True)
class _Side:
    """One side of a rule, in terms of one slot's moments."""

    absent: list[str] = field(default_factory=list[str])
    """The patterns whose leaves have no moments."""
    names: list[str] = field(default_factory=list[str])
    """The patterns of the moments of the others."""
    indices: dict[str, range] = field(default_factory=dict[str, range])
    """Ranges that the new patterns need."""
    dtype: str = ""
    """The moments' element type."""


def _side(patterns: Sequence[Pattern], ranges: Mapping[str, range], slot: _Slot) -> _Side:
    """The side of a rule that has these patterns."""
    side = _Side()
    for pattern in patterns:
        places = _matched(pattern, ranges, slot)
        if not places:
            side.absent.append(pattern.text)
            continue
        name, needed = _moment_pattern(pattern, ranges, places)
        side.names.append(name)
        side.indices |= needed
        side.dtype = side.dtype or next(iter(places.values())).spec.dtype
    return side


def _without_absent(
    operations: list[Operation], side: _Side, kind: type[Tie | Untie]
) -> list[Operation]:
    """The operations without the names that a tied tensor has no moments for."""
    if not side.absent:
        return operations
    end = slice(0, 1) if kind is Untie else slice(-1, None)
    if not any(isinstance(each, kind) for each in operations[end]):
        raise MappingError(f"there are no moments of {', '.join(side.absent)}")
    left = len(side.names)
    kept = list(operations)
    kept[end] = [kind(left)] if left > 1 else []
    return kept


def _matched(pattern: Pattern, ranges: Mapping[str, range], slot: _Slot) -> dict[str, MomentLeaf]:
    """The moments of the parameters that a pattern matches."""
    alike = pattern.skeleton
    candidates = slot.values() if alike is None else [slot.get(alike[0], {})]
    return {
        owner: place
        for places in candidates
        for owner, place in places.items()
        if pattern.match(owner, ranges) is not None
    }


def _moment_pattern(
    pattern: Pattern, ranges: Mapping[str, range], places: Mapping[str, MomentLeaf]
) -> tuple[str, dict[str, range]]:
    """The pattern of the moments of a pattern's leaves, and the ranges that it needs.

    Args:
        pattern: of parameters' names.
        ranges: the stated values of its indices.
        places: name of each parameter that the pattern matches -> where its moment is.

    Raises:
        MappingError: the moments' names follow no pattern.
    """
    texts = {(literal(place.before), literal(place.after)) for place in places.values()}
    cuts = {
        None if place.is_number else literal(owner.removesuffix(place.key))
        for owner, place in places.items()
    }
    if len(texts) == len(cuts) == 1:
        [(before, after)], [cut] = texts, cuts
        if cut is not None and pattern.text.startswith(cut):
            return f"{before}{pattern.text.removeprefix(cut)}{after}", {}
        if cut is None and (numbers := _numbers(pattern, ranges, places)):
            number, needed = numbers
            return f"{before}{number}{after}", needed
    raise MappingError(
        f"the moments of {pattern.text} lie under no common name, nor under numbers that follow "
        "from the indices; get_optimizer_state_dict names torch's moments"
    )


def _numbers(
    pattern: Pattern, ranges: Mapping[str, range], places: Mapping[str, MomentLeaf]
) -> tuple[str, dict[str, range]] | None:
    """The moments' number as a sum of the indices, and their ranges; None if it is not one."""
    if pattern.texts:
        return None
    points: dict[tuple[int, ...], int] = {}
    for owner, place in places.items():
        values = pattern.match(owner, ranges) or {}
        points[tuple(int(values[name]) for name in pattern.indices)] = int(place.key)
    line = Affine.through(pattern.indices, points)
    if line is None:
        return None
    columns = dict(zip(pattern.indices, zip(*points, strict=True), strict=True))
    needed = {name: values for name, column in columns.items() if (values := range_of(column))}
    return (f"{{{line}}}" if columns else str(line.constant)), needed


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
