"""JAX's preemption notice: SIGTERM, as the preemption service of `jax.distributed` notes it.

1. Where several processes have joined, JAX takes SIGTERM for itself, in each of them (unless
   ``jax_enable_preemption_service`` is off). Any process that receives it tells all, and JAX finds
   a count of calls that none has reached yet.
2. Each process counts its calls of `reached`. From that count on the answer is True, on all
   processes alike.
"""

from __future__ import annotations

import signal
from collections.abc import Collection

from jax._src import distributed
from jax.experimental import multihost_utils


class JaxNotice:
    """The notice of this process's JAX job.

    Args:
        manager: of JAX's preemption service, as long as the job lasts.
    """

    signals: Collection[int] = (signal.SIGTERM,)

    def __init__(self, manager: object) -> None:
        self.manager = manager
        self._calls = 0
        self._reached = False

    def reached(self) -> bool:
        """Whether all processes must stop at this call."""
        if not self._reached:
            self._calls += 1
            self._reached = multihost_utils.reached_preemption_sync_point(self._calls)
        return self._reached


_notices: list[JaxNotice] = []
"""That of the job, if it was asked for: several users in one process count together."""


def current_notice() -> JaxNotice | None:
    """The notice of the job that was joined; None if there is none, or its service is off."""
    manager = distributed.global_state.preemption_sync_manager
    if manager is None:
        return None
    # A job that is joined later counts from the start, as its other processes do.
    if not _notices or _notices[0].manager is not manager:
        _notices[:] = [JaxNotice(manager)]
    return _notices[0]
