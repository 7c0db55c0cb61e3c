"""Every chunk is read once a host, by one rank that wants it, for all others that do."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.plan.host_reads import (
    Announcement,
    PackedReads,
    SharedReads,
    packed,
    share_reads,
    unpacked,
)

wanted = st.sets(st.integers(0, 30), max_size=12).map(sorted)
ranks = st.lists(st.none() | st.tuples(st.sampled_from("ab"), wanted), min_size=1, max_size=8)


def announce(wishes: list[tuple[str, list[int]] | None]) -> list[Announcement | None]:
    return [
        None if one is None else Announcement(one[0], str(rank), packed(np.array(one[1], "i8")))
        for rank, one in enumerate(wishes)
    ]


def shared(announced: list[Announcement | None]) -> list[SharedReads]:
    """What the ranks learn, as it comes over the wire."""
    sent = msgspec.msgpack.encode(share_reads(announced))
    return [each.reads() for each in msgspec.msgpack.decode(sent, type=list[PackedReads])]


@given(ranks)
def test_each_shared_chunk_is_published_once_a_host_for_all_others_who_want_it(
    wishes: list[tuple[str, list[int]] | None],
) -> None:
    shares = shared(announce(wishes))
    for host in "ab":
        takers = {
            chunk: [r for r, one in enumerate(wishes) if one and one[0] == host and chunk in one[1]]
            for chunk in range(31)
        }
        published = {
            chunk: (rank, others)
            for rank, share in enumerate(shares)
            if (one := wishes[rank]) and one[0] == host
            for chunk, others in share.publish.items()
        }
        assert set(published) == {chunk for chunk, who in takers.items() if len(who) > 1}
        for chunk, (rank, others) in published.items():
            assert sorted([rank, *others]) == takers[chunk]


@given(ranks)
def test_what_a_rank_expects_is_what_the_others_publish_for_it(
    wishes: list[tuple[str, list[int]] | None],
) -> None:
    shares = shared(announce(wishes))
    for rank, share in enumerate(shares):
        coming = {
            str(source): chunks
            for source, other in enumerate(shares)
            if (chunks := [chunk for chunk, takers in other.publish.items() if rank in takers])
        }
        assert share.sources == coming
        expecting = {
            taker: len(other.sources.get(str(rank), ())) for taker, other in enumerate(shares)
        }
        assert share.takers == {taker: count for taker, count in expecting.items() if count}
        assert share.addresses == {taker: str(taker) for taker in share.takers}


@given(st.integers(2, 8), st.integers(0, 40))
def test_replicas_share_the_reading_evenly(count: int, chunks: int) -> None:
    shares = shared(announce([("a", list(range(chunks)))] * count))
    published = [len(share.publish) for share in shares]
    assert max(published) - min(published) <= 1


def test_ranks_that_announce_nothing_read_for_themselves() -> None:
    assert shared([None, None]) == [SharedReads(0), SharedReads(1)]


reached = st.lists(st.none() | st.tuples(st.sampled_from("abc"), wanted), min_size=1, max_size=9)


def announce_reached(wishes: list[tuple[str, list[int]] | None]) -> list[Announcement | None]:
    """The same, of ranks that other hosts reach."""
    return [
        one and msgspec.structs.replace(one, reach=str(rank).encode())
        for rank, one in enumerate(announce(wishes))
    ]


@given(reached)
def test_each_chunk_is_read_once_in_the_job_and_comes_once_to_each_rank_that_wants_it(
    wishes: list[tuple[str, list[int]] | None],
) -> None:
    shares = shared(announce_reached(wishes))
    for chunk in range(31):
        takers = {rank for rank, one in enumerate(wishes) if one and chunk in one[1]}
        hosts = {one[0] for one in wishes if one and chunk in one[1]}
        alone = {rank for rank in takers if chunk not in shares[rank].elsewhere}
        reading = {rank for rank in takers if chunk in shares[rank].own}
        assert len(alone | reading) == bool(takers)
        came = [
            *reading,
            *alone,
            *(rank for reader in reading for rank in shares[reader].sends.get(chunk, ())),
            *(rank for share in shares for rank in share.publish.get(chunk, ())),
        ]
        assert sorted(came) == sorted(takers)
        crossed = [rank for share in shares for rank in share.sends.get(chunk, ())]
        assert len(crossed) == max(0, len(hosts) - 1)


@given(reached)
def test_what_a_rank_receives_is_what_others_send_to_it(
    wishes: list[tuple[str, list[int]] | None],
) -> None:
    shares = shared(announce_reached(wishes))
    for rank, share in enumerate(shares):
        coming = {
            sender: chunks
            for sender, other in enumerate(shares)
            if (chunks := [chunk for chunk, ranks in other.sends.items() if rank in ranks])
        }
        assert share.receives == coming
        partners = {*coming, *share.receivers}
        assert share.reaches == {partner: str(partner).encode() for partner in partners}


@given(st.integers(2, 6), st.integers(1, 3), st.integers(0, 60))
def test_hosts_with_replicas_read_and_send_evenly(hosts: int, ranks: int, chunks: int) -> None:
    wishes = [(f"host {host}", list(range(chunks))) for host in range(hosts) for _ in range(ranks)]
    shares = shared(announce_reached([*wishes]))
    own = [len(share.own) for share in shares]
    assert sum(own) == chunks and max(own) - min(own) <= 1


def test_a_host_that_is_not_reached_reads_for_itself() -> None:
    near, far = announce_reached([("a", [1, 2]), ("b", [1, 2])])
    assert near is not None and far is not None
    shares = shared([near, msgspec.structs.replace(far, reach=b"")])
    assert not any(share.elsewhere for share in shares)


def chunk_by_chunk(announced: list[Announcement | None]) -> list[SharedReads]:
    """What the ranks learn, found for one chunk after the other."""
    known = {rank: each for rank, each in enumerate(announced) if each is not None}
    wanted = {rank: unpacked(each.wanted).tolist() for rank, each in known.items()}
    shares = [SharedReads(rank) for rank in range(len(announced))]
    turns: Counter[tuple[str, ...]] = Counter()
    for chunk in sorted({chunk for each in wanted.values() for chunk in each}):
        hosts: dict[str, list[int]] = {}
        for rank, each in wanted.items():
            if chunk in each:
                hosts.setdefault(known[rank].host, []).append(rank)
        if sum(map(len, hosts.values())) == 1:
            continue
        far = [each for each in hosts.values() if all(known[rank].reach for rank in each)]
        turn, turns[tuple(hosts)] = turns[tuple(hosts)], turns[tuple(hosts)] + 1
        round, reader = divmod(turn, max(1, len(far)))
        if len(far) > 1:
            sender, *receivers = [
                each[round % len(each)] for each in (far[reader], *far[:reader], *far[reader + 1 :])
            ]
            give(known, shares, chunk, sender, receivers, far=True)
        for each in hosts.values():
            publisher = each[(round if each in far else turn) % len(each)]
            give(known, shares, chunk, publisher, [rank for rank in each if rank != publisher])
    return shares


def give(
    known: dict[int, Announcement],
    shares: list[SharedReads],
    chunk: int,
    giver: int,
    takers: list[int],
    *,
    far: bool = False,
) -> None:
    giving, about = shares[giver], known[giver]
    if takers:
        (giving.sends if far else giving.publish)[chunk] = tuple(takers)
    for taker in takers:
        taking = shares[taker]
        if far:
            taking.receives.setdefault(giver, []).append(chunk)
            taking.reaches[giver] = about.reach
            giving.reaches[taker] = known[taker].reach
        else:
            taking.sources.setdefault(about.address, []).append(chunk)
            taking.ranks[about.address] = giver
            giving.addresses[taker] = known[taker].address


@given(reached, st.lists(st.booleans(), min_size=9, max_size=9))
def test_columns_are_shared_out_as_chunk_after_chunk(
    wishes: list[tuple[str, list[int]] | None], unreached: list[bool]
) -> None:
    announced = [
        one and (msgspec.structs.replace(one, reach=b"") if alone else one)
        for one, alone in zip(announce_reached(wishes), unreached, strict=False)
    ]
    assert shared(announced) == chunk_by_chunk(announced)


@given(st.sets(st.integers(0, 1 << 62)).map(sorted))
def test_packed_numbers_come_back(numbers: list[int]) -> None:
    assert unpacked(packed(np.array(numbers, np.int64))).tolist() == numbers


def test_replicas_that_want_many_chunks_say_and_hear_little() -> None:
    """Of 1,024 ranks on 128 hosts, each wants all of 100,000 chunks."""
    wanted = packed(np.arange(100_000))
    shares = share_reads([Announcement(str(r // 8), str(r), wanted) for r in range(1024)])
    assert len(wanted) < 1000
    assert max(len(msgspec.msgpack.encode(share)) for share in shares) < 2500
    assert sorted(shares[0].reads().own) == list(range(0, 100_000, 8))


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 40), st.booleans())
def test_chunks_that_are_read_together_have_one_reader(
    run: int, count: int, chunks: int, are_far: bool
) -> None:
    """Runs are shared out evenly, as single chunks are."""
    wanted = packed(np.arange(chunks))
    announced = [
        Announcement(str(rank) if are_far else "a", str(rank), wanted, b"r" if are_far else b"")
        for rank in range(count)
    ]
    shares = [each.reads() for each in share_reads(announced, lambda numbers: numbers // run)]
    readers = {chunk: rank for rank, share in enumerate(shares) for chunk in share.own}
    assert readers == {chunk: chunk // run % count for chunk in range(chunks)}
