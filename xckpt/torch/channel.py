"""Messages between the processes of a torch process group, over gloo.

1. A message is a header (two int64: the number of bytes, and 1 if it is the last) and, if there are
   any, the bytes.
2. All messages of an exchange are under way at once. gloo writes a header into its tensor when it
   arrives, so a header that is still negative belongs to a rank that has sent nothing.
3. An exchange waits in a thread (`xckpt.engine.ranks.waiting`), so that silent ranks are named
   meanwhile and given up after ``timeout`` without a word to gloo: it would close all connections.
4. A rank that gives others up leaves a note in the store of the process group. Ranks that wait
   look there, so that a rank that comes late learns that the others are gone.
5. A process group whose CPU backend is not gloo (``nccl`` alone) gets a gloo backend beside it
   (`companion`), made once. Before that its processes meet at the group's store, which says who is
   missing.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, cast

import msgspec
import torch
import torch.distributed as dist

from xckpt.engine.ranks.waiting import Waiting, silence, wait_in_thread
from xckpt.errors import RankFailure, RanksFailedError

TAG: Final = 0x78636B70
"""Marks our messages, so that they are not taken for the user's own."""

GLOO_TIMEOUT: Final = datetime.timedelta(minutes=30)
"""How long a silent rank is waited for where the process group has no gloo of its own."""

GRACE_SECONDS: Final = 2.0
"""How much longer than the coordinator others wait: its answer says more than its silence."""

SILENT: Final = "TimeoutError"
"""The kind of failure of a rank that was given up."""

_companions: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Process group -> the gloo backends made beside it, by purpose."""

_kept: list[object] = []
"""Transfers that were given up."""

NOTE: Final = "given up"
"""The key of the note."""

_encode_failures = msgspec.msgpack.Encoder().encode
_decode_failures = msgspec.msgpack.Decoder(list[RankFailure]).decode


class Channel:
    """What sends host memory between processes, and which of them it has lost.

    Args:
        gloo: the backend that sends.
        store: where a rank that gives up leaves a note.
        coordinator: the rank whose answer the others wait for.
        timeout: seconds that a silent rank is waited for; None for as long as gloo does.
        warn_after: seconds of waiting after which a warning in the log names the silent ranks.
    """

    def __init__(
        self,
        gloo: dist.ProcessGroup,
        store: dist.Store,
        coordinator: int,
        timeout: float | None,
        warn_after: float,
    ) -> None:
        self.is_over = False
        """Whether other ranks have given up and wait for nothing more."""
        self.lost: dict[int, RankFailure] = {}
        """Lost ranks, and why."""
        self._gloo = gloo
        self._store = store
        self._rank = gloo.rank()
        self._coordinator = coordinator
        self._timeout = timeout
        self._warn_after = warn_after

    def send(self, messages: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Send each rank its message; `lost` grows by the ranks that cannot be reached."""
        self._exchange(self._gloo.send, messages)

    def receive(self, ranks: Sequence[int]) -> dict[int, tuple[bool, bytes]]:
        """A message from each rank, all under way at once: whether it is the last, and its bytes.

        Without those of the ranks that are lost meanwhile.
        """
        headers = {rank: torch.full((2,), -1, dtype=torch.int64) for rank in ranks}
        expected = {rank: [header] for rank, header in headers.items()}
        self._exchange(self._gloo.recv, expected, lambda rank: int(headers[rank][0]) >= 0)
        sizes = {rank: headers[rank].tolist() for rank in ranks if rank not in self.lost}
        bodies = {rank: bytearray(size) for rank, (size, _) in sizes.items()}
        self._exchange(
            self._gloo.recv, {rank: [_over(body)] for rank, body in bodies.items() if body}
        )
        return {
            rank: (bool(is_last), bytes(bodies[rank]))
            for rank, (_, is_last) in sizes.items()
            if rank not in self.lost
        }

    def _exchange(
        self,
        transfer: Callable[[list[torch.Tensor], int, int], dist.Work],
        messages: Mapping[int, Sequence[torch.Tensor]],
        has_come: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Start all transfers, then wait for all; `lost` grows by the ranks that fail."""
        under_way: dict[int, list[dist.Work]] = {}
        for rank, tensors in messages.items():
            with self._noting_loss(rank):
                under_way[rank] = [transfer([tensor], rank, TAG) for tensor in tensors]
        waited_for = dict.fromkeys(under_way)

        def wait() -> None:
            for rank, works in under_way.items():
                with self._noting_loss(rank):
                    for work in works:
                        work.wait()
                waited_for.pop(rank, None)

        def silent() -> list[int]:
            return [rank for rank in list(waited_for) if not has_come(rank)]

        if not under_way:
            return
        limit = self._timeout
        if limit is not None and self._rank != self._coordinator:
            limit += GRACE_SECONDS
        waiting = Waiting(self._rank, self._coordinator, silent, warn_after=self._warn_after)
        if wait_in_thread(wait, waiting, limit, self._is_noted):
            return
        # gloo may still write into their memory.
        _kept.append((messages, under_way))
        self._give_up(silent() or list(waited_for))

    def _give_up(self, silent: Sequence[int]) -> None:
        """Note in `lost` who is silent, or whom others have given up; and for those who come."""
        if self._is_noted():
            self.is_over = True
            failures = _decode_failures(self._store.get(NOTE))
        else:
            assert self._timeout is not None
            failures = [RankFailure(rank, SILENT, silence(self._timeout)) for rank in silent]
            # torch stores bytes as they are, though its types say otherwise.
            self._store.set(NOTE, _encode_failures(failures))  # pyright: ignore[reportArgumentType]
        self.lost |= {failure.rank: failure for failure in failures}

    def _is_noted(self) -> bool:
        return self._store.check([NOTE])

    @contextlib.contextmanager
    def _noting_loss(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost.setdefault(
                rank, RankFailure(rank, "ConnectionError", self._reason(rank, error))
            )

    def _reason(self, rank: int, error: RuntimeError) -> str:
        """gloo's message without its source line, and what it means."""
        text = re.sub(r"^\[[^]]*\] *", "", str(error)).split(". This is typically")[0]
        meaning = "the process was probably killed (out of memory?) or has crashed; see its own log"
        if re.search("time(d ?)?out", text, re.IGNORECASE):
            meaning = (
                "it did not answer within the process group's timeout: it hangs, or its work takes "
                "longer than init_process_group(timeout=...) allows"
            )
            if rank == self._coordinator:
                # A timeout closes the coordinator's other connections too: it cannot tell us why.
                meaning += "; or, being the coordinator, it waited for another rank, which it names"
        return f"{meaning} (gloo: {text})"


def companion(
    group: dist.ProcessGroup, purpose: str, coordinator: int, timeout: float | None
) -> dist.ProcessGroup:
    """The gloo backend beside a process group, made at the first call; it sends and receives.

    Raises:
        RanksFailedError: some processes did not come to make it within ``timeout`` seconds.
    """
    companions = _companions.setdefault(group, {})
    if purpose not in companions:
        # Not by new_group: it needs the processes outside the group too, or else (with
        # use_local_synchronization) that all have made equally many groups before.
        store = store_of(group, purpose)
        seconds = GLOO_TIMEOUT.total_seconds() if timeout is None else timeout
        _meet(dist.PrefixStore("came", store), group, coordinator, seconds)
        gloo = dist.ProcessGroupGloo(store, group.rank(), group.size(), GLOO_TIMEOUT)
        companions[purpose] = cast(dist.ProcessGroup, gloo)
    return companions[purpose]


def store_of(group: dist.ProcessGroup, purpose: str) -> dist.Store:
    """What the processes of a group can all read and write, apart from what others store."""
    return dist.PrefixStore(purpose, group.get_group_store())


def _meet(store: dist.Store, group: dist.ProcessGroup, coordinator: int, seconds: float) -> None:
    """Return when all processes of a group have called this with the same store."""

    def silent() -> list[int]:
        return [rank for rank in range(group.size()) if not store.check([str(rank)])]

    store.set(str(group.rank()), "")
    if store.add("count", 1) == group.size():
        store.set("all", "")
    waiting, pause = Waiting(group.rank(), coordinator, silent), 0.001
    deadline = time.monotonic() + seconds
    while not store.check(["all"]):
        if time.monotonic() >= deadline:
            raise given_up([RankFailure(rank, SILENT, silence(seconds)) for rank in silent()])
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        waiting.remind()


def given_up(failures: Sequence[RankFailure]) -> RanksFailedError:
    """The error of a save or a load that has lost ranks."""
    ranks = "1 rank" if len(failures) == 1 else f"{len(failures)} ranks"
    end = "this save or load cannot go on"
    if any(failure.kind == SILENT for failure in failures):
        end += ", and no other can begin on this process group: make a new one"
    error = RanksFailedError.listing(
        f"lost contact with {ranks}; {end}",
        [f"rank {failure.rank}: {failure.message}" for failure in failures],
    )
    error.failures = tuple(failures)
    return error


def message(data: bytes, *, last: bool = False) -> list[torch.Tensor]:
    """What is sent for some bytes: a header and, unless they are none, the bytes themselves."""
    header = torch.tensor([len(data), last])
    return [header, _over(bytearray(data))] if data else [header]


def _over(data: bytearray) -> torch.Tensor:
    """The bytes as a tensor over the same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)
