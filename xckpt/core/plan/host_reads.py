"""Reading each chunk once a host: who reads what for whom, as a pure function.

Ranks of one host that want the same chunk (replicas, or columns of what was saved in rows) need not
each read it. From what each rank wants (`share_reads`):

1. Ranks are grouped by host.
2. A chunk that several ranks of a host want is published by one of them: the k-th such chunk by the
   (k modulo n)-th of its n takers, which spreads them evenly.
3. Every rank learns which chunks it publishes and for whom, and how many to expect from whom.
"""

from __future__ import annotations

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


class Publication(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that a rank reads for others."""

    chunk: int
    takers: tuple[int, ...]
    """The other ranks that want it."""


class SharedReads(msgspec.Struct, array_like=True, frozen=True):
    """A rank's share: what it publishes and what it takes."""

    rank: int
    publish: tuple[Publication, ...] = ()
    sources: tuple[tuple[str, int], ...] = ()
    """(address, number of chunks) of each rank that publishes for this one."""
    taken: tuple[int, ...] = ()
    """The chunks that come from there."""
    addresses: dict[int, str] = {}
    """Where each rank that takes from this one listens."""

    @property
    def takers(self) -> dict[int, int]:
        """The ranks that this rank publishes for, and how many chunks for each."""
        counts: dict[int, int] = {}
        for publication in self.publish:
            for taker in publication.takers:
                counts[taker] = counts.get(taker, 0) + 1
        return counts


prepare_structs(Announcement, SharedReads)


def share_reads(announced: Sequence[Announcement | None]) -> list[SharedReads]:
    """Who publishes which chunk for whom; entry ``rank`` is that rank's share.

    Example:
        >>> wanted = np.array([4, 5]).tobytes()
        >>> shares = share_reads([Announcement("a", "x", wanted), Announcement("a", "y", wanted)])
        >>> shares[0].publish, shares[0].sources
        ((Publication(chunk=4, takers=(1,)),), (('y', 1),))
    """
    hosts: dict[str, list[int]] = {}
    for rank, announcement in enumerate(announced):
        if announcement is not None:
            hosts.setdefault(announcement.host, []).append(rank)
    shares = [SharedReads(rank) for rank in range(len(announced))]
    for ranks in hosts.values():
        if len(ranks) > 1:
            _share_on_host(ranks, announced, shares)
    return shares


def _share_on_host(
    ranks: Sequence[int],
    announced: Sequence[Announcement | None],
    shares: list[SharedReads],
) -> None:
    chunk, rank = _wanted_by(ranks, announced)
    distinct, start, count = np.unique(chunk, return_index=True, return_counts=True)
    publish: dict[int, list[Publication]] = {one: [] for one in ranks}
    expected: dict[int, dict[int, list[int]]] = {one: {} for one in ranks}
    shared = np.flatnonzero(count > 1)
    for turn, index in enumerate(shared.tolist()):
        takers = rank[start[index] : start[index] + count[index]].tolist()
        publisher = takers.pop(turn % len(takers))
        publish[publisher].append(Publication(int(distinct[index]), tuple(takers)))
        for taker in takers:
            expected[taker].setdefault(publisher, []).append(int(distinct[index]))
    for one in ranks:
        sources = tuple((_address(announced[of]), len(n)) for of, n in expected[one].items())
        taken = tuple(number for numbers in expected[one].values() for number in numbers)
        takers = {taker for publication in publish[one] for taker in publication.takers}
        addresses = {taker: _address(announced[taker]) for taker in sorted(takers)}
        shares[one] = SharedReads(one, tuple(publish[one]), sources, taken, addresses)


def _wanted_by(
    ranks: Sequence[int], announced: Sequence[Announcement | None]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(chunk, rank) of everything wanted, ordered by chunk, then rank."""
    wanted = [np.frombuffer(one.wanted, np.int64) for r in ranks if (one := announced[r])]
    chunk = np.concatenate(wanted)
    rank = np.repeat(np.array(ranks, np.int64), [len(part) for part in wanted])
    order = np.argsort(chunk, kind="stable")
    return chunk[order], rank[order]


def _address(announcement: Announcement | None) -> str:
    assert announcement is not None
    return announcement.address
