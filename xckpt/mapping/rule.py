"""A rule: the leaves that it takes, the operations on them, the leaves that it makes. With indices
on both sides the rule covers many leaves at once: one *instance* for each of their values. An index
of the source alone is stacked, one of the target alone unstacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from xckpt.errors import MappingError, naming
from xckpt.mapping.operations import Each, Exactness, Operation, Stack, Unstack
from xckpt.mapping.operations.base import (
    arity_of,
    is_list,
    is_table,
    least_exact,
    operation_from_document,
)
from xckpt.mapping.pattern import Pattern

SHOWN_NAMES = 6
"""Names of one side that a printed rule shows."""

_FIELDS = ("source", "target", "operations", "indices", "optional", "assumes")


@dataclass(frozen=True, slots=True, init=False)
class Rule:
    """One rule of a mapping.

    Raises:
        MappingError: names, indices and operations do not fit together, whatever the shapes.

    Example:
        >>> from xckpt.mapping.operations import Stack, Transpose
        >>> rule = Rule("layers.{layer}.up.weight", "layers/up/kernel",
        ...             [Transpose((1, 0)), Stack("layer")], {"layer": (0, 24)})
        >>> print(rule)
        layers.{layer}.up.weight -> layers/up/kernel
        >>> rule.inverse().operations
        (Unstack(index='layer', axis=0), Transpose(axes=(1, 0)))
    """

    source: tuple[str, ...]
    """Patterns of the leaves that it takes, in the order of the bundle; none for a constant."""
    target: tuple[str, ...]
    """Patterns of the leaves that it gives; none for what is dropped."""
    operations: tuple[Operation, ...]
    """The operations, in order."""
    indices: Mapping[str, range]
    """Stated values of indices; a rule that matches at all must match all of them."""
    optional: tuple[str, ...]
    """Patterns of `source` or `target` whose leaves may be absent. As a source such a leaf is tied
    to others that are there; as a target it is made only where it is wanted."""
    assumes: str
    """What neither names nor shapes show and the rule takes for granted, in words; nothing is
    loaded through the rule before that is accepted. Empty where there is nothing."""

    def __init__(
        self,
        source: str | Sequence[str],
        target: str | Sequence[str],
        operations: Sequence[Operation] = (),
        indices: Mapping[str, range | Sequence[int] | int] | None = None,
        optional: str | Sequence[str] = (),
        assumes: str = "",
    ) -> None:
        put = object.__setattr__
        put(self, "source", _names("source", source))
        put(self, "target", _names("target", target))
        put(self, "operations", _checked(operations))
        if not (indices is None or is_table(indices)):
            raise TypeError(f"indices are a dict such as {{'layer': 12}}, not {indices!r}")
        with naming(f"rule {self}"):
            ranges = {name: _range(name, values) for name, values in (indices or {}).items()}
        put(self, "indices", ranges)
        put(self, "optional", _names("optional", optional))
        put(self, "assumes", assumes)
        self._validate()

    @property
    def source_patterns(self) -> tuple[Pattern, ...]:
        """`source`, parsed."""
        return tuple(map(Pattern.parse, self.source))

    @property
    def target_patterns(self) -> tuple[Pattern, ...]:
        """`target`, parsed."""
        return tuple(map(Pattern.parse, self.target))

    @property
    def source_indices(self) -> tuple[str, ...]:
        """Indices and texts of the source's names."""
        return self.source_patterns[0].indices if self.source else ()

    @property
    def target_indices(self) -> tuple[str, ...]:
        """Indices and texts of the target's names."""
        return self.target_patterns[0].indices if self.target else ()

    @property
    def shared_indices(self) -> frozenset[str]:
        """Indices and texts of the source that are not stacked: the rule has an instance for each
        of their values. They are the target's too; all, if the rule makes nothing.
        """
        return frozenset(self.target_indices if self.target else self.source_indices)

    @property
    def exactness(self) -> Exactness:
        """The type of the least exact of its operations; a rename is a bijection."""
        return least_exact(self.operations)

    def inverse(self) -> Rule:
        """The rule back, derived: sides exchanged, each operation inverted, the last one first."""
        back = [operation.inverse() for operation in reversed(self.operations)]
        return Rule(self.target, self.source, back, self.indices, self.optional, self.assumes)

    def _validate(self) -> None:
        problems: list[str] = []
        if not self.source and not self.target:
            problems.append("it has neither source nor target")
        for side, patterns in (("source", self.source_patterns), ("target", self.target_patterns)):
            if any(set(p.indices) != set(patterns[0].indices) for p in patterns):
                problems.append(f"the patterns of its {side} do not all have the same indices")
        before, after = set(self.source_indices), set(self.target_indices)
        if strange := set(self.indices) - before - after:
            problems.append(f"no name has the index {', '.join(sorted(strange))}")
        if strange := set(self.optional) - {*self.source, *self.target}:
            names = ", ".join(sorted(strange))
            problems.append(f"optional= has names that are no source or target of it: {names}")
        if self.source and self.target:
            problems += self._unstacked_problems(before, after)
        try:
            _, given = arity_of(self.operations, len(self.source))
            if given != len(self.target):
                problems.append(
                    f"its operations give {given} tensors for {len(self.target)} targets"
                )
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise MappingError.listing(f"rule {self} contradicts itself", problems)

    def _unstacked_problems(self, before: set[str], after: set[str]) -> list[str]:
        stacked = _indices_of(self.operations, Stack)
        unstacked = _indices_of(self.operations, Unstack)
        texts = {n for p in (*self.source_patterns, *self.target_patterns) for n in p.texts}
        if odd := sorted(texts & (before ^ after)):
            return [f"text {name!r} stands on one side only" for name in odd]
        to_stack, to_unstack = before - after, after - before
        strays = (set(stacked) - to_stack) | (set(unstacked) - to_unstack)
        stack = sorted(name for name in to_stack if stacked.count(name) != 1)
        unstack = sorted(name for name in to_unstack if unstacked.count(name) != 1)
        return [
            *(f"index {name!r} is not in the target: stack it once" for name in stack),
            *(f"index {name!r} is not in the source: unstack it once" for name in unstack),
            *(
                f"index {name!r} is stacked or unstacked, but is not on just one side"
                for name in sorted(strays)
            ),
        ]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Rule:
        """The rule in a table of a mapping file.

        Raises:
            MappingError: a field is missing, unknown or of another type.
        """
        if strange := [key for key in document if key not in _FIELDS]:
            raise MappingError(f"a rule has no {', '.join(strange)}: only {', '.join(_FIELDS)}")
        for side in ("source", "target", "optional"):
            names = document.get(side, ())
            if not isinstance(names, str) and not (
                is_list(names) and all(isinstance(name, str) for name in names)
            ):
                raise MappingError(f"{side} is a name or a list of names, not {names!r}")
        assumes = document.get("assumes", "")
        if not isinstance(assumes, str):
            raise MappingError(f"assumes is a text, not {assumes!r}")
        operations, indices = document.get("operations", ()), document.get("indices", {})
        if not is_list(operations) or not is_table(indices):
            raise MappingError(f"operations are a list and indices a table: {dict(document)!r}")
        source, target = (_names(side, document.get(side, ())) for side in ("source", "target"))
        with naming(f"rule {_arrow(source, target)}"):
            made = [operation_from_document(each) for each in operations]
        return cls(
            source,
            target,
            made,
            indices,
            document.get("optional", ()),
            assumes,
        )

    def to_document(self) -> dict[str, Any]:
        """The table that stands for the rule in a mapping file."""
        ranges = {
            name: [r.start, r.stop] if r.step == 1 else [r.start, r.stop, r.step]
            for name, r in self.indices.items()
        }
        document: dict[str, Any] = {
            "source": _short(self.source),
            "target": _short(self.target),
            "operations": [operation.to_document() for operation in self.operations],
            "indices": ranges,
            "optional": _short(self.optional),
            "assumes": self.assumes,
        }
        return {
            key: value for key, value in document.items() if value or key in ("source", "target")
        }

    def __str__(self) -> str:
        return _arrow(self.source, self.target)

    def __hash__(self) -> int:
        return hash((self.source, self.target, self.operations))


def _indices_of(operations: Sequence[Operation], kind: type[Stack] | type[Unstack]) -> list[str]:
    """The index of every stack or unstack; one in several branches of an `Each` counts once."""
    names: list[str] = []
    for operation in operations:
        if isinstance(operation, kind):
            names.append(operation.index)
        elif isinstance(operation, Each):
            inner = [name for branch in operation.branches for name in _indices_of(branch, kind)]
            names += dict.fromkeys(inner)
    return names


def _names(side: str, names: object) -> tuple[str, ...]:
    """The patterns of an argument.

    Raises:
        TypeError: it is something else.
    """
    given = (names,) if isinstance(names, str) else names
    if is_list(given) and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise TypeError(f"{side} is a name or a list of names, not {names!r}")


def _checked(operations: object) -> tuple[Operation, ...]:
    """The operations of a rule.

    Raises:
        TypeError: they are not a list of operations.
    """
    if not is_list(operations) or not all(isinstance(each, Operation) for each in operations):
        raise TypeError(
            f"operations are a list such as [Transpose((1, 0))], not {operations!r}; "
            f"Rule.from_document takes a table"
        )
    return tuple(operations)


def _arrow(source: tuple[str, ...], target: tuple[str, ...]) -> str:
    return f"{_listed(source)} -> {_listed(target)}"


def _listed(names: tuple[str, ...]) -> str:
    more = f" + {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return " + ".join(names[:SHOWN_NAMES]) + more or "nothing"


def _short(names: tuple[str, ...]) -> str | list[str]:
    return names[0] if len(names) == 1 else list(names)


def _range(name: str, values: object) -> range:
    """The range that ``(start, stop)``, ``(start, stop, step)`` or a count stands for."""
    if isinstance(values, range):
        stated = values
    elif _is_int(values):
        stated = range(values)
    elif is_list(values) and len(values) in (2, 3) and all(map(_is_int, values)):
        stated = range(*values)
    else:
        raise MappingError(f"index {name}: a range is [start, stop] or [start, stop, step]")
    if stated.start < 0 or stated.step < 1 or not stated:
        raise MappingError(f"index {name}: {stated} is not a range of whole numbers from 0 up")
    return stated


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
