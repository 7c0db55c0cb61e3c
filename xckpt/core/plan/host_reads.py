"""Reading each chunk once: which rank reads it for which others, as a pure function.

Ranks that want the same chunk (replicas, or columns of what was saved in rows) need not each read
it. From what each rank wants (`share_reads`):

1. Ranks are grouped by host.
2. A chunk that several ranks of a host want is published there by one of them, through memory.
3. A chunk that several hosts want is read by one of them, where the ranks are reached by others:
   its rank there sends it to one rank of each other host, which publishes it there.
4. The k-th such chunk is read by host k modulo their number, and so by rank, which spreads them
   evenly: each of H hosts reads 1/H of the bytes, and sends about as much as it receives.
5. Every rank learns what it publishes and sends for which ranks, and what to expect from each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from xckpt.core.struct_types import prepare_structs


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """What a rank announces before a load."""

    host: str
    """Equal for ranks that can share memory."""
    address: str
    """Where the rank's peers find it."""
    wanted: bytes
    """Numbers of the chunks wanted, int64, ascending, each once."""
    reach: bytes = b""
    """Where ranks of other hosts find it; empty if it takes nothing from them."""


class SharedReads(msgspec.Struct, array_like=True, frozen=True):
    """A rank's share: what it publishes and sends, and what it takes and receives."""

    rank: int
    publish: dict[int, tuple[int, ...]] = {}
    """Each chunk that it hands to others of its host -> the other ranks that want it."""
    sources: dict[str, list[int]] = {}
    """Address of each rank that publishes for this one -> the chunks that come from there."""
    addresses: dict[int, str] = {}
    """Each rank that takes from this one -> where it listens."""
    ranks: dict[str, int] = {}
    """Address in ``sources`` -> the rank that listens there."""
    sends: dict[int, tuple[int, ...]] = {}
    """Each chunk that it reads for other hosts -> a rank of each."""
    receives: dict[int, list[int]] = {}
    """Each rank of another host that sends to this one -> the chunks that come from there."""
    reaches: dict[int, bytes] = {}
    """Each rank of ``sends`` and ``receives`` -> where it is reached."""

    @property
    def takers(self) -> dict[int, int]:
        """The ranks that this rank publishes for, and how many chunks for each."""
        return dict(Counter(taker for takers in self.publish.values() for taker in takers))

    @property
    def receivers(self) -> dict[int, int]:
        """The ranks that this rank sends to, and how many chunks to each."""
        return dict(Counter(rank for ranks in self.sends.values() for rank in ranks))

    @property
    def received(self) -> set[int]:
        """The chunks that come from other hosts."""
        return {chunk for chunks in self.receives.values() for chunk in chunks}

    @property
    def own(self) -> list[int]:
        """The chunks that this rank reads for others too."""
        received = self.received
        return [chunk for chunk in {**self.publish, **self.sends} if chunk not in received]

    @property
    def elsewhere(self) -> set[int]:
        """The chunks that this rank does not read for itself alone."""
        return set(self.own).union(self.received, *self.sources.values())


prepare_structs(Announcement, SharedReads)


def share_reads(announced: Sequence[Announcement | None]) -> list[SharedReads]:
    """The chunks that each rank reads for others; entry ``rank`` is that rank's share.

    Example:
        >>> wanted = np.array([4, 5]).tobytes()
        >>> shares = share_reads([Announcement("a", "x", wanted), Announcement("a", "y", wanted)])
        >>> shares[0].publish, shares[0].sources
        ({4: (1,)}, {'y': [5]})
        >>> far = [Announcement(host, "x", wanted, b"reach") for host in "ab"]
        >>> [(share.sends, share.receives) for share in share_reads(far)]
        [({4: (1,)}, {1: [5]}), ({5: (0,)}, {0: [4]})]
    """
    sharing = _Shares(announced)
    turns: Counter[tuple[str, ...]] = Counter()
    for number, ranks in _wanted_by_several(announced):
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(sharing.known[rank].host, []).append(rank)
        far = {host: each for host, each in hosts.items() if sharing.reached(each)}
        key = tuple(hosts)
        turn, turns[key] = turns[key], turns[key] + 1
        chosen = {
            host: each[turn // max(1, len(far)) % len(each)]
            if host in far
            else each[turn % len(each)]
            for host, each in hosts.items()
        }
        if len(far) > 1:
            reader = list(far)[turn % len(far)]
            others = [chosen[host] for host in far if host != reader]
            sharing.send(number, chosen[reader], others)
        for host, each in hosts.items():
            sharing.publish(number, chosen[host], [rank for rank in each if rank != chosen[host]])
    return sharing.shares


class _Shares:
    """The shares while they are made."""

    def __init__(self, announced: Sequence[Announcement | None]) -> None:
        self.known = {rank: each for rank, each in enumerate(announced) if each is not None}
        self.shares = [
            SharedReads(rank, {}, {}, {}, {}, {}, {}, {}) for rank in range(len(announced))
        ]

    def reached(self, ranks: Sequence[int]) -> bool:
        """Whether ranks of other hosts find these."""
        return all(self.known[rank].reach for rank in ranks)

    def publish(self, number: int, publisher: int, takers: Sequence[int]) -> None:
        """Have a rank hand a chunk to others of its host."""
        if not takers:
            return
        self.shares[publisher].publish[number] = tuple(takers)
        address = self.known[publisher].address
        for taker in takers:
            self.shares[taker].sources.setdefault(address, []).append(number)
            self.shares[taker].ranks[address] = publisher
            self.shares[publisher].addresses[taker] = self.known[taker].address

    def send(self, number: int, sender: int, receivers: Sequence[int]) -> None:
        """Have a rank send a chunk to ranks of other hosts."""
        self.shares[sender].sends[number] = tuple(receivers)
        for receiver in receivers:
            self.shares[receiver].receives.setdefault(sender, []).append(number)
            self.shares[receiver].reaches[sender] = self.known[sender].reach
            self.shares[sender].reaches[receiver] = self.known[receiver].reach


def _wanted_by_several(
    announced: Sequence[Announcement | None],
) -> list[tuple[int, list[int]]]:
    """Each chunk that several ranks want, and these, ascending."""
    wanted = [np.frombuffer(b"" if one is None else one.wanted, np.int64) for one in announced]
    chunk = np.concatenate([*wanted, np.zeros(0, np.int64)])
    rank: NDArray[np.int64] = np.repeat(np.arange(len(wanted)), [len(part) for part in wanted])
    order = np.argsort(chunk, kind="stable")
    chunk, rank = chunk[order], rank[order]
    distinct, start, count = np.unique(chunk, return_index=True, return_counts=True)
    return [
        (int(distinct[index]), rank[start[index] : start[index] + count[index]].tolist())
        for index in np.flatnonzero(count > 1).tolist()
    ]
