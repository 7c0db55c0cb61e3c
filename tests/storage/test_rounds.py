"""How often a call waits for a bucket, counted in rounds: whatever takes time besides is left out.

The server answers all requests under way together, once none has come for a while. A busy machine
may send one so late that it begins another round: a call is made again where there are more.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import xckpt
from tests.support.counted_bucket import CountedBucket, SeenRequest, kinds, rounds
from tests.support.ranks import Ranks
from tests.support.servers import bucket
from xckpt.storage.commit import conditional
from xckpt.storage.location import Location, forget_contexts, open_store

__all__ = ["bucket"]

QUIET = 0.06
RANKS = 3
URL = "s3://bucket/run/1"


def asked(bucket: CountedBucket, call: Callable[[], object], most: int) -> list[SeenRequest]:
    """The requests of a call, of the first of up to four tries that takes so few rounds."""
    bucket.quiet = QUIET
    seen: list[SeenRequest] = []
    for _ in range(4):
        bucket.taken()
        call()
        seen = bucket.taken()
        if rounds(seen) <= most:
            break
    bucket.quiet = 0
    return seen


def test_rounds_count_what_waits_for_what(bucket: CountedBucket) -> None:
    store = open_store(Location.parse(URL))
    keys = [f"k{n}" for n in range(6)]

    def together() -> None:
        for write in [store.write(key, b"1") for key in keys]:
            write.result()

    def in_turn() -> None:
        for key in keys:
            store.write(key, b"1").result()

    assert rounds(asked(bucket, together, 1)) == 1
    assert rounds(asked(bucket, in_turn, 6)) == 6
    context = ts.Context({"s3_request_concurrency": {"limit": 2}})
    store = ts.KvStore.open(Location.parse(URL).store_spec(), context=context).result()
    assert rounds(asked(bucket, together, 3)) == 3  # what a limit keeps waiting waits, too


def test_long_values_come_with_all_else(bucket: CountedBucket) -> None:
    state = {
        "text": "a" * 5000,
        "bytes": b"b" * 300_000,
        "long": "c" * 100_000,
        "w": np.arange(9.0),
        "step": 3,
    }
    options = xckpt.SaveOptions(pack_bytes=0, chunk_bytes=1 << 17)
    xckpt.save(URL, state, options=options)
    into: dict[str, object] = {**state, "w": np.zeros(9), "text": "", "bytes": b"", "long": ""}

    def load() -> None:
        xckpt.load_into(URL, into)

    assert rounds(asked(bucket, load, 2)) <= 2
    assert np.array_equal(into.pop("w"), state.pop("w")) and into == state  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, None])
def test_shards_and_packs_are_read_at_once_by_one_thread_too(
    bucket: CountedBucket, threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.packs.read_packs.RANGE_BYTES", 1 << 12)
    small = {f"s{n}": np.full(500, n, np.int16) for n in range(20)}
    state = {"w": np.arange(1 << 16, dtype=np.int32).reshape(256, -1), **small}
    options = xckpt.SaveOptions(chunk_bytes=1 << 14, shard_bytes=1 << 16, pack_bytes=1 << 12)
    xckpt.save(URL, state, options=options)
    read: list[object] = []

    def load() -> None:
        loaded = xckpt.load(URL, options=xckpt.LoadOptions(threads=threads))
        assert isinstance(loaded, dict)
        read.append(all(np.array_equal(loaded[name], leaf) for name, leaf in state.items()))

    def one() -> None:
        read.append(np.array_equal(xckpt.open(URL).array("w")[:], state["w"]))

    seen = asked(bucket, load, 2)
    assert rounds(seen) <= 2 and kinds(seen)["GET pack"] > 3
    seen = asked(bucket, one, 2)
    assert rounds(seen) <= 2 and kinds(seen)["GET chunk"] == 4
    assert all(read)


def test_a_load_asks_for_the_region_of_a_bucket_once(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save(URL, {"w": np.arange(3)}, options=xckpt.SaveOptions(pack_bytes=0))
    monkeypatch.delenv("AWS_REGION")

    bucket.taken()
    for _ in range(4):
        forget_contexts()  # what earlier calls have opened
        gc.collect()
        xckpt.load(URL)
        assert [request.method for request in bucket.taken()].count("HEAD") == 1


@pytest.mark.parametrize("count", [1, 12])
def test_data_that_takes_its_time_makes_no_look_at_the_claim_wait(
    bucket: CountedBucket, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that is too old at the commit is made anew: so it is made meanwhile."""
    monkeypatch.setattr(conditional, "SECONDS", 0.3)
    monkeypatch.setattr(conditional, "AGAIN", 0.1)
    state = {f"w{n}": np.full(180_000 // count, n, np.int32) for n in range(count)}
    bucket.rate, seen, late = 1e6, list[SeenRequest](), list[str]()
    together = ["GET xckpt.saving", "PUT-if xckpt.json"]  # the free path is looked at with that
    for number in range(4):
        bucket.taken()
        xckpt.save(f"s3://bucket/run/{number}", state, options=xckpt.SaveOptions(pack_bytes=0))
        seen = bucket.taken()
        last = max(each.ended for each in seen if each.kind == "PUT chunk")
        late = sorted(each.kind for each in seen if each.began > last)
        if late == together:
            break
    assert late == together
    assert kinds(seen)["GET xckpt.saving"] > 2


def test_the_claim_of_a_base_is_looked_at_beside_its_digests(bucket: CountedBucket) -> None:
    state = {"w": np.arange(1 << 16, dtype=np.int32)}
    urls = (f"s3://bucket/run/{number}" for number in range(2, 9))
    xckpt.save(URL, state)
    # Its manifest, its side files; look, claim; a copy; identities, side files; the manifest.
    seen = asked(bucket, lambda: xckpt.save(next(urls), state, base=URL), 8)
    assert rounds(seen) <= 8 and kinds(seen)["COPY chunk"] == 1
    assert kinds(seen)["GET xckpt.digests"] == 1


def test_digests_of_a_base_that_are_many_are_read_by_each_rank(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": np.arange(1 << 16, dtype=np.int32)}
    xckpt.save(URL, state)
    monkeypatch.setattr("xckpt.storage.base.base.SENT_BYTES", 15)
    bucket.taken()
    xckpt.save("s3://bucket/run/2", state, base=URL)
    assert kinds(bucket.taken())["GET xckpt.digests"] == 2
    assert np.array_equal(xckpt.load("s3://bucket/run/2")["w"], state["w"])  # type: ignore[index]


@pytest.mark.parametrize("threads", [1, 4])
def test_more_chunks_are_under_way_than_there_are_threads(
    bucket: CountedBucket, threads: int
) -> None:
    state = {f"w{n}": np.full(90_000, n, np.int32) for n in range(12)}
    urls = (f"s3://bucket/run/{number}" for number in count())

    def save(options: xckpt.SaveOptions) -> list[SeenRequest]:
        return asked(bucket, lambda: xckpt.save(next(urls), state, options=options), 4)

    assert rounds(save(xckpt.SaveOptions(threads=threads))) <= 4
    few = xckpt.SaveOptions(threads=threads, memory_bytes=4 * state["w1"].nbytes)
    assert 5 <= rounds(save(few)) <= 8  # of as many as the memory allows, and no fewer
    assert np.array_equal(xckpt.load("s3://bucket/run/1")["w7"], state["w7"])  # type: ignore[index]


def save_rows(rank: int, bucket: Mapping[str, str], url: str, keywords: Mapping[str, Any]) -> None:
    """Save three arrays of which each rank has a row, a value of text, and a base's chunks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ |= bucket
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = torch.arange(RANKS * 600.0).reshape(RANKS, -1)
    state = {f"w{n}": distribute_tensor(rows + n, mesh, [Shard(0)]) for n in range(3)}
    xckpt.save(url, state | {"text": "a" * 5000}, **keywords)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS) as ranks:
        yield ranks


def test_several_ranks_save_in_as_many_rounds_as_one(bucket: CountedBucket, ranks: Ranks) -> None:
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    urls = (f"s3://bucket/run/{number}" for number in count())

    def save() -> None:
        ranks.run(save_rows, variables, next(urls), {})

    def overwrite() -> None:
        ranks.run(save_rows, variables, "s3://bucket/run/0", {"overwrite": True})

    # Look; claim; data, digests, documents; the manifest.
    seen = asked(bucket, save, 4)
    assert rounds(seen) <= 4 and kinds(seen)["PUT chunk"] == 3 * RANKS + 1
    overwrite()  # what was saved in place goes in two rounds, the mark of it last
    seen = asked(bucket, overwrite, 5)  # and what was there before goes
    assert rounds(seen) <= 5 and kinds(seen)["PUT chunk"] == 3 * RANKS + 1
    assert np.array_equal(xckpt.load("s3://bucket/run/0")["w1"][2], np.arange(1201.0, 1801.0))


def test_ranks_of_which_one_fails_leave_nothing(bucket: CountedBucket, ranks: Ranks) -> None:
    """A rank's data that comes late must not come after the coordinator has removed all."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    bucket.refused, bucket.delay = "w2/c/1/0", 0.1
    answers = ranks.attempt(save_rows, variables, "s3://bucket/run/1", {"overwrite": True})
    assert all(not saved and "nothing was committed" in why for saved, why in answers)
    assert bucket.objects == {}
