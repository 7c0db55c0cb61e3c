"""The base of all operations: a frozen value that acts on a bundle and knows its inverse.

An `Operation` maps a whole bundle; a `TensorOperation` maps one tensor, and is applied to each of
the bundle. A subclass with a name is an operation of the language: if it lacks an abstract method,
its class cannot be made.

In a document (a mapping file) an operation is a table. Its first field stands under the operation's
name, the others beside it: ``Concatenate((8, 4), axis=1)`` is ``{concatenate = [8, 4], axis = 1}``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeGuard

import msgspec

from xckpt.core.struct_types import prepare_structs
from xckpt.errors import MappingError
from xckpt.mapping.bundle import Bundle, Slot, Trace
from xckpt.mapping.traced import Traced

Exactness = Literal["bijection", "side data", "lossy"]

_OPERATIONS: dict[str, type[Operation]] = {}


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
    """What a document calls it; empty for a base of several."""
    usual: ClassVar[Exactness] = "bijection"
    """`exactness`, unless the arguments change it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.name:
            return
        if unsaid := [each for each in dir(cls) if _is_abstract(getattr(cls, each, None))]:
            raise TypeError(f"operation {cls.name!r} does not say: {', '.join(unsaid)}")
        _OPERATIONS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if is_list(value):
                msgspec.structs.force_setattr(self, field, _frozen(value))
        try:
            self.validate()
        except ValueError as error:
            raise MappingError(f"{self}: {error}") from error

    @property
    def exactness(self) -> Exactness:
        """Whether the way back needs nothing else, needs stated side data, or is not exact."""
        return self.usual

    def validate(self) -> None:
        """Raise ValueError if the arguments can never be right."""

    @abstractmethod
    def arity(self) -> tuple[int, int] | None:
        """How many tensors it takes and gives; None where it acts on each of any number."""

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
        return msgspec.convert(fields, cls)

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


def _is_abstract(member: object) -> bool:
    return getattr(member, "__isabstractmethod__", False)


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value of a document is a list."""
    return isinstance(value, list | tuple)


def is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a value of a document is a table."""
    return isinstance(value, Mapping)


def _frozen(value: object) -> object:
    return tuple(map(_frozen, value)) if is_list(value) else value


def _plain(value: object) -> object:
    return list(map(_plain, value)) if is_list(value) else value


def prepare_operations() -> None:
    """Build msgspec's type information of all operations; see `prepare_structs`."""
    prepare_structs(*_OPERATIONS.values())


def operation_from_document(document: object) -> Operation:
    """The operation that a table stands for.

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
    names = [key for key in document if key in _OPERATIONS]
    if len(names) != 1:
        raise MappingError(
            f"{dict(document)!r} names {' and '.join(names) or 'no operation'}; "
            f"an operation is one of {', '.join(sorted(_OPERATIONS))}"
        )
    kind = _OPERATIONS[names[0]]
    fields = {key: value for key, value in document.items() if key != names[0]}
    first = kind.__struct_fields__[0]
    if first in fields:
        raise MappingError(f"{dict(document)!r}: {first!r} is what stands under {names[0]!r}")
    try:
        return kind.from_fields({first: document[names[0]], **fields})
    except MappingError:
        raise
    except ValueError as error:  # msgspec.ValidationError is one
        raise MappingError(f"{names[0]}: {error}") from error


def axis_of(axis: int, rank: int) -> int:
    """A valid axis, counted from 0.

    Raises:
        ValueError: there is no such axis.
    """
    if not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} of {rank}")
    return axis % rank


def run(operations: Sequence[Operation], bundle: Bundle, trace: Trace) -> Bundle:
    """The bundle after several operations.

    Raises:
        MappingError: one does not fit its tensors; the message says which.
    """
    for operation in operations:
        arity = operation.arity()
        try:
            if arity and arity[0] != len(bundle):
                raise ValueError(f"takes {arity[0]} tensors, and has {len(bundle)}")
            bundle = operation.apply(bundle, trace)
        except ValueError as error:
            if isinstance(error, MappingError):
                raise
            raise MappingError(f"{operation}: {error}; its input: {shapes(bundle)}") from error
    return bundle


def shapes(bundle: Bundle) -> str:
    """The shapes of a bundle, for a message."""
    return ", ".join(_slot_shapes(slot) for slot in bundle) or "nothing"


def _slot_shapes(slot: Slot) -> str:
    each = list(dict.fromkeys(str(tensor.spec) for tensor in slot.tensors.values()))
    more = f" x {len(slot.tensors)}" if slot.indices else ""
    return " or ".join(each[:3]) + more
