"""Custom leaves: how a class of arrays that xckpt does not know is saved and loaded.

1. `ArrayAdapter` is for arrays that a process holds whole: subclass it, name the classes, and say
   how an array is made of NumPy's (`ArrayAdapter.from_numpy`). The rest has defaults.
2. `Adapter` is what it builds on, for arrays that several processes share: `Adapter.describe` gives
   a `SourceLeaf` (the boxes that this process holds, and their data), `Adapter.target_for` a
   `TargetLeaf` (the boxes wanted, and memory for each).
3. `register` makes an adapter known: saves and loads ask it before xckpt's own.

``docs/adapters.md`` has a worked example.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapter
from xckpt.core.dtypes import DTYPES, dtype_name
from xckpt.core.geometry.box import Box, Boxes, Shape
from xckpt.core.host_buffers import HostBuffers
from xckpt.core.leaf import Copyable, SourceLeaf, TargetLeaf
from xckpt.core.metadata import Sharding
from xckpt.core.text.arguments import named
from xckpt.engine.adapters import register, unregister
from xckpt.errors import UnsupportedLeafError

__all__ = [
    "Adapter",
    "ArrayAdapter",
    "Box",
    "Boxes",
    "Copyable",
    "SourceLeaf",
    "TargetLeaf",
    "register",
    "unregister",
]

Leaf = TypeVar("Leaf")
"""The class of arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class _WholeSource:
    """An array to be saved; the planner slices it, and the adapter reads the slices."""

    shape: tuple[int, ...]
    dtype: str
    array: object
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""

    @property
    def boxes(self) -> Boxes:
        """The whole."""
        return Boxes.whole(self.shape)

    def data(self, index: int) -> object:
        """The array itself."""
        return self.array


@dataclass(slots=True)
class _WholeTarget(HostBuffers):
    """An array to be loaded, by way of the host."""

    finish: Callable[[NDArray[np.generic]], object] = np.asarray
    """Makes the array of the loaded elements, or fills the caller's."""
    annotation: str = ""
    _made: object = None

    def commit(self, index: int) -> None:
        """Make the array: all elements are there."""
        self._made = self.finish(self.buffer(index))
        self.release(index)

    def result(self) -> object:
        """The array."""
        return self._made


class ArrayAdapter(Adapter[Leaf]):
    """An adapter for arrays that a process holds whole, on the host or on a device.

    A subclass sets `leaves` and overrides `from_numpy`. The defaults need from an array:

    - ``shape``, and a ``dtype`` that NumPy understands (else override `dtype_of`);
    - ``__dlpack__`` or ``__array__`` on memory that NumPy can reach (else override `to_numpy`);
    - slicing as NumPy's, for arrays that are stored in several chunks;
    - item assignment, to be filled in place by `xckpt.load_into` (else override `copy_into`).

    Several processes that save such an array under one name hold replicas of it.

    Example:
        >>> from array import array
        >>> import xckpt
        >>> class Floats(ArrayAdapter[array]):
        ...     leaves = (array,)
        ...     def shape_of(self, leaf):
        ...         return (len(leaf),)
        ...     def dtype_of(self, leaf):
        ...         return {"f": "float32", "d": "float64"}.get(leaf.typecode)
        ...     def to_numpy(self, data):
        ...         return np.frombuffer(data, data.typecode)
        ...     def from_numpy(self, data, like):
        ...         return array(like.typecode, data.tobytes())
        >>> floats = Floats()
        >>> register(floats)
        >>> _ = xckpt.save("memory://floats", {"w": array("f", [1, 2])})
        >>> xckpt.load("memory://floats", {"w": array("f", [0, 0])})
        {'w': array('f', [1.0, 2.0])}
        >>> unregister(floats)
    """

    def shape_of(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape, elements."""
        array: Any = leaf
        return tuple(map(int, array.shape))

    def dtype_of(self, leaf: Leaf) -> str | None:
        """The format's name of the element type, such as ``"bfloat16"``; None if it has none."""
        array: Any = leaf
        return dtype_name(np.dtype(array.dtype))

    def to_numpy(self, data: Leaf) -> NDArray[np.generic]:
        """An array, or a slice of one, as NumPy's, of the format's dtype and any strides.

        Sharing memory saves a copy. Called from several threads.
        """
        array: Any = data
        return np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)

    def from_numpy(self, data: NDArray[np.generic], like: Leaf) -> Leaf:
        """A new array with the elements of NumPy's, on the device of ``like``.

        It may keep the memory of ``data``. Called from several threads.

        Raises:
            UnsupportedLeafError: always, unless a subclass overrides it.
        """
        raise UnsupportedLeafError(f"{named(type(like).__qualname__)} can be saved, but not loaded")

    def copy_into(self, buffer: Leaf, data: NDArray[np.generic]) -> None:
        """Overwrite an array with elements of the same shape and dtype."""
        array: Any = buffer
        array[...] = self.from_numpy(data, buffer)

    def describe(self, leaf: Leaf, name: str) -> SourceLeaf:
        """An array as a source.

        Raises:
            UnsupportedLeafError: its dtype is not one of the format's, or `shape_of` or `dtype_of`
                fails.
        """
        return _WholeSource(*self._described(leaf, name), leaf)

    def target_for(self, like: Leaf, name: str, *, in_place: bool) -> TargetLeaf:
        """A target of the array's shape and dtype.

        Raises:
            UnsupportedLeafError: its dtype is not one of the format's, or `shape_of` or `dtype_of`
                fails.
        """

        def new(data: NDArray[np.generic]) -> Leaf:
            with _about(self, "from_numpy", name):
                made: Leaf | None = self.from_numpy(data, like)
                if made is None:
                    raise TypeError("it returned None, not an array")
                return made

        def filled(data: NDArray[np.generic]) -> Leaf:
            with _about(self, "copy_into", name):
                self.copy_into(like, data)
            return like

        shape, dtype = self._described(like, name)
        return _WholeTarget(shape, dtype, Boxes.whole(shape), filled if in_place else new)

    def read(self, data: Leaf, name: str) -> NDArray[np.generic]:
        """`to_numpy` of an array, or of a slice of one.

        Raises:
            UnsupportedLeafError: it fails, or returns something else.
        """
        with _about(self, "to_numpy", name):
            array: object = self.to_numpy(data)
            if not isinstance(array, np.ndarray):
                raise TypeError(f"it returned {named(type(array).__name__)}, not a NumPy array")
            return array

    def _described(self, leaf: Leaf, name: str) -> tuple[Shape, str]:
        """Shape and dtype of an array."""
        with _about(self, "shape_of", name):
            shape = tuple(map(index, self.shape_of(leaf)))
        with _about(self, "dtype_of", name):
            dtype = self.dtype_of(leaf)
            if dtype is None:
                raise UnsupportedLeafError(
                    f"{named(type(leaf).__qualname__)} of a dtype that cannot be stored; convert "
                    f"it to a number type first"
                )
            if dtype not in DTYPES:
                raise TypeError(f"it returned {dtype!r}, not the name of a type of the format")
        return shape, dtype


@contextlib.contextmanager
def _about(adapter: object, method: str, name: str) -> Iterator[None]:
    """Name the leaf on which an adapter's method fails; a lack of memory stays one."""
    try:
        yield
    except MemoryError:
        raise
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{name or 'the root'}: {error}") from error
    except Exception as error:
        raise UnsupportedLeafError(
            f"{name or 'the root'}: {type(adapter).__name__}.{method} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
