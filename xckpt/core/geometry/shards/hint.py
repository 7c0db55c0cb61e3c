"""What a save knows of its readers: into how many parts they cut each dimension of a tensor.

`parts_of` takes what people have at hand. No framework is imported: objects are recognised by their
attributes.

| given | meaning |
|---|---|
| ``8`` | any dimension, into up to 8 parts |
| ``(1, 8)`` | the second dimension into 8 parts; dimensions beyond the tuple are whole |
| ``NamedSharding(mesh, P(None, "model"))`` | as JAX cuts by it |
| ``(mesh, [Shard(1)])`` | as torch cuts by it; the mesh is a ``DeviceMesh``, or its shape |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol, TypeAlias, cast

from xckpt.core.text.arguments import shown_value

__all__ = ["IN_BUCKETS", "MOST_PARTS", "Readers", "parts_of"]

IN_BUCKETS = 8
"""Into how many parts readers of a bucket cut, where nothing is known: behind a line, what is read
in vain costs more than the copy by which a save cuts along several dimensions."""

MOST_PARTS = 1 << 20


class _NamedSharding(Protocol):
    """JAX's ``NamedSharding``."""

    @property
    def mesh(self) -> object: ...

    @property
    def spec(self) -> object: ...


class _DeviceMesh(Protocol):
    """torch's ``DeviceMesh``."""

    @property
    def shape(self) -> tuple[int, ...]: ...


_Placed: TypeAlias = tuple[_DeviceMesh | Sequence[int], Sequence[object]]

Readers: TypeAlias = int | Sequence[int] | _NamedSharding | _Placed
"""What `parts_of` takes."""

_TAKES = (
    "readers takes a number of parts (8), one for each dimension ((1, 8)), a NamedSharding of JAX, "
    "or (mesh, placements) of torch"
)


def parts_of(readers: Readers) -> int | tuple[int, ...]:
    """Into how many parts readers cut any dimension, or each one, counted from the first.

    Raises:
        TypeError: it is not in the table above.
        ValueError: a number is out of range, or an axis or dimension is not there.

    Example:
        >>> parts_of(8), parts_of([1, 8])
        (8, (1, 8))
        >>> from types import SimpleNamespace as Shard
        >>> parts_of(((2, 4), (Shard(dim=1), Shard(dim=1))))
        (1, 8)
    """
    given = cast(object, readers)
    if isinstance(given, int) and not isinstance(given, bool):
        return _in_range(given)
    if hasattr(given, "mesh") and hasattr(given, "spec"):
        return _of_sharding(cast(_NamedSharding, given))
    parts = _ints(given)
    if parts is not None:
        return tuple(_in_range(number, least=1) for number in parts)
    if isinstance(given, tuple | list) and len(pair := cast(Sequence[object], given)) == 2:
        return _of_placements(*pair)
    raise TypeError(f"{_TAKES}; not {shown_value(cast(object, readers))}")


def _of_sharding(sharding: _NamedSharding) -> tuple[int, ...]:
    """The parts of JAX's sharding; an axis of which it says nothing is whole."""
    shape: object = getattr(sharding.mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise TypeError(_TAKES)
    sizes, parts = cast(Mapping[str, int], shape), list[int]()
    for axes in cast(Sequence[object], sharding.spec):
        names = cast(tuple[object, ...], axes) if isinstance(axes, tuple) else (axes,)
        parts.append(prod(sizes[name] for name in names if isinstance(name, str)))
    return tuple(parts)


def _of_placements(mesh: object, placements: object) -> tuple[int, ...]:
    """The parts of torch's placements on a mesh: one for each of its dimensions."""
    sizes = _ints(getattr(mesh, "shape", mesh))
    if sizes is None or not isinstance(placements, Sequence):
        raise TypeError(_TAKES)
    placed = cast(Sequence[object], placements)
    if len(placed) != len(sizes):
        raise ValueError(
            f"readers has {len(placed)} placements for a mesh of {len(sizes)} dimensions"
        )
    parts: dict[int, int] = {}
    for size, placement in zip(sizes, placed, strict=True):
        dim = getattr(placement, "dim", None)
        if isinstance(dim, int):
            if dim < 0:
                raise ValueError(f"readers: count dimensions from the first, not as {placement}")
            parts[dim] = parts.get(dim, 1) * size
    return tuple(parts.get(dim, 1) for dim in range(max(parts, default=-1) + 1))


def _ints(given: object) -> tuple[int, ...] | None:
    """The numbers of a sequence that has nothing else; None of any other."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return None
    numbers = tuple(cast(Sequence[object], given))
    found = tuple(n for n in numbers if isinstance(n, int) and not isinstance(n, bool))
    return found if len(found) == len(numbers) else None


def _in_range(number: int, least: int = 0) -> int:
    if not least <= number <= MOST_PARTS:
        raise ValueError(f"readers must be in [{least}, {MOST_PARTS:,}], got {number:,}")
    return number
