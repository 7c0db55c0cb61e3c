"""The read items of a load in columns: a leaf that is read as a whole takes no object.

Most leaves of most loads are one array, and one box wants all of it. Such an item is its leaf's
name and the sizes of the array, which leaves that are alike share; so is that of a value, which has
no sizes. Any other item is kept as it is. Its user sees items, made on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar, cast, overload

from xckpt.core.geometry.box import Shape
from xckpt.core.metadata import MetadataIndex
from xckpt.core.plan.items import LoadItemType, ReadItem

Row = Shape | ReadItem | None
"""The sizes of an array that is read as a whole, None for a value, or any other item."""

Hook = TypeVar("Hook", bound=Callable[..., object])
_NO_ITEMS = "needs_no_items"


def needs_no_items(hook: Hook) -> Hook:
    """Mark a hook for all ranks' load plans that does not look at their items.

    A subclass that overrides the hook, as it may to look at them, loses the mark.

    Example:
        >>> class Planner:
        ...     @needs_no_items
        ...     def create_global_plan(self, plans):
        ...         return plans
        >>> class Curious(Planner):
        ...     def create_global_plan(self, plans):
        ...         return [plan for plan in plans if plan.items]
        >>> need_items(Planner().create_global_plan), need_items(Curious().create_global_plan)
        (False, True)
    """
    setattr(hook, _NO_ITEMS, True)
    return hook


def need_items(*hooks: Callable[..., object]) -> bool:
    """Whether one of some hooks may look at the items of other ranks' plans."""
    return not all(getattr(hook, _NO_ITEMS, False) for hook in hooks)


class ReadItems(Sequence[ReadItem]):
    """Read items behind two columns.

    Args:
        names: the leaf of each item, in the target.
        rows: what it reads.

    Example:
        >>> items = ReadItems(["w", "step"], [(4, 2), None])
        >>> items[0].lengths, items[1].type.name
        ((4, 2), 'BYTE_IO')
        >>> ReadItems.of(list(items)).rows == list(items)
        True
    """

    __slots__ = ("names", "rows")

    def __init__(self, names: list[str], rows: list[Row]) -> None:
        self.names: Final = names
        self.rows: Final = rows

    @classmethod
    def of(cls, items: Iterable[ReadItem]) -> ReadItems:
        """The columns of items; the argument itself if it is columns already."""
        if isinstance(items, ReadItems):
            return items
        rows: list[Row] = [*items]
        return cls([item.dest_index.fqn for item in cast("list[ReadItem]", rows)], rows)

    def add(self, name: str, rows: Sequence[Row]) -> None:
        """Add what is read of one leaf."""
        self.names.extend([name] * len(rows))
        self.rows.extend(rows)

    def tensors(self) -> ReadItems:
        """Those that read tensors."""
        pairs = list(zip(self.names, self.rows, strict=True))
        kept = [pair for pair in pairs if _is_tensor(pair[1])]
        if len(kept) == len(pairs):
            return self
        return ReadItems([name for name, _ in kept], [row for _, row in kept])

    def renamed(self, names: Mapping[str, str]) -> ReadItems:
        """The same items under the names that the leaves have in the checkpoint.

        Args:
            names: leaf name -> its name in the checkpoint, where that is another one.
        """
        pairs = zip(self.names, self.rows, strict=True)
        rows = [_of_other(n, row, names[n]) if n in names else row for n, row in pairs]
        return ReadItems(self.names, rows)

    def values(self) -> Iterator[ReadItem]:
        """Those that read values."""
        return (self[n] for n, row in enumerate(self.rows) if not _is_tensor(row))

    def __repr__(self) -> str:
        return f"<{len(self):,} items to read>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ReadItem]:
        return map(_item, self.names, self.rows)

    @overload
    def __getitem__(self, index: int) -> ReadItem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ReadItem]: ...
    def __getitem__(self, index: int | slice) -> ReadItem | list[ReadItem]:
        if isinstance(index, slice):
            return list(map(_item, self.names[index], self.rows[index]))
        return _item(self.names[index], self.rows[index])

    def __add__(self, other: Iterable[ReadItem]) -> list[ReadItem]:
        """A list with more items, as of a list of items."""
        return [*self, *other]

    def __radd__(self, other: Iterable[ReadItem]) -> list[ReadItem]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sequence):
            return NotImplemented
        if isinstance(other, ReadItems) and self.rows == other.rows and self.names == other.names:
            return True
        return list(self) == list(cast(Sequence[object], other))


def _item(name: str, row: Row) -> ReadItem:
    if isinstance(row, ReadItem):
        return row
    if row is not None:
        origin = (0,) * len(row)
        index = MetadataIndex(name, origin, 0)
        return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, row)
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())


def _of_other(name: str, row: Row, stored: str) -> ReadItem:
    item = _item(name, row)
    return replace(item, storage_index=replace(item.storage_index, fqn=stored))


def _is_tensor(row: Row) -> bool:
    return row.type is LoadItemType.TENSOR if isinstance(row, ReadItem) else row is not None
