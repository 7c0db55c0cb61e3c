"""The ordered bundle of tensors that a rule's operations take and give.

A rule with one source has a bundle of one slot; a rule that takes query, key and value has three.
Where a rule's index is not in its target (layers that are to be stacked), a slot holds a tensor for
each value of the index: operations act on each of them, until `Stack` makes them one.

`Trace` collects what copies cannot express: assertions on the data, and lossy steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.traced import Traced


@dataclass(frozen=True, slots=True)
class Slot:
    """One place of a bundle: a tensor for each value of its indices."""

    indices: tuple[str, ...]
    """Indices that are still to be stacked; empty for a slot of one tensor."""
    tensors: dict[tuple[int, ...], Traced]
    """Values of the indices -> tensor; ``{(): tensor}`` where there are none."""

    @classmethod
    def of(cls, tensor: Traced) -> Slot:
        """A slot of one tensor."""
        return cls((), {(): tensor})

    def map(self, function: Callable[[Traced], Traced]) -> Slot:
        """The slot with each of its tensors replaced."""
        return Slot(self.indices, {key: function(t) for key, t in self.tensors.items()})


Bundle = tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Assertion:
    """Two tensors made of the source that must be equal bit for bit, or nothing is written.

    Each is whole in its own right: copies cover it, as they cover a target leaf.
    """

    tensor: Traced
    """What is read: tied weights but the first, a pad, a buffer that is dropped."""
    expected: Traced
    """What it must equal: the first of the tied weights, or a constant."""
    reason: str
    """Why, in words that name the rule."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """A step that does not restore every value."""

    rule: str
    """The rule, as it prints."""
    operation: str
    """The operation, as it prints."""
    bound: str
    """The error of a value that was converted and converted back."""


@dataclass(slots=True)
class Trace:
    """What operations record besides the tensors that they make."""

    rule: str = ""
    """The rule whose operations run, as it prints."""
    wanted: TensorSpec | None = None
    """What the target wants of the leaf that the rule makes, where only a constant makes it."""
    ranges: Mapping[str, range] = field(default_factory=dict[str, range])
    """The stated ranges of that rule's indices."""
    assertions: list[Assertion] = field(default_factory=list[Assertion])
    dropped: list[Traced] = field(default_factory=list[Traced])
    """Tensors that are left out unchecked."""
    lossy: dict[Lossy, None] = field(default_factory=dict[Lossy, None])

    def must_equal(self, tensor: Traced, expected: Traced, reason: str) -> None:
        """Assert that `tensor` equals `expected`."""
        if tensor.copies:
            self.assertions.append(Assertion(tensor, expected, f"{reason} ({self.rule})"))

    def loses(self, operation: str, bound: str) -> None:
        """Note a lossy operation, once a rule."""
        self.lossy[Lossy(self.rule, operation, bound)] = None


def one_for_each(bundle: Sequence[Slot]) -> Sequence[tuple[tuple[int, ...], tuple[Traced, ...]]]:
    """For each value of the indices the tensors of all slots, which must have the same indices.

    Raises:
        ValueError: the slots have other indices, or other values of them.
    """
    first = bundle[0]
    for i, slot in enumerate(bundle):
        if not slot.tensors:
            raise ValueError(f"its input {i} is optional and absent")
        if slot.indices != first.indices or slot.tensors.keys() != first.tensors.keys():
            raise ValueError(
                f"its inputs run over other indices: {first.indices} and {slot.indices}"
            )
    return [(key, tuple(slot.tensors[key] for slot in bundle)) for key in first.tensors]
