"""torch.distributed as a `Group`: bytes over connections of our own, and no rank left hanging.

The processes of a process group find each other through its store and talk over the connections of
a `Star` (`xckpt.engine.ranks.star`), which says how lost ranks are noticed, named and given up.
Nothing is sent over the process group itself, whatever its backend: training may use it meanwhile.

1. The coordinator stores an `Invitation`, and the others connect when they first have to.
2. A process group has one star for each purpose (saves in the background have their own) and
   coordinator, as long as it lives.
3. A rank that gives others up leaves a note in the store, so that a rank that comes late, and was
   never connected, learns of it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Final, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xckpt.core.geometry.spread import Processes
from xckpt.engine.ranks.alive import beat_of
from xckpt.engine.ranks.group import KeptPlans
from xckpt.engine.ranks.patience import LONGEST
from xckpt.engine.ranks.star import Star
from xckpt.engine.ranks.waiting import WARN_AFTER
from xckpt.torch.meeting import join

WITHOUT_GLOO = timedelta(minutes=30).total_seconds()
"""Seconds that a silent rank is waited for where the process group has no gloo backend."""

_stars: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int], Star]] = (
    weakref.WeakKeyDictionary()
)
"""Process group -> its stars, by purpose and coordinator."""
_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.RLock]] = (
    weakref.WeakKeyDictionary()
)
"""Process group -> what a thread holds while it uses the stars of a purpose."""


class TorchGroup:
    """The processes of a torch process group (default: all), numbered by their rank *in it*.

    How long a silent rank is waited for is the process group's timeout
    (``init_process_group(timeout=...)``, ``new_group(timeout=...)``), or `WITHOUT_GLOO` where it
    has no gloo backend; a rank that dies is noticed at once.

    Args:
        process_group: the processes that take part; None for all of them.
        coordinator_rank: the rank within ``process_group`` that decides and commits.
        timeout: seconds to wait for a rank that neither answers nor makes progress with what it
            writes or reads. None for as long as the process group waits.
        warn_after: seconds of waiting after which a warning in the log names the silent ranks.

    Raises:
        ValueError: this process is not in the group, or the group has no such coordinator.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> group = TorchGroup()
        >>> group.rank, group.size, group.gather(b"plan"), group.broadcast(b"done")
        (0, 1, [b'plan'], b'done')
        >>> dist.destroy_process_group()
    """

    rank: int
    size: int
    coordinator: int

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        coordinator_rank: int = 0,
        *,
        timeout: float | None = None,
        warn_after: float = WARN_AFTER,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group first, or leave out "
                "process_group to work in one process"
            )
        self.rank = dist.get_rank(process_group)
        if self.rank < 0:
            raise ValueError("this process is not part of the process group that it was given")
        self.size = dist.get_world_size(process_group)
        if not 0 <= coordinator_rank < self.size:
            raise ValueError(
                f"coordinator_rank {coordinator_rank} is not one of the ranks [0, {self.size}) of "
                f"the process group; it counts within the group"
            )
        self.coordinator = coordinator_rank
        group = process_group if process_group is not None else dist.group.WORLD
        assert group is not None
        self._process_group = group
        # Now: training may destroy the process group while a save in the background uses this one.
        self._has_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
        numbers = dist.get_process_group_ranks(group)
        self.processes: Final = Processes("torch", np.array(numbers, np.int64))
        """The ranks of these processes among all; see `NumberedGroup`."""
        self._given_timeout, self._warn_after = timeout, warn_after
        self._purpose, self._call = "xckpt", 0

    @cached_property
    def timeout(self) -> float:
        """Seconds that a silent rank is waited for."""
        if self._given_timeout is not None:
            return min(self._given_timeout, LONGEST)
        if not self._has_gloo:
            return WITHOUT_GLOO
        options = self._process_group._get_backend(torch.device("cpu")).options
        return min(options._timeout.total_seconds(), LONGEST)

    def within(self, seconds: float) -> TorchGroup:
        """The same processes, waiting ``seconds`` for a silent rank in one step."""
        return self._again(seconds)

    def in_background(self) -> TorchGroup:
        """The same processes over connections of its own, for use in another thread."""
        group = self._again(self._given_timeout)
        group._purpose = "xckpt/background"
        return group

    @property
    def _star(self) -> Star:
        """The connections; made at the first use.

        Raises:
            RanksFailedError: the coordinator did not come, or others have given up.
        """
        stars = _stars.setdefault(self._process_group, {})
        key = self._purpose, self.coordinator
        if key not in stars:
            stars[key], links = join(
                self._process_group,
                self._purpose,
                self.rank,
                self.coordinator,
                self.timeout,
                has_gloo=self._has_gloo,
                call=self._call,
            )
            weakref.finalize(self._process_group, links.close)
        stars[key].patience.warn_after = self._warn_after
        return stars[key]

    @property
    def turn(self) -> threading.RLock:
        """See `OperationGroup`."""
        turns = _turns.setdefault(self._process_group, {})
        return turns.setdefault(self._purpose, threading.RLock())

    @property
    def kept_plans(self) -> KeptPlans:
        """The plans of earlier saves; see `PlanCachingGroup`."""
        return self._star.kept_plans

    def begin(self) -> None:
        """See `OperationGroup`.

        Raises:
            RanksFailedError: the coordinator did not come, or others have given up.
        """
        if self.size > 1:
            self._star.board.call = self._call
            self._star.begin()

    def name_call(self, call: int) -> None:
        """See `CallNamingGroup`."""
        self._call = call

    def leave(self, error: BaseException) -> None:
        """See `OperationGroup`."""
        if self.size > 1:
            self._star.leave(error)

    def suspect(self, ranks: Sequence[int]) -> None:
        """See `OperationGroup`."""
        if self.size > 1:
            self._star.suspect(ranks)

    @property
    def beat(self) -> float:
        """See `HeartbeatGroup`."""
        return beat_of(self.timeout) if self.size > 1 else math.inf

    def say_alive(self, seconds_ago: float) -> None:
        """See `HeartbeatGroup`."""
        self._star.say_alive(seconds_ago)

    def heed(self, began: float, away: float) -> None:
        """See `HeartbeatGroup`.

        Raises:
            RanksFailedError: ranks are lost, or have left.
        """
        self._star.heed(began, away, self.timeout)

    def _again(self, timeout: float | None) -> TorchGroup:
        return TorchGroup(
            self._process_group, self.coordinator, timeout=timeout, warn_after=self._warn_after
        )

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order, on the coordinator; None elsewhere.

        Raises:
            RanksFailedError: a rank is lost, or has left.
        """
        return self._star.gather(data, self.timeout)

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Entry ``rank`` of the coordinator's list; the others pass None.

        Raises:
            RanksFailedError: a rank is lost, or has left.
        """
        return self._star.scatter(data, self.timeout)

    def broadcast(self, data: bytes | None) -> bytes:
        """The coordinator's bytes, on every rank; the others pass None.

        Raises:
            RanksFailedError: the coordinator is lost, or has lost another rank.
        """
        return self._star.broadcast(data, self.timeout)


def current_group(
    coordinator_rank: int = 0, process_group: object = None, timeout: float | None = None
) -> TorchGroup | None:
    """The processes of a torch process group or DeviceMesh; None if it is nothing of torch's.

    Without one: all processes, or None if torch.distributed is not initialised.

    Raises:
        ValueError: this process is not in the group, the group has no such coordinator, or a mesh
            of several dimensions has only some of the processes.

    Example:
        >>> current_group() is None  # before torch.distributed.init_process_group
        True
    """
    if process_group is None:
        initialised = dist.is_available() and dist.is_initialized()
        return TorchGroup(None, coordinator_rank, timeout=timeout) if initialised else None
    if dist.is_available() and isinstance(process_group, DeviceMesh):
        return TorchGroup(_processes_of(process_group), coordinator_rank, timeout=timeout)
    # What new_group returns on a rank outside the group.
    outside = process_group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(process_group, dist.ProcessGroup):
        return None
    given = cast(dist.ProcessGroup, process_group)
    return TorchGroup(given, coordinator_rank, timeout=timeout)


def _processes_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group that has the processes of a mesh; None for all processes.

    Raises:
        ValueError: there is none yet, or this process is outside the mesh.
    """
    if mesh.get_coordinate() is None:
        raise ValueError("this process is not part of the DeviceMesh that it was given")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return None
    raise ValueError(
        f"the DeviceMesh has {mesh.ndim} dimensions and {mesh.size()} of the "
        f"{dist.get_world_size()} processes, and no process group of just these is known; make one "
        f"by torch.distributed.new_group, and give it as group="
    )
