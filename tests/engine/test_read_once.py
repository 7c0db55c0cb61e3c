"""What ranks of several hosts want is read from storage once, and sent to the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import ThreadGroup, results, run_ranks
from tests.support.altered_parcels import altered_parcels
from tests.support.counted_bucket import CountedBucket
from tests.support.servers import bucket
from tests.support.sharded_arrays import holds, wish
from xckpt.storage.chunks.chunk import Chunk, ChunkSource

__all__ = ["altered_parcels", "bucket"]

WHOLE = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
RANKS = 16
"""Each on a host of its own, unless a test says otherwise."""

Share = bool | Literal["host", "job"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = str(tmp_path_factory.mktemp("once") / "ckpt")
    options = xckpt.SaveOptions(chunk_bytes=1 << 14)
    xckpt.save(where, {"w": WHOLE, "step": 3}, options=options)
    return where


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each chunk that comes from storage, of all ranks."""
    found: list[int] = []
    verify = ChunkSource.verify

    def noted(source: ChunkSource, chunk: Chunk, digest: bytes) -> None:
        found.append(chunk.nbytes)
        verify(source, chunk, digest)

    monkeypatch.setattr(ChunkSource, "verify", noted)
    return found


def options(group: ThreadGroup, share: Share, a_host: int = 1) -> xckpt.LoadOptions:
    return xckpt.LoadOptions(share_reads=share, host=f"host {group.rank // a_host}", threads=1)


@pytest.mark.parametrize(
    ("share", "a_host", "times"), [("job", 1, 1), ("job", 4, 1), ("host", 4, 4), (False, 4, 16)]
)
def test_replicas(path: str, read: list[int], share: Share, a_host: int, times: int) -> None:
    def load(group: ThreadGroup) -> Any:
        return xckpt.load(path, group=group, options=options(group, share, a_host))

    for state in results(RANKS, load):
        assert state["step"] == 3 and (state["w"] == WHOLE).all()
    assert sum(read) == times * WHOLE.nbytes


def test_columns_of_what_was_saved_in_rows(path: str, read: list[int]) -> None:
    """Each rank wants a part of every chunk."""
    width = 512 // RANKS

    def load(group: ThreadGroup) -> Any:
        like = {"w": wish(WHOLE, [((0, group.rank * width), (512, width))])}
        given = options(group, "job")
        return xckpt.load(path, like, group=group, options=given, unexpected="ignore")

    for rank, state in enumerate(results(RANKS, load)):
        assert state["w"].boxes.offsets.tolist() == [[0, rank * width]]
        assert holds(state["w"], WHOLE)
    assert sum(read) == WHOLE.nbytes


def test_a_zarr_shard_in_a_bucket_that_several_ranks_want_is_one_request(
    bucket: CountedBucket,
) -> None:
    """One rank reads all its chunks, and no request asks for the index of a shard."""
    url = "s3://bucket/shards"
    given = xckpt.SaveOptions(chunk_bytes=1 << 17, shard_bytes=1 << 19, pack_bytes=0)
    xckpt.save(url, {"w": WHOLE}, options=given)
    bucket.taken()

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(url, group=group, options=options(group, "job", 2))

    for state in results(4, load):
        assert (state["w"] == WHOLE).all()
    chunks = [each for each in bucket.taken() if each.kind == "GET chunk"]
    assert len(chunks) == WHOLE.nbytes >> 19
    assert sum(each.answered for each in chunks) < WHOLE.nbytes + 2 * (1 << 10)
    # A rank whose own chunks are read already must not wait for peers then.
    for name in [name for name in bucket.objects if "/c/" in name]:
        tag, content = bucket.objects[name]
        bucket.objects[name] = tag, bytes([content[0] ^ 1]) + content[1:]
    for outcome in run_ranks(4, load):
        assert isinstance(outcome.error, xckpt.CorruptCheckpointError)
        assert "w: [0, 64) x [0, 512)" in str(outcome.error)


def test_what_the_default_is(path: str, read: list[int]) -> None:
    """Hosts share what lies in a bucket, but not what each has in its own memory or on a disk."""

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(path, group=group, options=options(group, True))

    results(2, load)
    assert sum(read) == 2 * WHOLE.nbytes


@pytest.mark.usefixtures("altered_parcels")
def test_what_a_host_sends_is_verified_by_the_taker(path: str) -> None:
    def load(group: ThreadGroup) -> Any:
        return xckpt.load(path, group=group, options=options(group, "job"))

    for outcome in run_ranks(3, load):
        assert isinstance(outcome.error, xckpt.CorruptCheckpointError)
        assert "another host sent bytes that were not saved" in str(outcome.error)


def test_damage_is_named_on_every_host(path: str, tmp_path: Path) -> None:
    where = tmp_path / "damaged"
    xckpt.save(where, {"w": WHOLE}, options=xckpt.SaveOptions(chunk_bytes=1 << 14))
    chunk = where / "w" / "c" / "0" / "0"
    chunk.write_bytes(bytes(chunk.stat().st_size))

    def load(group: ThreadGroup) -> Any:
        return xckpt.load(where, group=group, options=options(group, "job"))

    for outcome in run_ranks(3, load):
        assert isinstance(outcome.error, xckpt.CorruptCheckpointError)
        assert "its digest differs from the one saved" in str(outcome.error)


@pytest.mark.parametrize("row", [2, 6])
@pytest.mark.parametrize(("share", "a_host"), [("host", 2), ("job", 1)])
def test_a_cast_is_checked_of_what_another_rank_has_read(
    tmp_path: Path, share: Share, a_host: int, row: int
) -> None:
    """It comes after all that this rank reads itself, of which there is nothing here."""
    array = np.ones((8, 4), np.float32)
    array[row, 1] = 1e30
    xckpt.save(tmp_path / "ckpt", {"w": array})

    def load(group: ThreadGroup) -> None:
        like = {"w": wish(np.empty((8, 4), "float16"), [((4 * group.rank, 0), (4, 4))])}
        about = {"cast": True, "options": options(group, share, a_host)}
        xckpt.load(tmp_path / "ckpt", like, group=group, **about)

    text = f"w: 1 element does not fit into float16, the first at ({row}, 1)"
    failed = [str(outcome.error) for outcome in run_ranks(2, load)]
    assert all(text in each for each in failed), failed
