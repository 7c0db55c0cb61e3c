"""torch.distributed as a `Group`: bytes over a gloo process group, and no rank left hanging.

Every exchange is between the coordinator and one other rank, so that the coordinator always knows
whom it has lost:

1. A message is a header (two int64: the number of bytes, and 1 if it is the last) and, if there are
   any, the bytes.
2. In `gather` the coordinator receives from every rank it can. If a rank is lost (killed, out of
   memory, timed out), it sends the others the list of lost ranks as the last message, and raises;
   they wait for its answer, read that and raise the same error.
3. In `scatter` and `broadcast` it sends to every rank it can and remembers which it has lost: the
   others are in the next step already, and learn of it from the next `gather`.
4. A rank that loses the coordinator raises at once: gloo notices a closed connection. After a
   timeout gloo closes all connections of a process, so that step 2 is cut short; all raise, but
   only the coordinator knows the rank that was silent.

A process group whose CPU backend is not gloo (``nccl`` alone) gets a gloo backend beside it, made
once: plans live in host memory, and nccl can neither send them nor notice a dead peer soon. So does
any process group whose processes save in the background (`TorchGroup.in_background`): training may
use its own from the first thread meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xckpt.errors import RankFailure, RanksFailedError

TAG: Final = 0x78636B70
"""Marks our messages, so that they are not taken for the user's own."""

GLOO_TIMEOUT: Final = datetime.timedelta(minutes=30)
"""How long a silent rank is waited for where the process group has no gloo of its own."""


_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Process group -> the gloo backends made beside it, by purpose."""

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
        self, process_group: dist.ProcessGroup | None = None, coordinator_rank: int = 0
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
        has_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
        self._channel = group if has_gloo else _companion(group, "xckpt")
        """What sends host memory by gloo between the processes."""
        self._lost: dict[int, str] = {}
        self._broken: RanksFailedError | None = None

    def in_background(self) -> TorchGroup:
        """The same processes over connections of its own, for use in another thread.

        Collective the first time that a process group is asked: all its processes call it, in the
        same order as other collectives. A silent rank is waited for `GLOO_TIMEOUT` long.
        """
        group = TorchGroup(self._process_group, self.coordinator)
        group._channel = _companion(self._process_group, "xckpt/background")
        return group

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes in rank order, on the coordinator; None elsewhere.

        Raises:
            RanksFailedError: a rank is lost.
        """
        self._check_whole()
        if self.rank != self.coordinator:
            self._exchange(self._channel.send, {self.coordinator: _message(data)})
            self._raise_if_lost()
            return None
        received = self._receive(self._others())
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
        messages = {rank: _message(data[rank]) for rank in self._others()}
        self._exchange(self._channel.send, messages)
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
        self._exchange(self._channel.send, dict.fromkeys(self._others(), _message(data)))
        return data

    def _others(self) -> list[int]:
        """The ranks that the coordinator can still talk to."""
        return [r for r in range(self.size) if r != self.coordinator and r not in self._lost]

    def _answer(self) -> bytes:
        """The coordinator's message; raised, if it is that ranks are lost."""
        received = self._receive([self.coordinator])
        self._raise_if_lost()
        is_last, data = received[self.coordinator]
        if is_last:
            raise self._break(_decode_failures(data))
        return data

    def _receive(self, ranks: Sequence[int]) -> dict[int, tuple[bool, bytes]]:
        """A message from each rank, all under way at once: whether it is the last, and its bytes.

        Without those of the ranks that are lost meanwhile.
        """
        headers = {rank: torch.empty(2, dtype=torch.int64) for rank in ranks}
        self._exchange(self._channel.recv, {rank: [header] for rank, header in headers.items()})
        sizes = {rank: headers[rank].tolist() for rank in ranks if rank not in self._lost}
        bodies = {rank: bytearray(size) for rank, (size, _) in sizes.items()}
        self._exchange(
            self._channel.recv, {rank: [_over(body)] for rank, body in bodies.items() if body}
        )
        return {
            rank: (bool(is_last), bytes(bodies[rank]))
            for rank, (_, is_last) in sizes.items()
            if rank not in self._lost
        }

    def _exchange(
        self,
        transfer: Callable[[list[torch.Tensor], int, int], dist.Work],
        messages: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Start all transfers, then wait for all; `_lost` grows by the ranks that fail."""
        under_way: dict[int, list[dist.Work]] = {}
        for rank, tensors in messages.items():
            with self._noting_loss(rank):
                under_way[rank] = [transfer([tensor], rank, TAG) for tensor in tensors]
        for rank, works in under_way.items():
            with self._noting_loss(rank):
                for work in works:
                    work.wait()

    @contextlib.contextmanager
    def _noting_loss(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._lost[rank] = self._reason(rank, error)

    def _reason(self, rank: int, error: RuntimeError) -> str:
        """gloo's message without its source line, and what it means."""
        text = re.sub(r"^\[[^]]*\] *", "", str(error)).split(". This is typically")[0]
        meaning = "the process was probably killed (out of memory?) or has crashed; see its own log"
        if re.search("time(d ?)?out", text, re.IGNORECASE):
            meaning = (
                "it did not answer within the process group's timeout: it hangs, or its work takes "
                "longer than init_process_group(timeout=...) allows"
            )
            if rank == self.coordinator:
                # A timeout closes the coordinator's other connections too: it cannot tell us why.
                meaning += "; or, being the coordinator, it waited for another rank, which it names"
        return f"{meaning} (gloo: {text})"

    def _raise_if_lost(self) -> None:
        """Raise what this rank knows of lost ranks; the coordinator tells the others first."""
        if not self._lost:
            return
        failures = [RankFailure(r, "ConnectionError", why) for r, why in sorted(self._lost.items())]
        if self.rank == self.coordinator:
            verdict = _message(_encode_failures(failures), last=True)
            self._exchange(self._channel.send, dict.fromkeys(self._others(), verdict))
        raise self._break(failures)

    def _break(self, failures: Sequence[RankFailure]) -> RanksFailedError:
        ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
        error = RanksFailedError.listing(
            f"lost contact with {ranks}; this save or load cannot go on",
            [f"rank {failure.rank}: {failure.message}" for failure in failures],
        )
        error.failures = tuple(failures)
        self._broken = error
        return error

    def _check_whole(self) -> None:
        # The others have raised and are gone: a call would wait for them in vain.
        if self._broken is not None:
            raise self._broken


def current_group(coordinator_rank: int = 0, process_group: object = None) -> TorchGroup | None:
    """The processes of a torch process group or DeviceMesh; None if it is nothing of torch's.

    Without one: all processes, or None if torch.distributed is not initialised.

    Raises:
        ValueError: this process is not in the group, the group has no such coordinator, or a mesh
            of several dimensions has only some of the processes.
    """
    if process_group is None:
        initialised = dist.is_available() and dist.is_initialized()
        return TorchGroup(None, coordinator_rank) if initialised else None
    if dist.is_available() and isinstance(process_group, DeviceMesh):
        return TorchGroup(_processes_of(process_group), coordinator_rank)
    # What new_group returns to those who stay outside.
    outside = process_group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(process_group, dist.ProcessGroup):
        return None
    return TorchGroup(cast(dist.ProcessGroup, process_group), coordinator_rank)


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


def _companion(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """The gloo backend beside a process group, made at the first call; it sends and receives."""
    companions = _companions.setdefault(group, {})
    if purpose not in companions:
        # Not by new_group: it needs the processes outside the group too, or else (with
        # use_local_synchronization) that all have made equally many groups before.
        store = dist.PrefixStore(purpose, group.get_group_store())
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), GLOO_TIMEOUT)
        companions[purpose] = cast(dist.ProcessGroup, gloo)
    return companions[purpose]


def _message(data: bytes, *, last: bool = False) -> list[torch.Tensor]:
    """What is sent for some bytes: a header and, unless they are none, the bytes themselves."""
    header = torch.tensor([len(data), last])
    return [header, _over(bytearray(data))] if data else [header]


def _over(data: bytearray) -> torch.Tensor:
    """The bytes as a tensor over the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)
