"""Records of operations that copies cannot express.

1. Assertions: two tensors that must be equal in the data, or nothing is written.
2. Lossy steps, with their bounds, and tensors that are left out unchecked.
3. How many channels of each head a projection is rotated by, which must agree in one attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.traced import Traced

PROJECTIONS = frozenset(
    ["q", "k", "wq", "wk", "qproj", "kproj", "toq", "tok", "query", "key", "queryproj", "keyproj"]
)
"""Names of the layers that make queries and keys."""


@dataclass(frozen=True, slots=True)
class Assertion:
    """Two tensors made of the source that must be equal bit for bit, or nothing is written.

    Each is whole in its own right: copies cover it, as they cover a target leaf.
    """

    tensor: Traced
    """What is read: tied weights except the first, a pad, a dropped buffer."""
    expected: Traced
    """What it must equal: the first of the tied weights, or a constant."""
    reason: str
    """Why, in words that name the rule."""


@dataclass(frozen=True, slots=True)
class Lossy:
    """A step that does not restore every value.

    Example:
        >>> trace = Trace(rule="w -> v")
        >>> trace.loses("scale 3.0", "one rounding")
        >>> list(trace.lossy)
        [Lossy(rule='w -> v', operation='scale 3.0', bound='one rounding')]
    """

    rule: str
    """The rule, as it prints."""
    operation: str
    """The operation, as it prints."""
    bound: str
    """The error of a value after converting it and back."""


@dataclass(slots=True)
class Trace:
    """The records of operations, besides the tensors that they make.

    Example:
        >>> from xckpt.mapping.traced import constant, leaf
        >>> pad = TensorSpec((4,), "float32")
        >>> trace = Trace(rule="w -> v")
        >>> trace.must_equal(leaf("w", pad), constant(pad, 0), "the pad must be 0")
        >>> trace.loses("scale 3.0", "exact")
        >>> [assertion.reason for assertion in trace.assertions], len(trace.lossy)
        (['the pad must be 0 (w -> v)'], 1)
    """

    rule: str = ""
    """The rule whose operations run, as it prints."""
    wanted: TensorSpec | None = None
    """The target's spec of the leaf that the rule makes, if only a constant makes it."""
    ranges: Mapping[str, range] = field(default_factory=dict[str, range])
    """The stated ranges of that rule's indices."""
    assertions: list[Assertion] = field(default_factory=list[Assertion])
    dropped: list[Traced] = field(default_factory=list[Traced])
    """Tensors that are dropped unchecked."""
    lossy: dict[Lossy, None] = field(default_factory=dict[Lossy, None])
    rotated: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """An attention's container -> its projections -> rotated channels of each head."""

    def must_equal(self, tensor: Traced, expected: Traced, reason: str) -> None:
        """Assert that `tensor` equals `expected`."""
        if tensor.copies:
            self.assertions.append(Assertion(tensor, expected, f"{reason} ({self.rule})"))

    def rotates(self, tensor: Traced, channels: int) -> None:
        """Note how many channels of each head are rotated, where `tensor` makes queries or keys."""
        for copy in tensor.copies[:1]:
            *above, layer, _ = ["", "", *re.split(r"[./]", copy.source)]
            if layer.lower().replace("_", "") in PROJECTIONS:
                self.rotated.setdefault("/".join(above), {})[copy.source] = channels

    def uneven_rotations(self) -> Iterator[str]:
        """The attentions whose projections are rotated in heads of several sizes, in words."""
        for heads in self.rotated.values():
            if len(set(heads.values())) > 1:
                sizes = " and ".join(f"{size} of {name!r}" for name, size in heads.items())
                yield (
                    f"rope: queries and keys of one attention are rotated in heads of one size, "
                    f"but here it is {sizes} channels: a number of heads is wrong"
                )

    def loses(self, operation: str, bound: str) -> None:
        """Note a lossy operation, once a rule."""
        self.lossy[Lossy(self.rule, operation, bound)] = None
