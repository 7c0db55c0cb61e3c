"""Reading each chunk once a host: which rank reads it for which others, as a pure function.

Ranks of one host that want the same chunk (replicas, or columns of what was saved in rows) need not
each read it. From what each rank wants (`share_reads`):

1. Ranks are grouped by host.
2. A chunk that several ranks of a host want is published by one of them: the k-th such chunk by the
   (k modulo n)-th of its n takers, which spreads them evenly.
3. Every rank learns which chunks it publishes for which ranks, and how many to expect from each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

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


class SharedReads(msgspec.Struct, array_like=True, frozen=True):
    """A rank's share: what it publishes and what it takes."""

    rank: int
    publish: dict[int, tuple[int, ...]] = {}
    """Each chunk that it reads for others -> the other ranks that want it."""
    sources: dict[str, list[int]] = {}
    """Address of each rank that publishes for this one -> the chunks that come from there."""
    addresses: dict[int, str] = {}
    """Each rank that takes from this one -> where it listens."""
    ranks: dict[str, int] = {}
    """Address in ``sources`` -> the rank that listens there."""

    @property
    def takers(self) -> dict[int, int]:
        """The ranks that this rank publishes for, and how many chunks for each."""
        return dict(Counter(taker for takers in self.publish.values() for taker in takers))


prepare_structs(Announcement, SharedReads)


def share_reads(announced: Sequence[Announcement | None]) -> list[SharedReads]:
    """The chunks that each rank publishes for others; entry ``rank`` is that rank's share.

    Example:
        >>> wanted = np.array([4, 5]).tobytes()
        >>> shares = share_reads([Announcement("a", "x", wanted), Announcement("a", "y", wanted)])
        >>> shares[0].publish, shares[0].sources
        ({4: (1,)}, {'y': [5]})
    """
    hosts: dict[str, dict[int, Announcement]] = {}
    for rank, announcement in enumerate(announced):
        if announcement is not None:
            hosts.setdefault(announcement.host, {})[rank] = announcement
    shares = [SharedReads(rank) for rank in range(len(announced))]
    for ranks in hosts.values():
        if len(ranks) > 1:
            for share in _share_on_host(ranks):
                shares[share.rank] = share
    return shares


def _share_on_host(announced: Mapping[int, Announcement]) -> Iterator[SharedReads]:
    """The shares of one host's ranks."""
    chunk, rank = _wanted_by(announced)
    distinct, start, count = np.unique(chunk, return_index=True, return_counts=True)
    publish: dict[int, dict[int, tuple[int, ...]]] = {one: {} for one in announced}
    sources: dict[int, dict[str, list[int]]] = {one: {} for one in announced}
    for turn, index in enumerate(np.flatnonzero(count > 1).tolist()):
        number = int(distinct[index])
        takers = rank[start[index] : start[index] + count[index]].tolist()
        publisher = takers.pop(turn % len(takers))
        publish[publisher][number] = tuple(takers)
        address = announced[publisher].address
        for taker in takers:
            sources[taker].setdefault(address, []).append(number)
    for one in announced:
        takers = sorted({taker for takers in publish[one].values() for taker in takers})
        addresses = {taker: announced[taker].address for taker in takers}
        ranks = {each.address: n for n, each in announced.items() if each.address in sources[one]}
        yield SharedReads(one, publish[one], sources[one], addresses, ranks)


def _wanted_by(
    announced: Mapping[int, Announcement],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(chunk, rank) of everything wanted, ordered by chunk, then rank."""
    wanted = [np.frombuffer(one.wanted, np.int64) for one in announced.values()]
    chunk = np.concatenate(wanted)
    rank = np.repeat(np.array(list(announced), np.int64), [len(part) for part in wanted])
    order = np.argsort(chunk, kind="stable")
    return chunk[order], rank[order]
