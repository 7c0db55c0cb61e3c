"""A mapping on known shapes: what reading, writing and the proof work from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from xckpt.core.geometry.box import Box
from xckpt.core.geometry.boxes import Boxes
from xckpt.mapping.bundle import Assertion, Lossy
from xckpt.mapping.rule import Rule
from xckpt.mapping.spec import TensorSpec
from xckpt.mapping.strided_copy import StridedCopy, restrict
from xckpt.mapping.traced import Traced

__all__ = ["ResolvedMapping", "copies_into"]


@dataclass(frozen=True, slots=True)
class ResolvedMapping:
    """A mapping on known shapes: every target leaf as copies out of source leaves."""

    sources: Mapping[str, TensorSpec]
    """All leaves of the source."""
    targets: Mapping[str, TensorSpec]
    """All leaves that the mapping makes, in the order of the rules."""
    copies: Mapping[str, tuple[StridedCopy, ...]]
    """Target leaf -> copies that cover it."""
    assertions: tuple[Assertion, ...] = ()
    """What must hold in the data; to be read before anything is written."""
    dropped: tuple[Traced, ...] = ()
    """What is left out without a look at it: tensors made of the source."""
    lossy: tuple[Lossy, ...] = ()
    """The steps that do not bring every value back, with their bounds."""
    unused: tuple[str, ...] = ()
    """Source leaves that no rule takes."""
    idle: tuple[Rule, ...] = ()
    """Rules that take no leaf of this source."""
    makers: Mapping[str, Rule] = field(default_factory=dict)
    """Target leaf -> the rule that makes it."""
    _boxes: dict[str, Boxes] = field(default_factory=dict, compare=False, repr=False)

    def copies_into(self, name: str, box: Box) -> tuple[StridedCopy, ...]:
        """The copies of just the elements of a box of a target leaf.

        Offsets stay relative to the whole leaf.

        Raises:
            KeyError: the mapping makes no such leaf.
        """
        return copies_into(self.copies[name], box, self._boxes, name)


MANY_COPIES = 8
"""From so many copies on, their boxes are compared all at once."""


def copies_into(
    copies: tuple[StridedCopy, ...],
    box: Box,
    known: dict[str, Boxes] | None = None,
    name: str = "",
) -> tuple[StridedCopy, ...]:
    """`restrict`, which looks only at copies whose bounding box meets the box."""
    if 0 in box.sizes:
        return ()
    if len(copies) < MANY_COPIES:
        return restrict(copies, box)
    boxes = known.get(name) if known is not None else None
    if boxes is None:
        pairs = [(copy.target_box.offsets, copy.target_box.sizes) for copy in copies]
        boxes = Boxes.of(pairs, rank=len(box.sizes))
        if known is not None:
            known[name] = boxes
    low, size = np.array(box.offsets, np.int64), np.array(box.sizes, np.int64)
    meets = ((boxes.offsets < low + size) & (boxes.ends > low)).all(axis=1)
    return restrict([copies[i] for i in np.flatnonzero(meets)], box)
