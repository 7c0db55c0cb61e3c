"""Replicas that are compared between ranks: small ones whole, samples of the others.

A plain tensor or a Python value that several ranks save under one name is a replica: one rank's is
stored. If it differs by rank, the others' would be lost. So small ones are compared, the smallest
first, but for those that are `PerRank`, and those whose data cost a transfer that must be
announced. Of a tensor above the limits a sample from its middle is compared. That tells other
tensors by their contents, as those of pipeline stages that have one name; of tensors that differ
elsewhere alone any one rank's is kept. So it is with the boxes of a tensor that lies on a part of
the ranks alone, as those of a pipeline stage do: several such parts may have tensors of one name.

``SaveOptions(compare_replicas=True)`` has all compared, also each box of a sharded tensor that
several ranks hold: as under HSDP, or where each of several meshes has the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from operator import itemgetter
from typing import Any, Final, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xckpt.core.adapter import Adapters
from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.leaf import SourceLeaf
from xckpt.core.part.per_rank import KIND


class _Digested(Protocol):
    """A Python value among the leaves."""

    @property
    def kind(self) -> str: ...


class _Sliced(Protocol):
    """Elements of any framework, of which a part is taken as of a NumPy array."""

    def __getitem__(self, part: tuple[slice, ...], /) -> object: ...


Value = TypeVar("Value", bound=_Digested)

MOST_LEAF_BYTES: Final = 1 << 20
"""Largest leaf that is compared."""
MOST_BYTES: Final = 32 << 20
"""Most bytes of all leaves that are compared: it takes some milliseconds."""
SAMPLE: Final = 1 << 10
"""Elements of each other tensor that are compared."""
SAMPLED_BYTES: Final = 1 << 16
"""Smallest box that a sample is taken of though all of it is compared."""
MOST_SAMPLES: Final = 1 << 13
"""Boxes that samples are taken of, the largest."""
MOST_OF_ONE: Final = 1 << 6
"""Boxes of one tensor that are compared, the first."""


def small_replicas(
    leaves: Mapping[str, SourceLeaf],
    values: Mapping[str, Value],
    encode: Callable[[Value, str], bytes],
    containers: Mapping[str, str],
) -> Iterator[tuple[str, str, object]]:
    """Name, type and data of each box that may be a replica and is not `PerRank`.

    The data are the framework's tensor, or a sample of one that is not small; of a value the bytes
    that stand for it, from ``encode``, which takes the leaf's name too.
    """
    yield from _values(values, encode, containers)
    own = _own(containers)
    boxes: list[tuple[int, str, int, SourceLeaf]] = []
    for name, leaf in leaves.items():
        is_whole = not leaf.sharded and len(leaf.boxes) == 1
        if not (is_whole or getattr(leaf, "is_apart", False)):
            continue
        if not leaf.dtype or hasattr(leaf, "expect") or (own and name.startswith(own)):
            continue
        item, counts = item_size(leaf.dtype), [prod(leaf.shape)]
        if not is_whole:
            counts = leaf.boxes.elements[:MOST_OF_ONE].tolist()
        for number, count in enumerate(counts):
            boxes.append((min(count * item, MOST_BYTES + 1), name, number, leaf))
    # The state of a generator or a position, which are small, is what differs by mistake.
    boxes.sort(key=itemgetter(0, 1, 2))
    sizes = np.fromiter((size for size, *_ in boxes), np.int64, len(boxes))
    few = int(np.count_nonzero((sizes <= MOST_LEAF_BYTES) & (sizes.cumsum() <= MOST_BYTES)))
    for _, name, number, leaf in boxes[:few]:
        yield name, _kind(leaf, leaf.boxes[number]), leaf.data(number)
    # A rank with more leaves has less room for each, and takes a sample of what is whole here.
    sampled = min(few, int(np.searchsorted(sizes, SAMPLED_BYTES)))
    for _, name, number, leaf in boxes[sampled:][-MOST_SAMPLES:]:
        yield _sample(name, leaf, number)


def _sample(name: str, leaf: SourceLeaf, number: int) -> tuple[str, str, object]:
    """The middle of a box that has elements."""
    box, data = leaf.boxes[number], cast(_Sliced, leaf.data(number))
    sample = middle(box.sizes, SAMPLE)
    return name, _kind(leaf, sample.shifted(box.offsets)), data[sample.slices()]


def middle(shape: Sequence[int], most: int) -> Box:
    """A box of up to ``most`` elements around the middle of a shape that has elements.

    It spans as many of the last dimensions as it can.

    Example:
        >>> print(middle((9, 1000, 10), 300))
        [4, 5) x [485, 515) x [0, 10)
    """
    sizes: list[int] = []
    for size in reversed(shape):
        sizes.insert(0, min(size, most))
        most = max(most // sizes[0], 1)
    offsets = [(size - part) // 2 for size, part in zip(shape, sizes, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


def all_replicas(
    leaves: Mapping[str, SourceLeaf],
    values: Mapping[str, Value],
    encode: Callable[[Value, str], bytes],
    containers: Mapping[str, str],
    adapters: Adapters,
) -> Iterator[tuple[str, str, object]]:
    """Name, type and a digest of each value and of each box of a tensor, but for `PerRank` ones."""
    yield from _values(values, encode, containers)
    own = _own(containers)
    for name, leaf in leaves.items():
        if own and name.startswith(own):
            continue
        for number, box in enumerate(leaf.boxes):
            array = np.ascontiguousarray(adapters.to_numpy(leaf.data(number), name))
            digest = blake2b(array.reshape(-1).view(np.uint8).data, digest_size=16).digest()
            yield name, _kind(leaf, box), np.frombuffer(digest, np.uint8)


def _values(
    values: Mapping[str, Value],
    encode: Callable[[Value, str], bytes],
    containers: Mapping[str, str],
) -> Iterator[tuple[str, str, object]]:
    own = _own(containers)
    for name, value in values.items():
        if not (own and name.startswith(own)):
            yield name, value.kind, np.frombuffer(encode(value, name), np.uint8)


def _own(containers: Mapping[str, str]) -> tuple[str, ...]:
    """The beginnings of the names of `PerRank` leaves."""
    return tuple(f"{name}/" for name, kind in containers.items() if kind == KIND)


def _kind(leaf: SourceLeaf, box: Box) -> str:
    """Dtype and shape of a tensor; in a second line, which part of it a box is, if not all."""
    shape = tuple(leaf.shape)
    part = "" if box.sizes == shape else f"\n{box}"
    return f"{leaf.dtype} {shape}{part}"


@runtime_checkable
class Joining(Protocol):
    """An adapter that hands out many small tensors quicker together than one by one."""

    def joined(self, data: Sequence[Any]) -> Iterable[NDArray[np.generic]]:
        """The elements of tensors in fewer arrays, in one order for equal types and shapes."""
        ...


def joined(
    leaves: Iterable[tuple[str, object]], adapters: Adapters
) -> Iterator[NDArray[np.generic]]:
    """The elements of any frameworks' tensors, in fewer arrays where that is quicker.

    Args:
        leaves: (name, tensor) of each; the name is for an error.
        adapters: know the frameworks.

    Example:
        >>> from xckpt.core.adapter import NO_ADAPTERS
        >>> leaves = [("a", np.arange(2)), ("b", np.ones(1))]
        >>> [array.tolist() for array in joined(leaves, NO_ADAPTERS)]
        [[0, 1], [1.0]]
    """
    by_type: dict[type[object], list[tuple[str, object]]] = {}
    for name, data in leaves:
        by_type.setdefault(type(data), []).append((name, data))
    for same in by_type.values():
        first = same[0][1]
        owner = None if isinstance(first, np.ndarray) else adapters.owner(first)
        if isinstance(owner, Joining):
            yield from owner.joined([data for _, data in same])
        else:
            yield from (adapters.to_numpy(data, name) for name, data in same)
