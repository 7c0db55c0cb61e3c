"""NumPy's adapter: the reference, and the smallest that an adapter can be.

A NumPy array is one shard, the whole, that every process holds. NumPy scalars (``np.float32(1)``)
are 0-d arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import dtype_name, numpy_dtype
from xckpt.core.geometry.boxes import Boxes
from xckpt.core.metadata import Sharding
from xckpt.core.staged import Copyable
from xckpt.errors import UnsupportedLeafError

__all__ = [
    "ArraySource",
    "ArrayTarget",
    "aim",
    "children",
    "copy_into",
    "copyable",
    "describe",
    "open_object",
    "pinned_memory",
    "rebuild",
    "to_numpy",
    "to_writable_numpy",
]


@dataclass(frozen=True, slots=True)
class ArraySource:
    """A NumPy array to be saved."""

    array: NDArray[np.generic]
    dtype: str
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape

    @property
    def boxes(self) -> Boxes:
        """The one box that is the whole array."""
        return Boxes.whole(self.array.shape)

    def data(self, index: int) -> NDArray[np.generic]:
        """The array itself."""
        return self.array


@dataclass(slots=True)
class ArrayTarget:
    """A NumPy array to be loaded: new memory, or the caller's own."""

    shape: tuple[int, ...]
    dtype: str
    array: NDArray[np.generic] | None = None
    annotation: str = ""
    boxes: Boxes = field(init=False)

    def __post_init__(self) -> None:
        self.boxes = Boxes.whole(self.shape)

    def buffer(self, index: int) -> NDArray[np.generic]:
        """The whole array, allocated at the first call."""
        if self.array is None:
            self.array = np.empty(self.shape, numpy_dtype(self.dtype))
        return self.array

    def commit(self, index: int) -> None:
        """Nothing to publish: the buffer is the array."""

    def result(self) -> NDArray[np.generic]:
        """The filled array."""
        return self.buffer(0)


def describe(leaf: object, name: str) -> ArraySource | None:
    """A NumPy array or scalar as a source.

    Raises:
        UnsupportedLeafError: its dtype is not one of the format's (object, datetime, ...), or it
            has a mask.

    Example:
        >>> describe(np.zeros((2, 3), np.float32), "w").dtype
        'float32'
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        return None
    return ArraySource(np.asarray(leaf), _format_dtype(leaf, name))


def copyable(leaf: object, name: str) -> Copyable | None:
    """An array is copied; a scalar cannot change.

    Raises:
        UnsupportedLeafError: as for `describe`.
    """
    if not isinstance(leaf, np.ndarray | np.generic):
        return None
    _format_dtype(leaf, name)
    if not isinstance(leaf, np.ndarray):
        return Copyable((), lambda copies: leaf)
    return Copyable((np.asarray(leaf),), lambda copies: copies[0])


def pinned_memory(size: int) -> None:
    """NumPy has no accelerator."""
    return


def aim(like: object, name: str, *, in_place: bool) -> ArrayTarget | None:
    """A target like a NumPy array: new memory of its shape and dtype, or the array itself.

    Raises:
        UnsupportedLeafError: its dtype is not one of the format's, or it is to be filled in place
            but cannot be written (a NumPy scalar, a read-only array).
    """
    if not isinstance(like, np.ndarray | np.generic):
        return None
    dtype = _format_dtype(like, name)
    if not in_place:
        return ArrayTarget(like.shape, dtype)
    if not isinstance(like, np.ndarray) or not like.flags.writeable:
        raise UnsupportedLeafError(
            f"{name}: a {type(like).__name__} that cannot be written; load_into needs a writable "
            f"array here, or use load, which returns a new one"
        )
    return ArrayTarget(like.shape, dtype, like)


def to_numpy(data: object) -> NDArray[np.generic] | None:
    """A NumPy array as it is."""
    return data if isinstance(data, np.ndarray) else None


def to_writable_numpy(buffer: object) -> NDArray[np.generic] | None:
    """A NumPy array as it is."""
    return buffer if isinstance(buffer, np.ndarray) else None


def copy_into(buffer: object, data: NDArray[np.generic]) -> bool:
    """Copy into a NumPy array."""
    if not isinstance(buffer, np.ndarray):
        return False
    np.copyto(buffer, data, casting="no")
    return True


def open_object(node: object, name: str) -> None:
    """No object of NumPy keeps a state of its own."""
    return


def children(node: object) -> None:
    """NumPy registers no containers."""
    return


def rebuild(node: object, children: list[object]) -> None:
    """NumPy registers no containers."""
    return


def _format_dtype(array: NDArray[np.generic] | np.generic, name: str) -> str:
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedLeafError(f"{name}: a masked array; save its data and mask as two leaves")
    dtype = dtype_name(array.dtype)
    if dtype is None:
        raise UnsupportedLeafError(
            f"{name}: NumPy dtype {array.dtype} cannot be stored; convert it to a number type first"
        )
    return dtype
