"""The pickle in an archive of `torch.save`, as plain values and tensors that map the file.

A tensor is pickled as a call of one of torch's rebuilding functions with a storage, an offset, a
shape and strides; a storage is a persistent id. Nothing of torch is imported or called:

1. The pickle is described (`xckpt.formats.torch_save.pickle_machine`). The archive says where a
   storage lies, and a call that rebuilds a tensor makes a `MappedTensor` of it.
2. The few classes that plain values need make those values.
3. Anything else is refused, and so is a value with too many parts or containers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, item_size, numpy_dtype
from xckpt.core.geometry.box import Shape
from xckpt.core.manifest.memory import RAISE
from xckpt.core.manifest.rules import shape_fault
from xckpt.core.text.arguments import named
from xckpt.core.tree import DEEPEST
from xckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from xckpt.formats.strided_ranges import FileTensor
from xckpt.formats.torch_save.pickle_machine import Maker, Symbol, load
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.files import RangeFile
from xckpt.storage.foreign.paths import FilePath

MOST_PARTS: Final = 1_000_000
"""Most parts of a value: a pickle of some bytes can refer to one list a million times."""
PART_BYTES: Final = 512
"""Bytes of memory of a part, which is a leaf: its name, its place in the tree, its description."""

# fmt: off
DTYPE_NAMES: Final = (
    *DTYPES, "complex32", "quint8", "qint8", "qint32", "quint4x2", "quint2x4", "bits8", "bits16",
    "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)
"""torch's dtypes, those included that the format lacks: they are refused with their leaf's name."""
# fmt: on

_STORAGES: Final = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
"""torch's storage classes -> the format's dtypes."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a file: where its elements are.

    Example:
        >>> path = Path("six"); _ = path.write_bytes(bytes(range(6)))
        >>> MappedTensor(path, "uint8", (3, 2), (1, 3), position=0, extent=6).array().tolist()
        [[0, 3], [1, 4], [2, 5]]
    """

    path: FilePath
    dtype: str
    """The format's name of the element type."""
    shape: Shape
    strides: Shape
    """Elements between neighbours, per dimension."""
    position: int
    """Byte of the file at which its first element is."""
    extent: int
    """Bytes from there to the end of its last element."""
    conjugated: bool = False
    negated: bool = False

    def array(self) -> NDArray[np.generic]:
        """The elements of a tensor in a local file: a read-only view of the mapped file; or a copy
        of what torch has only noted down as conjugated or negated.
        """
        assert isinstance(self.path, Path)
        dtype = numpy_dtype(self.dtype)
        if not prod(self.shape):
            return np.empty(self.shape, dtype)
        mapped = np.memmap(self.path, np.uint8, "r", self.position, (self.extent,))
        strides = tuple(step * dtype.itemsize for step in self.strides)
        array: NDArray[np.generic] = np.ndarray(self.shape, dtype, mapped, 0, strides)
        if self.conjugated:
            array = np.conj(array)
        # The stubs of `negative` know no array of a generic type.
        return np.negative(array) if self.negated else array  # type: ignore[return-value]

    def read(self, file: RangeFile, offsets: Shape, into: NDArray[np.generic]) -> None:
        """Fill ``into`` with the box of its shape at ``offsets``; ``file`` is the tensor's.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            OSError: it cannot be read.
        """
        dtype = numpy_dtype(self.dtype)
        FileTensor(file, self.position, dtype, self.shape, self.strides).read(offsets, into)
        if self.conjugated:
            np.conjugate(into, out=into)
        if self.negated:
            np.negative(into, out=into)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage, by a pickle and its archive: ``length`` bytes from ``start`` on."""

    dtype: str | None
    """None for bytes without a type."""
    path: FilePath
    start: int
    length: int
    little_endian: bool


def read_value(
    pickled: bytes, find: Callable[[str, str | None], Storage], memory: Allowance | None = None
) -> object:
    """The saved value in a ``data.pkl``: plain values, with a `MappedTensor` for each tensor.

    Args:
        pickled: the bytes of ``data.pkl``.
        find: gives a storage by its key in the archive and its dtype.
        memory: what the objects may take.

    Raises:
        UnsafePickleError: it holds an instance of a class, or a function.
        CorruptCheckpointError: a tensor lies outside its storage, or that outside the archive.
        ManifestError: it is damaged, or not what torch writes.
        UnsupportedLeafError: it holds an object that is not a plain value; or a tensor has more
            elements than its storage, is big-endian, or is of a dtype that the format lacks.

    Example:
        >>> from xckpt.formats.torch_save.pickle_writer import dump
        >>> read_value(dump({"step": 7}), lambda key, dtype: None)
        {'step': 7}
    """

    def storage(kind: object, class_: object, key: object, place: object, count: object) -> Storage:
        if kind != "storage" or not isinstance(class_, Symbol) or not isinstance(key, str):
            raise TypeError
        name = class_.name.rpartition(".")[2]
        return find(key, None if name == "UntypedStorage" else _STORAGES.get(name, name))

    memory = memory or Allowance()
    value = load(pickled, NAMES, storage, memory)
    _check_plain(value, memory)
    return value


def _check_plain(value: object, memory: Allowance) -> None:
    """Refuse what is neither a plain value nor a tensor.

    Raises:
        UnsupportedLeafError: there is such a part, or there are too many parts or containers.
    """
    most = min(MOST_PARTS, memory.most // PART_BYTES)
    waiting, left = [(value, 0)], most
    while waiting:
        part, depth = waiting.pop()
        if depth > DEEPEST:
            raise UnsupportedLeafError(f"more than {DEEPEST} containers deep")
        if isinstance(part, dict | list | tuple):
            left -= len(part)
            if left < 0:
                raise UnsupportedLeafError(
                    f"more than {most:,} parts; at most {MOST_PARTS:,} are read, and together, at "
                    f"{PART_BYTES} bytes each, they must fit memory_bytes; {RAISE}"
                )
            inner = part.values() if isinstance(part, dict) else part
            waiting += [(each, depth + 1) for each in inner]
        elif not isinstance(part, MappedTensor | str | bool | int | float | complex | bytes | None):
            kind = part.name if isinstance(part, Symbol) else type(part).__name__.lower()
            raise UnsupportedLeafError(f"{named(kind)} is not a plain value")


def kept_bytes(value: object) -> int:
    """Bytes that a plain value takes as leaves, from above.

    Example:
        >>> kept_bytes({"a": [1, 2]}) >= 3 * PART_BYTES
        True
    """
    waiting, taken = [value], 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            taken += len(part) * PART_BYTES + sum(map(sys.getsizeof, part))
            waiting += part.values()
        elif isinstance(part, list | tuple):
            taken += len(part) * PART_BYTES
            waiting += part
        else:
            taken += sys.getsizeof(part)
    return taken


# The functions for a pickle's names. Wrong arguments are a TypeError or ValueError.


def _tensor_v2(*arguments: object) -> object:
    """Version 3, but for the dtype, which is the storage's."""
    no_dtype = [*arguments[:6], None, *arguments[6:]]
    return _tensor_v3(*no_dtype)


def _tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    if not isinstance(storage, Storage) or type(offset) is not int or offset < 0:
        raise TypeError
    if not are_counts(shape) or not are_counts(strides) or len(shape) != len(strides):
        raise ValueError
    if shape_fault(shape, 1):
        raise ValueError
    noted = metadata or {}
    if not isinstance(noted, dict) or not set(noted) <= {"conj", "neg"}:
        raise TypeError
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Symbol) else storage.dtype
    if name is None or not (dtype is None or isinstance(dtype, Symbol)):
        raise TypeError
    extent = _extent(storage, name, offset, shape, strides)
    position = storage.start + offset * item_size(name)
    marks = bool(noted.get("conj")), bool(noted.get("neg"))
    return MappedTensor(storage.path, name, shape, strides, position, extent, *marks)


def _extent(storage: Storage, dtype: str, offset: int, shape: Shape, strides: Shape) -> int:
    """Bytes from a tensor's first element to the end of its last.

    Raises:
        CorruptCheckpointError: it lies outside its storage.
        UnsupportedLeafError: it has more elements than its storage, or elements that no array has.
    """
    if dtype not in DTYPES:
        raise UnsupportedLeafError(f"a tensor of dtype {dtype}")
    item, count = item_size(dtype), prod(shape)
    if not storage.little_endian and item > 1:
        raise UnsupportedLeafError("written on a machine with big-endian numbers")
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if count else -1
    if (offset + last + 1) * item > storage.length:
        raise CorruptCheckpointError(
            f"{storage.path}: a tensor of shape {shape} and strides {strides} reaches beyond the "
            f"{storage.length:,} bytes of its storage"
        )
    if count * item > storage.length:
        raise UnsupportedLeafError(
            f"a tensor of shape {shape} expanded from {storage.length:,} bytes; where it is saved, "
            f"take .contiguous() of it"
        )
    return (last + 1) * item


def are_counts(values: object, rank: int | None = None) -> TypeGuard[Shape]:
    """Whether a value is a tuple of ints from 0 on, of ``rank`` of them if that is given.

    Example:
        >>> are_counts((2, 3), rank=2), are_counts((2, -1)), are_counts([2, 3])
        (True, False, False)
    """
    if not isinstance(values, tuple) or rank not in (None, len(values)):
        return False
    return all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _parameter(data: object, requires_grad: object, hooks: object, state: object = None) -> object:
    if not isinstance(data, MappedTensor) or state:
        raise TypeError
    return data


def _encoded(text: object, encoding: object) -> object:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError
    return text.encode("latin-1")


def _complex(real: object, imaginary: object) -> object:
    if not isinstance(real, float) or not isinstance(imaginary, float):
        raise TypeError
    return complex(real, imaginary)


def _no_bytes() -> object:
    return b""


def _size(dimensions: object = ()) -> object:
    if not are_counts(dimensions):
        raise TypeError
    return dimensions


def _ordered(pairs: object = ()) -> object:
    if pairs not in ((), []):
        raise TypeError
    return {}


BASIC_NAMES: Final[Mapping[str, Maker | None]] = {
    **{f"torch.{name}": None for name in DTYPE_NAMES},
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
}
"""Names allowed in any pickle of torch -> the result of calling them."""

NAMES: Final[Mapping[str, Maker | None]] = {
    **BASIC_NAMES,
    **{f"torch.{name}": None for name in _STORAGES},
    **{f"torch.{name}Storage": None for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2")},
    "torch.storage.UntypedStorage": None,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "_codecs.encode": _encoded,
    "__builtin__.complex": _complex,
    "builtins.complex": _complex,
    "__builtin__.bytes": _no_bytes,
    "builtins.bytes": _no_bytes,
}
"""Names allowed in a ``data.pkl`` -> the result of calling them."""
