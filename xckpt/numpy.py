"""NumPy's adapter: the reference, and the smallest possible adapter.

A NumPy array is one shard, the whole, that every process holds. NumPy scalars (``np.float32(1)``)
are stored as 0-d arrays; where the target is a scalar, a scalar comes back.
"""

from __future__ import annotations

import threading
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import dtype_name
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.strides import is_one_to_one
from xckpt.core.leaf import Copyable, Extent, HostSource, TargetPlace
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.core.plan.new_leaves import weightless
from xckpt.core.text.arguments import named
from xckpt.errors import UnsupportedLeafError

_MAKING = threading.RLock()
"""Held while a target, which has no lock of its own, makes its array; a handler of signals may come
in between and load as well."""


Leaf = NDArray[np.generic] | np.generic


class ArrayTarget(msgspec.Struct, eq=False, gc=False):
    """A NumPy array to be loaded: new memory, or the caller's own."""

    shape: tuple[int, ...]
    dtype: str
    kind: np.dtype[np.generic]
    """The array's own dtype, whose byte order may be another."""
    array: NDArray[np.generic] | None = None
    annotation: str = ""
    in_place: bool = False
    is_scalar: bool = False
    """Whether the result is a scalar of NumPy, not an array."""

    @property
    def boxes(self) -> Boxes:
        """The whole."""
        return Boxes.whole(self.shape)

    def extent(self, index: int) -> Extent | None:
        """Where the caller's own array is."""
        array = self.array
        if array is None or not self.in_place:
            return None
        start: int = array.__array_interface__["data"][0]
        return Extent(start, array.shape, array.strides, array.itemsize)

    def buffer(self, index: int) -> NDArray[np.generic]:
        """The whole array, allocated at the first call."""
        if self.array is None:
            with _MAKING:
                if self.array is None:  # chunks of it come by several threads
                    self.array = np.empty(self.shape, self.kind)
        return self.array

    def commit(self, index: int) -> None:
        """Nothing to publish: the buffer is the array."""

    def result(self) -> Leaf:
        """The filled array, or its only element."""
        array = self.buffer(0)
        return array[()] if self.is_scalar else array


class NumpyAdapter(Adapter[Leaf]):
    """Arrays and scalars of NumPy.

    Example:
        >>> source = ADAPTER.describe(np.zeros((2, 3), np.float32), "w")
        >>> source.dtype, source.boxes, source.sharded
        ('float32', Boxes([0, 2) x [0, 3)), False)
    """

    leaves: tuple[type, ...] = (np.ndarray, np.generic)

    def describe(self, leaf: Leaf, name: str) -> HostSource:
        """An array or a scalar as a source.

        Raises:
            UnsupportedLeafError: its dtype is not one of the format's (object, datetime, ...), or
                it has a mask.
        """
        dtype = _format_dtype(leaf, name)
        array = np.asarray(leaf)
        return HostSource(array.shape, dtype, Boxes.whole(array.shape), (array,))

    def copyable(self, leaf: Leaf, name: str) -> Copyable:
        """An array is copied; a scalar cannot change.

        Raises:
            UnsupportedLeafError: as for `describe`.
        """
        _format_dtype(leaf, name)
        if not isinstance(leaf, np.ndarray):
            return Copyable((), lambda copies: leaf)
        return Copyable((np.asarray(leaf),), lambda copies: copies[0])

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """A scalar as an array without dimensions."""
        return np.asarray(data)

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> ArrayTarget:
        """New memory of the array's shape and dtype, or the array itself.

        A scalar cannot change: in place too, a new one is made, as for a Python number.

        Raises:
            UnsupportedLeafError: its dtype is not one of the format's, or it is to be filled in
                place but cannot be written (a read-only array), or several of its elements share
                memory.
        """
        dtype = _format_dtype(like, name)
        is_scalar = not isinstance(like, np.ndarray)
        if is_scalar or not in_place:
            return ArrayTarget(like.shape, dtype, like.dtype, is_scalar=is_scalar)
        if not like.flags.writeable:
            raise UnsupportedLeafError(
                f"{name}: {named(type(like).__name__)} that cannot be written cannot be filled in "
                f"place: give load_into a writable array, or use load, which returns a new one"
            )
        if not is_one_to_one(like.shape, like.strides, like.itemsize):
            raise UnsupportedLeafError(
                f"{name}: several elements of this array of shape {like.shape} and strides "
                f"{like.strides} share memory; load into a copy() of it"
            )
        return ArrayTarget(like.shape, dtype, like.dtype, like, in_place=True)

    def like(self, stored: TensorStorageMetadata, name: str, place: TargetPlace) -> Leaf:
        """An array of the stored shape and dtype, all of whose elements are one.

        Raises:
            ValueError: NumPy has no such place.
        """
        if place.device not in (None, "cpu") or place.mesh or place.sharding:
            raise ValueError("NumPy arrays live in host memory: give no device, mesh or sharding")
        return weightless(tuple(stored.size), stored.properties.dtype)


ADAPTER: Final = NumpyAdapter()


_ADVICE: Final = {
    "f": "convert it to float64, by .astype(np.float64)",
    "c": "convert it to complex128, by .astype(np.complex128)",
    "T": "save text as a list of str, by .tolist()",
    "U": "save text as a list of str, by .tolist(), or as numbers, by .view(np.uint32)",
    "S": "save it as a list of bytes, by .tolist(), or as numbers, by .view(np.uint8)",
    "O": "save a list, by .tolist(), or an array of numbers, by .astype()",
    "M": "save its numbers, by .view(np.int64), and the unit as a str",
    "m": "save its numbers, by .view(np.int64), and the unit as a str",
    "V": "bring its bytes to uint8, by .view(np.uint8)",
}
"""Kind of a NumPy dtype that has no format -> what to do instead."""


def _format_dtype(leaf: Leaf, name: str) -> str:
    if isinstance(leaf, np.ma.MaskedArray):
        raise UnsupportedLeafError(
            f"{name}: a masked array is not a leaf; save its data and mask as two"
        )
    dtype = dtype_name(leaf.dtype)
    if dtype is None:
        advice = _ADVICE.get(leaf.dtype.kind, "convert it to a number type first")
        if leaf.dtype.names is not None:
            advice = "save each field as an array of its own"
        raise UnsupportedLeafError(f"{name}: NumPy dtype {leaf.dtype} cannot be stored; {advice}")
    return dtype
