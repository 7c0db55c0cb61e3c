"""Which step of a run the next save shares its unchanged chunks with.

1. A root's base is its step that was saved or restored last, so that its contents were written or
   read, and compared with their digests, by this process.
2. What is shared is one file, and damage to it damages each step that has it. So one save in
   ``full_every`` has no base and writes everything again.
"""

from __future__ import annotations

from xckpt.core.run.record import StepRecord

FULL_EVERY = 16
"""Saves from one that writes everything to the next, by default."""


class Bases:
    """The bases of the roots of a run, the same on every rank.

    Args:
        full_every: saves from one without a base to the next; None for never.

    Example:
        >>> bases = Bases(full_every=3)
        >>> bases.base_for(temporary=False) is None
        True
        >>> bases.saved(StepRecord(1), shared=False)
        >>> bases.base_for(temporary=False).number
        1
        >>> for number in (2, 3):
        ...     bases.saved(StepRecord(number), shared=True)
        >>> bases.base_for(temporary=False) is None
        True
    """

    def __init__(self, full_every: int | None) -> None:
        self._full_every = full_every
        self._newest: dict[bool, StepRecord] = {}
        self._sharing: dict[bool, int] = {}
        """How many saves of a root follow one without a base."""

    def base_for(self, *, temporary: bool) -> StepRecord | None:
        """The base of the next save to a root; None if it writes everything."""
        following = self._sharing.get(temporary, 0) + 1
        if self._full_every is not None and following >= self._full_every:
            return None
        return self._newest.get(temporary)

    def saved(self, record: StepRecord, *, shared: bool) -> None:
        """A step was committed; ``shared`` if it had a base."""
        self._newest[record.temporary] = record
        self._sharing[record.temporary] = (
            self._sharing.get(record.temporary, 0) + 1 if shared else 0
        )

    def restored(self, record: StepRecord | None) -> None:
        """The run goes on from a step, or from none."""
        self._newest, self._sharing = {}, {}
        if record is not None:
            self.saved(record, shared=False)
