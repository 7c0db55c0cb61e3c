"""Chunks of a shard are read together: one request, or one opening of a file, for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.counted_bucket import CountedBucket, kinds
from tests.support.examples import examples
from tests.support.servers import bucket
from xckpt.core.geometry.shards import inner
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.shards import reads
from xckpt.storage.chunks.shards.files import ShardFile, sealed

__all__ = ["bucket"]

W = np.random.default_rng(0).integers(0, 1 << 16, (96, 80), np.uint16)
STATE = {"w": W, "bools": W > 1 << 15, "columns": W.T, "edge": W[:91, :77]}
OPTIONS = xckpt.SaveOptions(chunk_bytes=24 * 80 * 2, readers=4, pack_bytes=0)
URL = "s3://bucket/shards"
MEMORY = (f"memory://shard-reads-{number}" for number in count())


@pytest.fixture(scope="module", autouse=True)
def small_shards() -> Iterator[None]:
    """Chunks of some hundred bytes in shards of some thousands; nothing is read in vain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "LEAST_SHARD", 1 << 10)
        patch.setattr(inner, "LEAST_CHUNK", 1 << 8)
        patch.setattr(inner, "LEAST_ROW", 1 << 4)
        patch.setattr(reads, "GAP_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def stored(small_shards: None) -> str:
    """A checkpoint in memory, which is read by ranges as a bucket is."""
    url = next(MEMORY)
    xckpt.save(url, STATE, options=OPTIONS)
    return url


def test_a_shard_in_a_bucket_is_one_request(bucket: CountedBucket) -> None:
    """For all of it; for a part of it one that answers no more than the part."""
    xckpt.save(URL, {"w": W}, options=OPTIONS)
    shards = [key for key in bucket.objects if "/w/c/" in key]
    assert len(shards) == 4
    (array,) = xckpt.open(URL).chunk_source.arrays["w"]
    assert array.shard is not None
    assert np.prod(array.shard) // np.prod(array.chunk) >= 4
    bucket.taken()
    np.testing.assert_array_equal(xckpt.load(URL)["w"], W)
    assert kinds(bucket.taken())["GET chunk"] == len(shards)
    assert xckpt.open(URL).verify() == []
    assert kinds(bucket.taken())["GET chunk"] == len(shards)
    np.testing.assert_array_equal(xckpt.open(URL).array("w")[30:40, :5], W[30:40, :5])
    (part,) = (each for each in bucket.taken() if each.kind == "GET chunk")
    assert part.answered == array.chunk[0] * array.chunk[1] * 2


def test_a_local_shard_is_opened_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    xckpt.save(tmp_path / "c", {"w": W}, options=OPTIONS)
    opened: list[str] = []

    def noted(file: ShardFile, path: str, *rest: object) -> None:
        opened.append(path)
        begin(file, path, *rest)  # pyright: ignore[reportArgumentType]

    begin = ShardFile.__init__
    monkeypatch.setattr(ShardFile, "__init__", noted)
    np.testing.assert_array_equal(xckpt.load(tmp_path / "c")["w"], W)
    assert len(opened) == len(set(opened)) == 4
    opened.clear()
    assert xckpt.open(tmp_path / "c").verify() == []
    assert len(opened) == 4


@given(
    st.tuples(st.integers(0, 90), st.integers(1, 91)),
    st.tuples(st.integers(0, 76), st.integers(1, 77)),
    st.sampled_from(list(STATE)),
    st.sampled_from([1, None]),
)
@examples(50)
def test_any_slice_is_numpys(stored: str, rows, columns, leaf, threads) -> None:
    at = tuple(slice(low, low + size) for low, size in (rows, columns))
    opened = xckpt.open(stored, options=xckpt.LoadOptions(threads=threads))
    np.testing.assert_array_equal(opened.array(leaf)[at], STATE[leaf][at])


def test_a_small_budget_is_kept_by_smaller_ranges(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "RANGE_BYTES", 1)
    monkeypatch.setattr(reads, "SHARD_BYTES", 2000)
    xckpt.save(URL, {"w": W}, options=OPTIONS)
    bucket.taken()
    np.testing.assert_array_equal(xckpt.load(URL)["w"], W)
    answers = [each.answered for each in bucket.taken() if each.kind == "GET chunk"]
    assert len(answers) > 4 and max(answers) < 2000 + 100


def _first_shard(bucket: CountedBucket) -> str:
    return min(key for key in bucket.objects if "/w/c/" in key)


def _index_length(array) -> int:
    return int(np.prod(array.shard) // np.prod(array.chunk)) * 16 + 4


def test_chunks_in_another_order_are_read(bucket: CountedBucket) -> None:
    """As another writer may have put them; the index says where."""
    xckpt.save(URL, {"w": W}, options=OPTIONS)
    (array,) = xckpt.open(URL).chunk_source.arrays["w"]
    key, size, end = _first_shard(bucket), int(np.prod(array.chunk)) * 2, _index_length(array)
    tag, content = bucket.objects[key]
    entries = np.frombuffer(content[-end:-4], "<u8").reshape(-1, 2).copy()
    entries[[0, 1]] = entries[[1, 0]]
    moved = content[size : 2 * size] + content[:size] + content[2 * size : -end]
    bucket.objects[key] = f'{tag[:-1]}x"', moved + sealed(entries.tobytes())
    np.testing.assert_array_equal(xckpt.load(URL)["w"], W)
    assert xckpt.open(URL).verify() == []


@pytest.mark.parametrize("place", ["chunk", "index", "short", "missing"])
def test_a_damaged_shard_is_refused(bucket: CountedBucket, place: str) -> None:
    xckpt.save(URL, {"w": W}, options=OPTIONS)
    key = _first_shard(bucket)
    tag, content = bucket.objects[key]
    damaged = bytearray(content)
    damaged[5 if place == "chunk" else -10] ^= 1
    del damaged[len(damaged) - 7 * (place == "short") :]
    bucket.objects[key] = f'{tag[:-1]}x"', bytes(damaged)
    if place == "missing":
        del bucket.objects[key]
    with pytest.raises(CorruptCheckpointError, match=r"^w: \["):
        xckpt.load(URL)
    problems = xckpt.open(URL).verify()
    assert problems and {problem.leaf for problem in problems} == {"w"}
    assert len(problems) == 1 or place != "chunk"


def test_checksums_are_read_by_tensorstore(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    xckpt.save(tmp_path / "c", STATE, options=xckpt.SaveOptions(crc32c=True, readers=4))
    monkeypatch.setattr(reads.ShardReads, "read", None)
    for leaf, array in xckpt.load(tmp_path / "c").items():
        np.testing.assert_array_equal(array, STATE[leaf])


def test_tensorstore_is_not_asked_for_a_local_edge(tmp_path, monkeypatch) -> None:
    xckpt.save(tmp_path / "c", STATE, options=OPTIONS)
    monkeypatch.setattr(ChunkSource, "begin", None)
    for leaf, array in xckpt.load(tmp_path / "c").items():
        np.testing.assert_array_equal(array, STATE[leaf])
