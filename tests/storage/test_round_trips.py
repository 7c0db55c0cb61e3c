"""How many requests calls make to a bucket, of which kind, and how many one after the other.

The server answers after a while, so that requests that wait for one another can be told from those
that are under way together. A busy machine may send one of these so late that it seems to have
waited, so that a chain is looked at a few times, and the shortest counts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

import xckpt
from tests.support.counted_bucket import CountedBucket, SeenRequest, kinds, longest_chain
from tests.support.servers import bucket
from xckpt.storage.chunks import digests
from xckpt.storage.commit import conditional

__all__ = ["bucket"]

DELAY = 0.06
URL = "s3://bucket/run/1"
STATE = {f"w{n}": np.arange(n, n + 500, dtype=np.float32) for n in range(20)}
PACKED = xckpt.SaveOptions(pack_bytes=1 << 16)
PLAIN = xckpt.SaveOptions(pack_bytes=0)


def same(loaded: object, state: dict[str, np.ndarray] = STATE) -> bool:
    assert isinstance(loaded, dict)
    return all(np.array_equal(loaded[name], array) for name, array in state.items())


def trips(
    bucket: CountedBucket, call: Callable[[], object], most: int, begin: str | tuple[str, ...] = ""
) -> list[str]:
    """The kinds of the requests of a call's longest chain.

    Args:
        bucket: what the call asks.
        call: it is made again where a chain is longer, up to four times.
        most: how long the chain may be.
        begin: only requests whose kind begins so, or in one of these ways.
    """
    chain: list[SeenRequest] = []
    for _ in range(5):
        bucket.taken()
        call()
        asked = [request for request in bucket.taken() if request.kind.startswith(begin)]
        chain = longest_chain(asked)
        if len(chain) <= most:
            break
    return [request.kind for request in chain]


@pytest.mark.parametrize("options", [PLAIN, PACKED])
def test_a_load(bucket: CountedBucket, options: xckpt.SaveOptions) -> None:
    """The manifest, and then all else at once: it says where packed chunks lie."""
    xckpt.save(URL, STATE, options=options)
    bucket.delay = DELAY
    for call in (
        lambda: xckpt.load(URL),
        lambda: xckpt.open(URL).array("w3")[:],
        lambda: xckpt.open(URL).array("w3")[100:200],
        lambda: xckpt.load(URL, select=["w3", "w17"]),
        lambda: xckpt.load_into(URL, {name: np.empty_like(leaf) for name, leaf in STATE.items()}),
    ):
        assert len(trips(bucket, call, 2)) <= 2
    assert same(xckpt.load(URL))
    assert np.array_equal(xckpt.open(URL).array("w3")[100:200], STATE["w3"][100:200])


def test_a_load_of_small_leaves_takes_few_requests(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    bucket.taken()
    assert same(xckpt.load(URL))
    assert kinds(bucket.taken()) == {
        "GET pack": 1,
        "GET xckpt.digests": 1,
        "GET xckpt.json": 1,
    }
    assert xckpt.open(URL).verify() == []
    assert kinds(bucket.taken()) == {
        "GET pack": 1,
        "GET xckpt.digests": 1,
        "GET xckpt.json": 1,
        "GET zarr.json": 1,
    }


def test_a_load_of_very_many_packed_chunks_asks_for_their_places_beside_the_digests(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.packs.write_packs.INLINE_BYTES", 0)
    xckpt.save(URL, STATE, options=PACKED)
    bucket.delay = DELAY
    assert len(trips(bucket, lambda: xckpt.load(URL), 3)) <= 3
    bucket.taken()
    assert same(xckpt.load(URL))
    assert kinds(bucket.taken())["GET places"] == 1


def test_no_zarr_json_is_read_by_a_load_and_each_by_a_verification(bucket: CountedBucket) -> None:
    state = {"a": np.arange(600_000).reshape(2, -1), "b": np.arange(9)}
    xckpt.save(URL, state, options=PLAIN)
    key = "run/1/a/zarr.json"
    bucket.objects[key] = '"other"', b'{"zarr_format": 3, "node_type": "array", "shape": [2]}'
    bucket.taken()
    assert same(xckpt.load(URL), state)
    assert np.array_equal(xckpt.open(URL).array("a")[1, 5:9], state["a"][1, 5:9])
    assert "GET zarr.json" not in kinds(bucket.taken())
    (problem,) = xckpt.open(URL).verify()
    assert problem.kind == "document" and problem.leaf == "a"
    assert kinds(bucket.taken())["GET zarr.json"] == 3
    del bucket.objects[key]
    assert same(xckpt.load(URL), state)
    assert ["missing" in str(problem) for problem in xckpt.open(URL).verify()] == [True]


def test_digests_that_lie_together_are_one_request(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "FEW_BYTES", 0)
    xckpt.save(URL, STATE, options=PLAIN)
    bucket.taken()
    assert same(xckpt.load(URL))
    # One more looks whether the file is as long as the manifest says.
    assert kinds(bucket.taken())["GET xckpt.digests"] == 2
    assert same(xckpt.load(URL, select=["w3", "w17"]), {n: STATE[n] for n in ("w3", "w17")})
    assert kinds(bucket.taken())["GET xckpt.digests"] == 2
    monkeypatch.setattr(digests, "GAP_BYTES", 16)
    assert same(xckpt.load(URL, select=["w3", "w17"]), {n: STATE[n] for n in ("w3", "w17")})
    assert kinds(bucket.taken())["GET xckpt.digests"] == 3
    tag, content = bucket.objects["run/1/xckpt.digests"]
    bucket.objects["run/1/xckpt.digests"] = tag, content[:3] + b"?" + content[4:]
    with pytest.raises(xckpt.CorruptCheckpointError, match="w0"):
        xckpt.load(URL)
    assert same(xckpt.load(URL, select=["w3"]), {"w3": STATE["w3"]})


@pytest.mark.parametrize("options", [PLAIN, PACKED])
def test_a_save(bucket: CountedBucket, options: xckpt.SaveOptions) -> None:
    bucket.delay = DELAY
    few = dict(list(STATE.items())[:8])  # Of so many all requests are under way together.
    urls = (f"s3://bucket/run/{number}" for number in count())
    # Look, claim, write, commit.
    chain = trips(bucket, lambda: xckpt.save(next(urls), few, options=options), 4)
    assert len(chain) <= 4
    assert chain[-1] in ("PUT-if xckpt.json", "GET xckpt.saving")  # on their way together
    assert same(xckpt.load("s3://bucket/run/0"), few)


def test_a_slice_and_a_verification_wait_no_longer_than_a_load(bucket: CountedBucket) -> None:
    """Of 64 chunks: as many requests are under way at a time."""
    state = {"w": np.arange(1 << 14, dtype=np.float32)}
    xckpt.save(URL, state, options=xckpt.SaveOptions(pack_bytes=0, chunk_bytes=1 << 10))
    bucket.taken()
    assert same(xckpt.load(URL), state)
    assert kinds(bucket.taken())["GET chunk"] == 64
    bucket.delay = DELAY
    assert len(trips(bucket, lambda: xckpt.load(URL), 3)) <= 3
    assert len(trips(bucket, lambda: xckpt.open(URL).array("w")[7:-7], 3)) <= 3
    # The digests are there before the chunks are asked for.
    assert len(trips(bucket, lambda: xckpt.open(URL).verify(), 3)) <= 3


@pytest.mark.parametrize("options", [PLAIN, PACKED])
def test_a_verification_reads_digests_and_zarr_json_at_a_time(
    bucket: CountedBucket, options: xckpt.SaveOptions
) -> None:
    xckpt.save(URL, STATE, options=options)
    bucket.delay = DELAY
    assert len(trips(bucket, lambda: xckpt.open(URL).verify(), 3)) <= 3
    bucket.delay = 0
    bucket.taken()
    assert xckpt.open(URL).verify() == []
    assert kinds(bucket.taken())["GET xckpt.digests"] == 1
    bucket.objects["run/1/xckpt.digests"] = '"x"', b"other"
    (problem,) = xckpt.open(URL).verify()
    assert "xckpt.digests: altered" in problem.text


def test_an_overwrite(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    bucket.delay = DELAY
    chain = trips(bucket, lambda: xckpt.save(URL, STATE, options=PACKED, overwrite=True), 6)
    # Look, a write that has to be refused, write, commit; what was replaced goes in two steps.
    assert chain.index("PUT-if xckpt.json", 2) <= 3 and len(chain) <= 6
    assert same(xckpt.load(URL))


def test_the_claim_stays_until_the_data_goes(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    assert "run/1/xckpt.saving" in bucket.objects
    assert xckpt.gc("s3://bucket/run", older_than=0) == []
    xckpt.save(URL, STATE, options=PACKED, overwrite=True)
    assert "run/1/xckpt.saving" not in bucket.objects
    xckpt.delete(URL)
    assert [key for key in bucket.objects if key.startswith("run/1/")] == []
    xckpt.save(URL, STATE, options=PACKED)
    xckpt.delete(URL)
    assert [key for key in bucket.objects if key.startswith("run/1/")] == []


def test_a_refusal_waits_for_no_listing(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    bucket.delay = DELAY

    def refused() -> None:
        with pytest.raises(xckpt.CheckpointExistsError):
            xckpt.save(URL, STATE)

    assert len(trips(bucket, refused, 1)) == 1


def test_small_leaves_are_saved_in_few_requests(bucket: CountedBucket) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    assert kinds(bucket.taken()) == {
        "DELETE trial": 1,
        "GET xckpt.json": 1,
        "GET xckpt.saving": 2,
        "LIST": 1,
        "PUT pack": 1,
        "PUT xckpt.digests": 1,
        "PUT zarr.json": 1,
        "PUT-if xckpt.json": 1,
        "PUT-if xckpt.saving": 1,
    }


def test_packs_are_written_side_by_side(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xckpt.storage.packs.write_packs.PACK_BYTES", 6000)
    bucket.delay = DELAY
    urls = (f"s3://bucket/run/{number}" for number in count(1))
    chain = trips(bucket, lambda: xckpt.save(next(urls), STATE, options=PACKED), 2, "PUT pack")
    assert len(chain) == 2
    bucket.delay = 0
    bucket.taken()
    xckpt.save("s3://bucket/run/0", STATE, options=PACKED)
    assert kinds(bucket.taken())["PUT pack"] == 7
    assert same(xckpt.load(URL)) and xckpt.open(URL).verify() == []


def test_a_chunk_that_is_refused_while_digests_are_written(bucket: CountedBucket) -> None:
    bucket.refused = "w3/c/0"
    with pytest.raises(xckpt.StorageError, match="w3"):
        xckpt.save(URL, STATE, options=PLAIN)
    assert [key for key in bucket.objects if key.startswith("run/1/")] == []


@pytest.mark.parametrize("together", [True, False])
def test_a_deletion_waits_for_no_part_of_the_objects(
    bucket: CountedBucket, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where S3 is asked to delete many by one request, and where it is asked for each."""
    if not together:
        monkeypatch.setattr(conditional, "MANY", 1 << 30)
    monkeypatch.setenv("XCKPT_CONCURRENCY", "128")
    urls = [f"s3://bucket/run/{number}" for number in range(6)]
    for url in urls:
        xckpt.save(url, {f"w{n}": np.arange(n + 1) for n in range(120)}, options=PLAIN)
    bucket.taken()
    xckpt.delete(urls[0])
    deleted = kinds(bucket.taken())
    objects = ("DELETE many",) if together else ("DELETE chunk", "DELETE zarr.json")
    assert sum(deleted[kind] for kind in objects) == (1 if together else 241)
    assert [key for key in bucket.objects if key.startswith("run/0/")] == []
    bucket.delay, rest = DELAY, iter(urls[1:])
    assert len(trips(bucket, lambda: xckpt.delete(next(rest)), 4, objects)) <= 4


@pytest.mark.parametrize("options", [PLAIN, PACKED])
def test_a_deletion_takes_few_requests(bucket: CountedBucket, options: xckpt.SaveOptions) -> None:
    """Look, claim, withdraw the manifest, look at the claim, delete, give it back: TensorStore asks
    twice where it deletes on a condition."""
    urls = [f"s3://bucket/run/{number}" for number in range(6)]
    for url in urls:
        xckpt.save(url, dict(list(STATE.items())[:8]), options=options)
    bucket.taken()
    xckpt.delete(urls[0])
    asked = kinds(bucket.taken())
    for kind in (
        "DELETE many",
        "DELETE chunk",
        "DELETE pack",
        "DELETE zarr.json",
        "DELETE xckpt.digests",
    ):
        asked.pop(kind, None)
    assert asked == {
        "DELETE xckpt.json": 1,
        "DELETE xckpt.saving": 1,
        "GET xckpt.json": 1,
        "GET xckpt.saving": 2,
        "HEAD xckpt.json": 1,
        "HEAD xckpt.saving": 1,
        "LIST": 1,
        "PUT-if xckpt.saving": 1,
    }
    bucket.delay, rest = DELAY, iter(urls[1:])
    assert len(trips(bucket, lambda: xckpt.delete(next(rest)), 8)) <= 8


def test_a_claim_that_comes_late_finds_the_path_taken(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is repeated may come when another save has begun and ended meanwhile."""
    write_if, other = conditional.write_if, {"w3": np.ones(500, np.float32)}

    def late(*asked: object) -> bytes:
        monkeypatch.setattr(conditional, "write_if", write_if)
        xckpt.save(URL, other, options=PLAIN)
        return write_if(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(conditional, "write_if", late)
    with pytest.raises(xckpt.CheckpointExistsError, match="has just begun"):
        xckpt.save(URL, STATE, options=PLAIN)
    assert same(xckpt.load(URL), other) and xckpt.open(URL).verify() == []


def test_a_failed_overwrite_removes_packs_and_the_copy_of_the_manifest(
    bucket: CountedBucket,
) -> None:
    xckpt.save(URL, STATE, options=PACKED)
    there = dict(bucket.objects)
    bucket.refused = "xckpt.digests"
    with pytest.raises(xckpt.StorageError):
        xckpt.save(URL, STATE, options=PACKED, overwrite=True)
    assert bucket.objects == there
