"""Other operations for each tensor of a bundle."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from xckpt.mapping.bundle import Bundle, Slot, Trace
from xckpt.mapping.operations.base import Exactness, Operation, operation_from_document, run


class Each(Operation, frozen=True):
    """Run its own operations on each part of the bundle.

    A branch takes as many tensors as its first operation that counts them; else one.

    Example:
        >>> from xckpt.mapping.operations import Rope, Transpose
        >>> each = Each(((Rope("halves", 8),), (Rope("halves", 2),), ()))
        >>> each.arity()
        (3, 3)
        >>> each.inverse().branches[1]
        (Rope(to='pairs', heads=2, axis=0, rotary=None),)
        >>> each.to_document()
        {'each': [[{'rope': 'halves', 'heads': 8}], [{'rope': 'halves', 'heads': 2}], []]}
    """

    name: ClassVar[str] = "each"

    branches: tuple[tuple[Operation, ...], ...]
    """The operations of each branch, in the order of the bundle."""

    @property
    def exactness(self) -> Exactness:
        """The type of the least exact of its operations."""
        found = {operation.exactness for branch in self.branches for operation in branch}
        return "lossy" if "lossy" in found else "side data" if "side data" in found else "bijection"

    def arity(self) -> tuple[int, int]:
        """The tensors of all branches together."""
        pairs = [_arity(branch) for branch in self.branches]
        return sum(taken for taken, _ in pairs), sum(given for _, given in pairs)

    def validate(self) -> None:
        """Every branch's operations follow on each other."""
        for branch in self.branches:
            _arity(branch)

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The bundles of all branches, one after the other."""
        made: list[Slot] = []
        start = 0
        for branch in self.branches:
            taken, _ = _arity(branch)
            made += run(branch, bundle[start : start + taken], trace)
            start += taken
        return tuple(made)

    def inverse(self) -> Each:
        """Each branch inverted."""
        return Each(tuple(tuple(o.inverse() for o in reversed(branch)) for branch in self.branches))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The operation, its branches read as operations themselves."""
        branches = fields["branches"]
        if len(fields) > 1 or not all(isinstance(branch, list | tuple) for branch in branches):
            raise ValueError("it is a list of lists of operations")
        return cls(tuple(tuple(map(operation_from_document, branch)) for branch in branches))

    def to_document(self) -> dict[str, Any]:
        """The table that stands for it in a mapping file."""
        return {self.name: [[o.to_document() for o in branch] for branch in self.branches]}


def _arity(branch: tuple[Operation, ...]) -> tuple[int, int]:
    """How many tensors operations in a row take and give."""
    taken = given = 1
    counted = False
    for operation in branch:
        arity = operation.arity()
        if arity is None:
            continue
        if not counted:
            taken, counted = arity[0], True
        elif arity[0] != given:
            raise ValueError(f"{operation} takes {arity[0]} tensors, but has {given}")
        given = arity[1]
    return taken, given
