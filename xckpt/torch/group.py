"""torch.distributed as a `Group`: bytes over a gloo process group, and no rank left hanging.

Every exchange is between the coordinator and one other rank, so that the coordinator always knows
whom it has lost:

1. In `gather` the coordinator receives from every rank it can. If a rank is lost (killed, out of
   memory, silent), it sends the others the list of lost ranks as the last message, and raises;
   they wait for its answer, read that and raise the same error.
2. In `scatter` and `broadcast` it sends to every rank it can and remembers which it has lost: the
   others are in the next step already, and learn of it from the next `gather`.
3. A rank that loses the coordinator raises at once: gloo notices a closed connection. After a
   timeout of gloo's own, gloo closes all connections of a process, so that step 1 is cut short; all
   raise, but only the coordinator knows the rank that was silent.
4. A rank that is silent for the group's ``timeout`` is given up. If it comes after all, it learns
   of that. What it sends then has no reader, so that the process group is of no more use to a save
   or a load.

Messages travel over `xckpt.torch.channel`. A process group whose processes save in the background
(`TorchGroup.in_background`) gets a gloo backend of its own for that: training may use the other
from the first thread meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xckpt.engine.ranks.waiting import WARN_AFTER
from xckpt.errors import RankFailure, RanksFailedError
from xckpt.torch.channel import SILENT, Channel, companion, given_up, message, store_of

_out_of_step: weakref.WeakKeyDictionary[dist.ProcessGroup, RanksFailedError] = (
    weakref.WeakKeyDictionary()
)
"""Backends on which a silent rank was given up, and the error of that save or load."""

_encode_failures = msgspec.msgpack.Encoder().encode
_decode_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode


class TorchGroup:
    """The processes of a torch process group (default: all), numbered by their rank *in it*.

    Making one is collective where the process group has no gloo backend for the CPU: all its
    processes make one, in the same order. How long a silent rank is waited for is the process
    group's timeout (``init_process_group(timeout=...)``, ``new_group(timeout=...)``), or
    `GLOO_TIMEOUT` where it has no gloo; a rank that dies is noticed at once.

    Args:
        process_group: the processes that take part; None for all of them.
        coordinator_rank: who decides and commits, as a rank within ``process_group``.
        timeout: seconds that a silent rank is waited for in one step; it has to outlast the slowest
            rank's writing. None for as long as the process group does.
        warn_after: seconds of waiting after which a warning in the log names the silent ranks.

    Raises:
        ValueError: this process is not in the group, or the group has no such coordinator.
        RanksFailedError: some processes did not come to make a gloo backend.
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
        self._timeout, self._warn_after = timeout, warn_after
        has_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
        self._use("xckpt", group if has_gloo else None)

    def _use(self, purpose: str, gloo: dist.ProcessGroup | None = None) -> None:
        """Send by this backend, or by one that is made for the purpose."""
        group, timeout = self._process_group, self._timeout
        self._gloo = gloo or companion(group, purpose, self.coordinator, timeout)
        self._purpose = purpose
        self._broken: RanksFailedError | None = _out_of_step.get(self._gloo)

    @cached_property
    def _channel(self) -> Channel:
        store = store_of(self._process_group, self._purpose)
        return Channel(self._gloo, store, self.coordinator, self._timeout, self._warn_after)

    def within(self, seconds: float) -> TorchGroup:
        """The same processes, waiting ``seconds`` for a silent rank in one step."""
        return self._again(seconds)

    def in_background(self) -> TorchGroup:
        """The same processes over connections of its own, for use in another thread.

        Collective the first time that a process group is asked: all its processes call it, in the
        same order as other collectives. A silent rank is waited for `GLOO_TIMEOUT` long.
        """
        group = self._again(self._timeout)
        group._use("xckpt/background")
        return group

    def _again(self, timeout: float | None) -> TorchGroup:
        return TorchGroup(
            self._process_group, self.coordinator, timeout=timeout, warn_after=self._warn_after
        )

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order, on the coordinator; None elsewhere.

        Raises:
            RanksFailedError: a rank is lost.
        """
        self._check_whole()
        if self.rank != self.coordinator:
            self._channel.send({self.coordinator: message(data)})
            self._raise_if_lost()
            return None
        received = self._channel.receive(self._others())
        self._raise_if_lost()
        received[self.rank] = False, data
        return [received[rank][1] for rank in range(self.size)]

    def scatter(self, data: Sequence[bytes] | None) -> bytes:
        """Entry ``rank`` of the coordinator's list; the others pass None.

        Raises:
            RanksFailedError: the coordinator is lost, or has lost another rank.
        """
        self._check_whole()
        if self.rank != self.coordinator:
            return self._answer()
        assert data is not None
        self._channel.send({rank: message(data[rank]) for rank in self._others()})
        return data[self.rank]

    def broadcast(self, data: bytes | None) -> bytes:
        """The coordinator's bytes, on every rank; the others pass None.

        Raises:
            RanksFailedError: the coordinator is lost, or has lost another rank.
        """
        self._check_whole()
        if self.rank != self.coordinator:
            return self._answer()
        assert data is not None
        self._channel.send(dict.fromkeys(self._others(), message(data)))
        return data

    def _others(self) -> list[int]:
        """The ranks that the coordinator can still talk to."""
        lost = self._channel.lost
        return [r for r in range(self.size) if r != self.coordinator and r not in lost]

    def _answer(self) -> bytes:
        """The coordinator's message; raised, if it is that ranks are lost."""
        received = self._channel.receive([self.coordinator])
        self._raise_if_lost()
        is_last, data = received[self.coordinator]
        if is_last:
            raise self._break(_decode_failures(data))
        return data

    def _raise_if_lost(self) -> None:
        """Raise what this rank knows of lost ranks; the coordinator tells the others first."""
        lost = self._channel.lost
        if not lost:
            return
        failures = [lost[rank] for rank in sorted(lost)]
        if self.rank == self.coordinator and not self._channel.is_over:
            verdict = message(_encode_failures(failures), last=True)
            self._channel.send(dict.fromkeys(self._others(), verdict))
        raise self._break(failures)

    def _break(self, failures: Sequence[RankFailure]) -> RanksFailedError:
        self._broken = given_up(failures)
        if any(failure.kind == SILENT for failure in failures):
            _out_of_step[self._gloo] = self._broken
        return self._broken

    def _check_whole(self) -> None:
        # The others have raised and are gone: a call would wait for them until its timeout.
        if self._broken is not None:
            raise self._broken


def current_group(
    coordinator_rank: int = 0, process_group: object = None, timeout: float | None = None
) -> TorchGroup | None:
    """The processes of a torch process group or DeviceMesh; None if it is nothing of torch's.

    Without one: all processes, or None if torch.distributed is not initialised.

    Raises:
        ValueError: this process is not in the group, the group has no such coordinator, or a mesh
            of several dimensions has only some of the processes.
    """
    if process_group is None:
        initialised = dist.is_available() and dist.is_initialized()
        return TorchGroup(None, coordinator_rank, timeout=timeout) if initialised else None
    if dist.is_available() and isinstance(process_group, DeviceMesh):
        return TorchGroup(_processes_of(process_group), coordinator_rank, timeout=timeout)
    # What new_group returns to those who stay outside.
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
        f"{dist.get_world_size()} processes, so that no process group is known that has them all; "
        f"make one by torch.distributed.new_group, and give it as group="
    )
