"""The pickle in an archive of `torch.save`, as plain values and descriptions of tensors.

A tensor is pickled as a call of one of torch's rebuilding functions with a storage, an offset, a
shape and strides; a storage is a persistent id. Here such a call makes a `View` of a `Storage`, and
the few classes that plain values need make those values. Nothing of torch is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from xckpt.core.dtypes import DTYPES
from xckpt.formats.torch_save.pickle_machine import load
from xckpt.formats.torch_save.symbols import Maker, Symbol

MOST_DIMENSIONS: Final = 32

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
class Storage:
    """What a pickle says of a storage."""

    dtype: str | None
    """None for bytes without a type."""
    key: str


@dataclass(frozen=True, slots=True)
class View:
    """What a pickle says of a tensor."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugated: bool
    negated: bool


def describe(pickled: bytes) -> object:
    """What a ``data.pkl`` describes: plain values, with a `View` for each tensor.

    Raises:
        UnsafePickleError: it holds an instance of a class, or a function.
        ManifestError: it is damaged, or not what torch writes.
    """
    return load(pickled, NAMES, _storage)


# What a pickle's names make. Wrong arguments are a TypeError or ValueError.


def _storage(kind: object, storage: object, key: object, place: object, elements: object) -> object:
    if kind != "storage" or not isinstance(storage, Symbol) or not isinstance(key, str):
        raise TypeError
    name = storage.name.rpartition(".")[2]
    return Storage(None if name == "UntypedStorage" else _STORAGES.get(name, name), key)


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
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise ValueError
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError
    noted = metadata or {}
    if not isinstance(noted, dict) or not set(noted) <= {"conj", "neg"}:
        raise TypeError
    name = storage.dtype if dtype is None else _dtype(dtype)
    if name is None:
        raise TypeError
    return View(
        storage, name, offset, shape, strides, bool(noted.get("conj")), bool(noted.get("neg"))
    )


def _dtype(symbol: object) -> str:
    if not isinstance(symbol, Symbol):
        raise TypeError
    return symbol.name.removeprefix("torch.")


def _are_counts(values: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in values)


def _parameter(data: object, requires_grad: object, hooks: object, state: object = None) -> object:
    if not isinstance(data, View) or state:
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
    if not _are_counts(dimensions):
        raise TypeError
    return dimensions


def _ordered(pairs: object = ()) -> object:
    if pairs not in ((), []):
        raise TypeError
    return {}


NAMES: Final[Mapping[str, Maker | None]] = {
    **{f"torch.{name}": None for name in (*_STORAGES, *DTYPE_NAMES)},
    **{f"torch.{name}Storage": None for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2")},
    "torch.storage.UntypedStorage": None,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encoded,
    "__builtin__.complex": _complex,
    "builtins.complex": _complex,
    "__builtin__.bytes": _no_bytes,
    "builtins.bytes": _no_bytes,
}
"""What may occur in a ``data.pkl`` -> what a call of it gives."""
