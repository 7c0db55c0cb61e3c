"""The boxes of a load's targets, filled by the copies of a mapping.

1. `TargetBoxes.add` takes a box as the default planner would read it: one item, all elements.
2. Its memory is the target's own, or a copy of it where the host cannot reach that.
3. Every copy into a box is counted. When its last element has landed, the copy goes to the target's
   memory and the default planner publishes the box.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from xckpt.convert.units.make import run_copy
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.plan.items import ReadItem
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.core.plan.wanted import Countdown
from xckpt.mapping.strided_copy import StridedCopy
from xckpt.storage.chunks.chunk import allocate

Array = NDArray[np.generic]


@dataclass(slots=True)
class _TargetBox:
    """A box of a target, while it is filled."""

    item: ReadItem
    """How the default planner would read it."""
    missing: Countdown
    """Elements still to come."""
    buffer: object = None
    """The target's own memory."""
    host: Array | None = None
    """What is filled: that memory, or a copy of it."""
    is_copy: bool = False

    @property
    def origin(self) -> tuple[int, ...]:
        """The box's first element in the target."""
        offset = self.item.dest_index.offset
        assert offset is not None
        return offset


class TargetBoxes:
    """The wanted boxes of one load; calls from several threads are fine.

    Args:
        planner: resolves the targets' memory and publishes the boxes that are full.
        dtypes: leaf -> the element type that is written.
    """

    def __init__(self, planner: DefaultLoadPlanner, dtypes: Mapping[str, str]) -> None:
        self.dtypes = dtypes
        self._planner = planner
        self._boxes: dict[tuple[str, int | None], _TargetBox] = {}
        self._lock = threading.Lock()

    def add(self, item: ReadItem) -> None:
        """Add the box that an item of the default planner reads."""
        self._boxes[_key(item)] = _TargetBox(item, Countdown(prod(item.lengths)))

    def host(self, item: ReadItem) -> tuple[Array, tuple[int, ...]]:
        """The memory of the box that an item goes into, and its first element in the target.

        Raises:
            LeafTooLargeError: there is no memory for it.
        """
        box = self._boxes[_key(item)]
        return self._host(box), box.origin

    def fill(
        self,
        item: ReadItem,
        copies: Sequence[StridedCopy],
        source: Array | None = None,
        source_origin: tuple[int, ...] | None = None,
    ) -> None:
        """Carry out copies into the box that an item goes into.

        Args:
            item: says which box.
            copies: those into it, offsets relative to the whole tensors.
            source: what they read, a box from ``source_origin`` on; None for constants.
            source_origin: its first element in the stored tensor.
        """
        box = self._boxes[_key(item)]
        host = self._host(box)
        for copy in copies:
            run_copy(copy, source, host, source_origin, box.origin)
        self.landed(item, copies)

    def landed(self, item: ReadItem, copies: Sequence[StridedCopy]) -> None:
        """Count what copies wrote into the box that an item goes into; publish a full box."""
        box = self._boxes[_key(item)]
        if box.missing.land(sum(copy.elements for copy in copies)):
            return
        if box.is_copy and box.host is not None:
            self._planner.adapters.copy_into(box.buffer, box.host)
        self._planner.commit_tensor(box.item, box.buffer)
        box.buffer = box.host = None

    def _host(self, box: _TargetBox) -> Array:
        """The memory of a box as a NumPy array, resolved once."""
        with self._lock:
            if box.host is None:
                box.buffer = self._planner.resolve_tensor(box.item)
                box.host = self._planner.adapters.writable_numpy(box.buffer)
            if box.host is None:
                leaf = box.item.dest_index.fqn
                box.host = allocate(box.item.lengths, numpy_dtype(self.dtypes[leaf]), leaf)
                box.is_copy = True
            return box.host


def _key(item: ReadItem) -> tuple[str, int | None]:
    """Leaf and number of the box that an item goes into."""
    return item.dest_index.fqn, item.dest_index.index
