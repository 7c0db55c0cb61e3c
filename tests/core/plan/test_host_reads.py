"""Every chunk is read once a host, by one rank that wants it, for all others that do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.plan.host_reads import Announcement, SharedReads, share_reads

wanted = st.sets(st.integers(0, 30), max_size=12).map(sorted)
ranks = st.lists(st.none() | st.tuples(st.sampled_from("ab"), wanted), min_size=1, max_size=8)


def announce(wishes: list[tuple[str, list[int]] | None]) -> list[Announcement | None]:
    return [
        None if one is None else Announcement(one[0], str(rank), np.array(one[1], "i8").tobytes())
        for rank, one in enumerate(wishes)
    ]


@given(ranks)
def test_each_shared_chunk_is_published_once_a_host_for_all_others_who_want_it(
    wishes: list[tuple[str, list[int]] | None],
) -> None:
    shares = share_reads(announce(wishes))
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
    shares = share_reads(announce(wishes))
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
    shares = share_reads(announce([("a", list(range(chunks)))] * count))
    published = [len(share.publish) for share in shares]
    assert max(published) - min(published) <= 1


def test_ranks_that_announce_nothing_read_for_themselves() -> None:
    assert share_reads([None, None]) == [SharedReads(0), SharedReads(1)]
