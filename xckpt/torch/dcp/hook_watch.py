"""What a save or a load by DCP took on this rank: in the log, and for a metrics function.

DCP calls these hooks and has the ranks meet between them, so a `HookWatch` times the hooks:

1. Each hook is a step.
2. The time between the hooks where DCP has the ranks exchange plans and results counts as waiting.
   DCP's own global planning is in it.
3. The last hook ends it: on the coordinator the commit of a save, elsewhere the writing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from xckpt.engine.ranks.watch import Watch
from xckpt.options import LoadOptions, SaveOptions, is_watched


class _Ranks:
    """Which rank this is, and the time between its hooks; a `WaitingRank`."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.waited = 0.0
        self.left: float | None = None
        """When the last hook ended."""


class HookWatch:
    """Times the hooks of one save or load by DCP, if there is a listener.

    Args:
        operation: ``"dcp.save"`` or ``"dcp.load"``.
        path: the path or URL.
        options: those of the writer or reader.

    Example:
        >>> watch = HookWatch("dcp.load", "run/7", LoadOptions(metrics=print))
        >>> with watch.hook("find"):
        ...     pass
        >>> with watch.hook("read", last=True):
        ...     watch.set_bytes(1 << 20)  # doctest: +ELLIPSIS
        Metrics(operation='dcp.load', path='run/7', rank=0, ranks=1, bytes=1048576, shared=0, ...)
    """

    def __init__(
        self, operation: str, path: str | os.PathLike[str], options: SaveOptions | LoadOptions
    ) -> None:
        self._ranks = _Ranks()
        self._watch: Watch | None = None
        if is_watched(options):
            self._watch = Watch.of(operation, path, options)
            self._watch.ranks = self._ranks

    def meet(self, *, rank: int | None = None, size: int | None = None) -> None:
        """Say which rank this is, and of how many, as far as DCP has said."""
        if rank is not None:
            self._ranks.rank = rank
        if size is not None:
            self._ranks.size = size

    @property
    def is_on(self) -> bool:
        """Whether there is a listener."""
        return self._watch is not None

    def set_bytes(self, size: int) -> None:
        """Say how many bytes of tensors this rank writes or reads."""
        if self._watch is not None:
            self._watch.bytes = size

    @contextlib.contextmanager
    def hook(self, step: str, *, waits: bool = True, last: bool = False) -> Iterator[None]:
        """Around a hook of the writer or reader.

        Args:
            step: what it does.
            waits: whether the ranks have met since the hook before.
            last: whether nothing follows.
        """
        watch, ranks = self._watch, self._ranks
        if watch is None:
            yield
            return
        if waits and ranks.left is not None:
            ranks.waited += time.perf_counter() - ranks.left
        try:
            with watch.step(step):
                yield
        except BaseException as error:
            self._end(watch, type(error).__name__)
            raise
        ranks.left = time.perf_counter()
        if last:
            self._end(watch)

    def _end(self, watch: Watch, error: str = "") -> None:
        if self._ranks.size == 1:
            # DCP's planner has worked between the hooks; there is no rank to wait for.
            self._ranks.waited = 0.0
        self._watch = None
        watch.end(error)
