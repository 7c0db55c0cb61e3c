"""Which checkpoint of a run the next save shares its unchanged chunks with.

1. A root's base is what was saved or restored there last, so that its contents were written or
   read, and compared with their digests, by this process.
2. What is shared is one file, and damage to it damages each checkpoint that has it. So one save in
   ``full_every`` has no base and writes everything again.
"""

from __future__ import annotations

import os

from xckpt.core.run.names import OptionalBase

FULL_EVERY = 16
"""Saves from one that writes everything to the next, by default."""


class Bases:
    """The bases of the roots of a run, the same on every rank.

    Args:
        full_every: saves from one without a base to the next; None for never.

    Example:
        >>> bases = Bases(full_every=3)
        >>> bases.next("run/1") is None
        True
        >>> bases.next("run/2"), bases.next("run/3")
        ('run/1', 'run/2')
        >>> bases.next("run/4") is None
        True
    """

    def __init__(self, full_every: int | None = FULL_EVERY) -> None:
        self._full_every = full_every
        self._newest: dict[int, str] = {}
        """Number of a root -> the path of what was saved there last."""
        self._sharing: dict[int, int] = {}
        """How many saves of a root follow one without a base."""

    def base_for(self, root: int = 0) -> OptionalBase | None:
        """The base of the next save to a root; None if it writes everything."""
        following = self._sharing.get(root, 0) + 1
        if self._full_every is not None and following >= self._full_every:
            return None
        newest = self._newest.get(root)
        return None if newest is None else OptionalBase(newest)

    def saved(self, path: str | os.PathLike[str], *, shared: bool, root: int = 0) -> None:
        """A checkpoint was committed; ``shared`` if it had a base."""
        self._newest[root] = os.fspath(path)
        self._sharing[root] = self._sharing.get(root, 0) + 1 if shared else 0

    def restored(self, path: str | os.PathLike[str] | None, *, root: int = 0) -> None:
        """The run goes on from a checkpoint, or from none."""
        self._newest, self._sharing = {}, {}
        if path is not None:
            self.saved(path, shared=False, root=root)

    def next(self, path: str | os.PathLike[str]) -> OptionalBase | None:
        """The base of a save that begins now, for callers that need not know whether it succeeds.

        If it fails, the save after it may have no base.
        """
        base = self.base_for()
        self.saved(path, shared=base is not None)
        return base
