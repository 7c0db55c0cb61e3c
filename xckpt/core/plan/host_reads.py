"""Reading each chunk once: which rank reads it for which others, as a pure function.

Ranks that want the same chunk (replicas, or columns of what was saved in rows) need not each read
it. From what each rank wants (`share_reads`):

1. Ranks are grouped by host.
2. A chunk that several ranks of a host want is published there by one of them, through memory.
3. A chunk that several hosts want is read by one of them, where the ranks are reached by others:
   its rank there sends it to one rank of each other host, which publishes it there.
4. The k-th such chunk is read by host k modulo their number, and so by rank, which spreads them
   evenly: each of H hosts reads 1/H of the bytes, and sends about as much as it receives. Chunks
   that one request brings count as one.
5. Every rank learns what it publishes and sends for which ranks, and what to expect from each.

Chunks that the same ranks want are shared out together, in columns: those whose turns leave the
same remainder have the same reader and takers. Their numbers travel packed (`packed`).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import lcm
from typing import Final

import msgspec
import numpy as np

from xckpt.core.geometry.box import Int64s
from xckpt.core.struct_types import prepare_structs

_BARE: Final = -15
"""zlib's stream without head and checksum."""


def packed(numbers: Int64s) -> bytes:
    """Chunk numbers, ascending, in few bytes: those of layers that repeat differ in the same way.

    Example:
        >>> len(packed(np.arange(0, 1 << 20, 16))) < 400
        True
    """
    steps = np.diff(numbers, prepend=0)
    width = np.min_scalar_type(int(steps.max(initial=0))).itemsize
    content = steps.astype(f"<u{width}").tobytes()
    return bytes([width]) + zlib.compress(content, level=1, wbits=_BARE)


def unpacked(data: bytes) -> Int64s:
    """The numbers of `packed`.

    Example:
        >>> unpacked(packed(np.array([4, 5, 700]))).tolist()
        [4, 5, 700]
    """
    steps = np.frombuffer(zlib.decompress(data[1:], wbits=_BARE), f"<u{data[0]}")
    return np.cumsum(steps, dtype=np.int64)


class Announcement(msgspec.Struct, array_like=True, frozen=True):
    """What a rank announces before a load."""

    host: str
    """Equal for ranks that can share memory."""
    address: str
    """Where the rank's peers find it."""
    wanted: bytes
    """Numbers of the chunks wanted, ascending, each once, `packed`."""
    reach: bytes = b""
    """Where ranks of other hosts find it; empty if it takes nothing from them."""


@dataclass(frozen=True, slots=True)
class SharedReads:
    """A rank's share: what it publishes and sends, and what it takes and receives."""

    rank: int
    publish: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Each chunk that it hands to others of its host -> the other ranks that want it."""
    sources: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Address of each rank that publishes for this one -> the chunks that come from there."""
    addresses: dict[int, str] = field(default_factory=dict[int, str])
    """Each rank that takes from this one -> where it listens."""
    ranks: dict[str, int] = field(default_factory=dict[str, int])
    """Address in ``sources`` -> the rank that listens there."""
    sends: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Each chunk that it reads for other hosts -> a rank of each."""
    receives: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Each rank of another host that sends to this one -> the chunks that come from there."""
    reaches: dict[int, bytes] = field(default_factory=dict[int, bytes])
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


class PackedReads(msgspec.Struct, array_like=True):
    """`SharedReads` between processes: chunks that go the same way are one column."""

    rank: int
    publish: list[tuple[bytes, tuple[int, ...]]] = []
    sources: dict[str, list[bytes]] = {}
    addresses: dict[int, str] = {}
    ranks: dict[str, int] = {}
    sends: list[tuple[bytes, tuple[int, ...]]] = []
    receives: dict[int, list[bytes]] = {}
    reaches: dict[int, bytes] = {}

    def reads(self) -> SharedReads:
        """What was packed, chunk by chunk, ascending."""
        return SharedReads(
            self.rank,
            _by_chunk(self.publish),
            {address: _merged(each) for address, each in self.sources.items()},
            self.addresses,
            self.ranks,
            _by_chunk(self.sends),
            {rank: _merged(each) for rank, each in self.receives.items()},
            self.reaches,
        )


def _by_chunk(columns: Sequence[tuple[bytes, tuple[int, ...]]]) -> dict[int, tuple[int, ...]]:
    """Each chunk, ascending -> the ranks of its column."""
    pairs = [(chunk, ranks) for chunks, ranks in columns for chunk in unpacked(chunks).tolist()]
    return dict(sorted(pairs))


def _merged(columns: Sequence[bytes]) -> list[int]:
    """The chunks of columns, ascending."""
    return np.sort(np.concatenate([*map(unpacked, columns)])).tolist()


prepare_structs(Announcement, PackedReads)


def share_reads(
    announced: Sequence[Announcement | None],
    together: Callable[[Int64s], Int64s] = lambda chunks: chunks,
) -> list[PackedReads]:
    """The chunks that each rank reads for others; entry ``rank`` is that rank's share.

    Args:
        announced: what each rank wants; None of one that shares nothing.
        together: gives each chunk the number of one that the same request brings.

    Example:
        >>> wanted = packed(np.array([4, 5]))
        >>> shares = share_reads([Announcement("a", "x", wanted), Announcement("a", "y", wanted)])
        >>> shares[0].reads().publish, shares[0].reads().sources
        ({4: (1,)}, {'y': [5]})
        >>> far = [Announcement(host, "x", wanted, b"reach") for host in "ab"]
        >>> [(share.reads().sends, share.reads().receives) for share in share_reads(far)]
        [({4: (1,)}, {1: [5]}), ({5: (0,)}, {0: [4]})]
    """
    known = {rank: each for rank, each in enumerate(announced) if each is not None}
    shares = _Shares(known, len(announced))
    wanted = list(_wanted_by_several(known))
    hosts = [_by_host(known, ranks) for _, ranks in wanted]
    keys = [tuple(each) for each in hosts]
    turns = _turns([chunks for chunks, _ in wanted], keys, together)
    for (chunks, _), of_hosts, turn in zip(wanted, hosts, turns, strict=True):
        shares.share_out(chunks, turn, of_hosts)
    return shares.shares


def _by_host(known: Mapping[int, Announcement], ranks: Sequence[int]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank in ranks:
        hosts.setdefault(known[rank].host, []).append(rank)
    return hosts


def _wanted_by_several(
    known: Mapping[int, Announcement],
) -> Iterator[tuple[Int64s, list[int]]]:
    """The chunks that several ranks want: those that the same ranks want, ascending, and these."""
    alike: dict[bytes, list[int]] = {}
    for rank, each in known.items():
        alike.setdefault(each.wanted, []).append(rank)
    ranks, wanted = [*alike.values()], [unpacked(each) for each in alike]
    chunk = np.concatenate([*wanted, np.zeros(0, np.int64)])
    several = np.array([len(each) > 1 for each in ranks], bool)
    group = np.repeat(np.arange(len(ranks)), [*map(len, wanted)])
    order = np.argsort(chunk, kind="stable")
    chunk, group = chunk[order], group[order]
    first = np.flatnonzero(np.diff(chunk, prepend=-1))
    count = np.diff(first, append=len(chunk))
    for number in np.unique(count).tolist():
        starts = first[count == number]
        if number == 1:
            starts = starts[several[group[starts]]]
        if not len(starts):
            continue
        rows = group[starts[:, None] + np.arange(number)]
        order = np.lexsort(rows.T)
        rows, starts = rows[order], starts[order]
        new = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
        for own in np.split(np.arange(len(rows)), new):
            sets: list[int] = rows[own[0]].tolist()
            yield chunk[starts[own]], sorted(chain(*(ranks[each] for each in sets)))


def _turns(
    chunks: Sequence[Int64s],
    keys: Sequence[tuple[str, ...]],
    together: Callable[[Int64s], Int64s],
) -> list[Int64s]:
    """For each column of chunks their turns, by which those of an equal key are counted."""
    numbers: dict[tuple[str, ...], int] = {}
    key = np.array([numbers.setdefault(each, len(numbers)) for each in keys], np.int64)
    lengths = [*map(len, chunks)]
    chunk, key = np.concatenate([*chunks, np.zeros(0, np.int64)]), np.repeat(key, lengths)
    read = together(chunk)
    order = np.lexsort((read, key))
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    new = np.diff(read[order], prepend=-1) != 0
    new[first] = True
    counted = np.cumsum(new)
    turn = np.empty(len(chunk), np.int64)
    turn[order] = counted - np.repeat(counted[first], np.diff(first, append=len(chunk)))
    return np.split(turn, np.cumsum(lengths)[:-1]) if lengths else []


def _remainders(chunks: Int64s, turns: Int64s, divisor: int) -> list[tuple[int, bytes]]:
    """The chunks by the remainder of their turns."""
    rest = turns % divisor
    order = np.argsort(rest, kind="stable")
    first = np.flatnonzero(np.diff(rest[order], prepend=-1))
    columns = np.split(chunks[order], first[1:])
    return [*zip(rest[order[first]].tolist(), map(packed, columns), strict=True)]


class _Shares:
    """The shares while they are made."""

    def __init__(self, known: Mapping[int, Announcement], ranks: int) -> None:
        self._known = known
        self.shares = [PackedReads(rank, [], {}, {}, {}, [], {}, {}) for rank in range(ranks)]

    def share_out(self, chunks: Int64s, turns: Int64s, hosts: Mapping[str, list[int]]) -> None:
        """Share out chunks that the same ranks want.

        Args:
            chunks: their numbers, ascending.
            turns: the turn of each.
            hosts: the ranks of each host that want them.
        """
        reached = {
            host: each
            for host, each in hosts.items()
            if all(self._known[rank].reach for rank in each)
        }
        far = list(reached.values())
        if len(far) > 1:
            # A turn's remainder by this decides for every host.
            period = len(far) * lcm(*map(len, far))
            for turn, column in _remainders(chunks, turns, period):
                lap, reader = divmod(turn, len(far))
                chosen = [each[lap % len(each)] for each in far]
                self._send(column, chosen.pop(reader), chosen)
        columns: dict[tuple[bool, int], list[tuple[int, bytes]]] = {}
        for host, each in hosts.items():
            key = host in reached, len(each)
            if key not in columns and len(each) > 1:
                laps = turns // len(far) if host in reached else turns
                columns[key] = _remainders(chunks, laps, len(each))
            for at, column in columns.get(key, ()):
                self._publish(column, each[at], [*each[:at], *each[at + 1 :]])

    def _publish(self, chunks: bytes, publisher: int, takers: Sequence[int]) -> None:
        """Have a rank hand chunks to others of its host."""
        share, address = self.shares[publisher], self._known[publisher].address
        share.publish.append((chunks, tuple(takers)))
        for taker in takers:
            taking = self.shares[taker]
            taking.sources.setdefault(address, []).append(chunks)
            taking.ranks[address] = publisher
            share.addresses[taker] = self._known[taker].address

    def _send(self, chunks: bytes, sender: int, receivers: Sequence[int]) -> None:
        """Have a rank send chunks to ranks of other hosts."""
        share, reach = self.shares[sender], self._known[sender].reach
        share.sends.append((chunks, tuple(receivers)))
        for receiver in receivers:
            receiving = self.shares[receiver]
            receiving.receives.setdefault(sender, []).append(chunks)
            receiving.reaches[sender] = reach
            share.reaches[receiver] = self._known[receiver].reach
