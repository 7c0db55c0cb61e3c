"""The bases of all operations, and how operations run one after the other.

An `Operation` is a frozen value that acts on a bundle and knows its inverse. A `TensorOperation`
acts on one tensor, and is applied to each of the bundle; a `Paired` one is undone by another
operation with the same arguments; `Each` runs other operations on each part of the bundle. A
subclass with a name is an operation of the language: if it lacks an abstract method, its class
cannot be made.

In a document (a mapping file) an operation is a table. Its first field stands under the operation's
name, the others beside it: ``Concatenate((8, 4), axis=1)`` is ``{concatenate = [8, 4], axis = 1}``.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, ClassVar, Literal, Self, TypeGuard, cast

import msgspec
import numpy as np

from xckpt.core.text.arguments import wrong_argument
from xckpt.errors import MappingError
from xckpt.mapping.trace import Trace
from xckpt.mapping.traced import Bundle, Slot, Traced

Exactness = Literal["bijection", "side data", "lossy"]

DEGREES: tuple[Exactness, ...] = ("bijection", "side data", "lossy")
"""The kinds of operations, the most exact one first."""

OPERATIONS: dict[str, type[Operation]] = {}
"""All operations of the language, by what a document calls them."""
_fields = cache(msgspec.structs.fields)


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all operations.

    Raises:
        TypeError: where a class is made that has a name, but not all of the abstract methods.

    Example:
        >>> class Nothing(Operation, frozen=True):
        ...     name = "nothing"
        Traceback (most recent call last):
        TypeError: operation 'nothing' does not say: apply, arity, inverse
    """

    name: ClassVar[str] = ""
    """Its name in a document; empty for a base class."""
    usual: ClassVar[Exactness] = "bijection"
    """`exactness`, unless the arguments change it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name:
            return
        members = ((name, getattr(cls, name, None)) for name in dir(cls))
        if unsaid := [n for n, member in members if getattr(member, "__isabstractmethod__", False)]:
            raise TypeError(f"operation {cls.name!r} does not say: {', '.join(unsaid)}")
        OPERATIONS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            value = self.checked(field, _plain_numbers(getattr(self, field.name)))
            msgspec.structs.force_setattr(self, field.name, value)
        try:
            self.validate()
        except ValueError as error:
            raise MappingError(f"{self}: {error}") from error

    def checked(self, field: msgspec.structs.FieldInfo, value: object) -> object:
        """An argument as its field has it: a list as a tuple, say.

        Raises:
            TypeError: it is of another type.
            MappingError: it has another number of items, or is a text that is no choice.
        """
        try:
            return msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            takes, call = inspect.formatannotation(field.type), type(self).__name__
            wrong = wrong_argument(call, field.name, takes, value)
            raise (wrong if "got `" in str(error) else MappingError(str(wrong))) from None

    @property
    def exactness(self) -> Exactness:
        """Whether the inverse needs nothing else, needs stated side data, or is not exact."""
        return self.usual

    def validate(self) -> None:
        """Raise ValueError if the arguments can never be right."""

    @abstractmethod
    def arity(self) -> tuple[int, int] | None:
        """How many tensors it takes and gives; None if it acts on each of any number."""

    @abstractmethod
    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The bundle after the operation.

        Raises:
            ValueError: the tensors do not fit.
        """

    @abstractmethod
    def inverse(self) -> Operation:
        """The operation that undoes this one."""

    def to_document(self) -> dict[str, Any]:
        """The table that stands for it in a mapping file."""
        first, *_ = self.__struct_fields__
        fields = {key: _plain(value) for key, value in msgspec.to_builtins(self).items()}
        return {self.name: fields.pop(first, _plain(getattr(self, first))), **fields}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The operation with these arguments, as a document writes them."""
        return cls(**fields)

    def __str__(self) -> str:
        main, *rest = self.to_document().items()
        words = [f"{main[0]} {main[1]}", *(f"{key} {value}" for key, value in rest)]
        return ", ".join(words)


class TensorOperation(Operation, frozen=True):
    """Base of the operations that act on each tensor of the bundle alone."""

    def arity(self) -> None:
        """None: it acts on any number of tensors."""

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The bundle with each tensor replaced."""
        return tuple(slot.map(lambda tensor: self.on(tensor, trace)) for slot in bundle)

    @abstractmethod
    def on(self, tensor: Traced, trace: Trace) -> Traced:
        """One tensor after the operation.

        Raises:
            ValueError: the tensor does not fit.
        """


class Paired(Operation, frozen=True):
    """Base of the operations that another one undoes, with the same arguments."""

    opposite: ClassVar[str]
    """The name of the other one in a document."""

    def inverse(self) -> Operation:
        """The other one of the pair."""
        kind: Callable[..., Operation] = OPERATIONS[self.opposite]
        return kind(*msgspec.structs.astuple(self))


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value of a document is a list."""
    return isinstance(value, list | tuple)


def is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of a document is a table."""
    return isinstance(value, Mapping)


def _plain_numbers(value: object) -> object:
    """An argument with Python's numbers for NumPy's, and tuples for lists."""
    if is_table(value):
        return {key: _plain_numbers(each) for key, each in value.items()}
    if is_list(value):
        return tuple(map(_plain_numbers, value))
    return cast(object, value.item()) if isinstance(value, np.generic) else value


def _plain(value: object) -> object:
    return list(map(_plain, value)) if is_list(value) else value


def operation_from_document(document: object) -> Operation:
    """The operation in a table.

    Raises:
        MappingError: there is no such operation, or its arguments are wrong.

    Example:
        >>> operation_from_document({"transpose": [1, 0]})
        Transpose(axes=(1, 0))
    """
    if not is_table(document):
        raise MappingError(
            f"an operation is a table such as {{ transpose = [1, 0] }}: {document!r}"
        )
    names = [key for key in document if key in OPERATIONS]
    if len(names) != 1:
        raise MappingError(
            f"{dict(document)!r} names {' and '.join(names) or 'no operation'}; "
            f"an operation is one of {', '.join(sorted(OPERATIONS))}"
        )
    kind = OPERATIONS[names[0]]
    fields = {key: value for key, value in document.items() if key != names[0]}
    first, *others = kind.__struct_fields__
    if strange := [str(key) for key in fields if key not in others]:
        takes = f"{first} stands under its name, {', '.join(others) or 'nothing'} beside it"
        raise MappingError(f"{names[0]} has no field {', '.join(strange)}: {takes}")
    try:
        return kind.from_fields({first: document[names[0]], **fields})
    except (TypeError, ValueError) as error:
        raise MappingError(f"{names[0]}: {error}") from error


def axis_of(axis: int, rank: int) -> int:
    """A valid axis, counted from 0.

    Raises:
        ValueError: there is no such axis.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} of {rank}")
    return axis % rank


def least_exact(operations: Iterable[Operation]) -> Exactness:
    """The type of the least exact of some operations; of none, a bijection."""
    types: list[Exactness] = ["bijection", *(each.exactness for each in operations)]
    return max(types, key=DEGREES.index)


def arity_of(operations: Iterable[Operation], taken: int | None = None) -> tuple[int, int]:
    """How many tensors operations in a row take and give.

    Args:
        operations: in the order in which they run.
        taken: how many tensors come in; if None, as many as the first operation with a fixed
            number takes, else one.

    Raises:
        ValueError: one takes another number of tensors than there are.
    """
    given = taken
    for operation in operations:
        arity = operation.arity()
        if arity is None:
            continue
        if taken is None:
            taken = given = arity[0]
        if arity[0] != given:
            raise ValueError(f"{operation} takes {arity[0]} tensors, but has {given}")
        given = arity[1]
    return 1 if taken is None else taken, 1 if given is None else given


def run(operations: Sequence[Operation], bundle: Bundle, trace: Trace) -> Bundle:
    """The bundle after several operations, which take as many tensors as it has.

    Raises:
        MappingError: one does not fit its tensors; the message says which.
    """
    for operation in operations:
        try:
            bundle = operation.apply(bundle, trace)
        except MappingError:
            raise
        except ValueError as error:
            shapes = ", ".join(map(_shapes, bundle)) or "nothing"
            raise MappingError(f"{operation}: {error}; its input: {shapes}") from error
    return bundle


def _shapes(slot: Slot) -> str:
    each = list(dict.fromkeys(str(tensor.spec) for tensor in slot.tensors.values()))
    more = f" x {len(slot.tensors)}" if slot.indices else ""
    return " or ".join(each[:3]) + more


class Each(Operation, frozen=True):
    """Run its own operations on each part of the bundle.

    A branch takes as many tensors as its first operation with a fixed number; else one.

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

    def checked(self, field: msgspec.structs.FieldInfo, value: object) -> object:
        """The branches: msgspec knows no operation by its base."""
        if is_list(value) and all(
            is_list(branch) and all(isinstance(each, Operation) for each in branch)
            for branch in value
        ):
            return value
        raise wrong_argument("Each", field.name, "a tuple of operations for each branch", value)

    @property
    def exactness(self) -> Exactness:
        """The type of the least exact of its operations."""
        return least_exact(chain.from_iterable(self.branches))

    def arity(self) -> tuple[int, int]:
        """The tensors of all branches together."""
        pairs = [arity_of(branch) for branch in self.branches]
        return sum(taken for taken, _ in pairs), sum(given for _, given in pairs)

    def validate(self) -> None:
        """Every branch's operations follow on each other."""
        self.arity()

    def apply(self, bundle: Bundle, trace: Trace) -> Bundle:
        """The bundles of all branches, one after the other."""
        slots: list[Slot] = []
        start = 0
        for branch in self.branches:
            taken, _ = arity_of(branch)
            slots += run(branch, bundle[start : start + taken], trace)
            start += taken
        return tuple(slots)

    def inverse(self) -> Each:
        """Each branch inverted."""
        return Each(tuple(tuple(o.inverse() for o in reversed(branch)) for branch in self.branches))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The operation, its branches read as operations themselves."""
        branches = fields["branches"]
        if len(fields) > 1 or not is_list(branches) or not all(map(is_list, branches)):
            raise ValueError("it is a list of lists of operations")
        return cls(tuple(tuple(map(operation_from_document, branch)) for branch in branches))

    def to_document(self) -> dict[str, Any]:
        """The table that stands for it in a mapping file."""
        return {self.name: [[o.to_document() for o in branch] for branch in self.branches]}
