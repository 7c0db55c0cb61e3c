"""One leaf that a load wants: its boxes, their memory, and how much of each is still to come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xckpt.core.geometry.box import Box, Boxes
from xckpt.core.leaf import TargetLeaf
from xckpt.core.plan.countdown import Countdown
from xckpt.errors import LeafTooLargeError, PlanError


@dataclass(slots=True)
class WantedLeaf:
    """A tensor of the target tree; boxes have the numbers that they have in the target."""

    name: str
    target: TargetLeaf
    boxes: Boxes = field(init=False)
    """What the target wants."""
    missing: list[Countdown] = field(default_factory=list[Countdown])
    """For each box, how many of its elements are still to come; empty until it is planned."""

    def __post_init__(self) -> None:
        self.boxes = self.target.boxes

    def expect(self) -> None:
        """The elements of all boxes are to come."""
        self.missing = [Countdown(count) for count in self.boxes.elements.tolist()]

    def commit_empty(self) -> None:
        """Publish the boxes without elements: they get no read item."""
        for number, countdown in enumerate(self.missing):
            if countdown.missing == 0:
                self.target.commit(number)

    def memory(self, number: int, region: Box) -> object:
        """A region of a box's buffer, counted from the box's first element.

        Raises:
            LeafTooLargeError: there is no memory for the buffer.
        """
        try:
            buffer = self.target.buffer(number)
        except MemoryError as error:
            raise LeafTooLargeError(
                f"{self.name or 'the root'}: no memory for it; load it sharded, or a part of it "
                f"with xckpt.open ({error})"
            ) from error
        if self.boxes[number].sizes == region.sizes:
            return buffer
        # Every framework's buffer slices like NumPy's.
        sliceable: NDArray[np.generic] = buffer  # type: ignore[assignment]
        return sliceable[region.slices()]

    def land(self, number: int, region: Box) -> None:
        """Count a region that is there; publish the box with the last of its elements.

        Raises:
            PlanError: the box had all its elements before.
        """
        missing = self.missing[number].land(region.elements)
        if missing == 0:
            self.target.commit(number)
        elif missing < 0:
            raise PlanError(
                f"{self.name}: {region} of box {number} was committed, but the box has got "
                f"{-missing} elements too many; each read item must be committed once"
            )
