"""A copy within a bucket is made by the bucket; what it refuses passes through this process."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.test_copies_and_deletions import claim_chunks
from tests.storage.base.test_copying import copies, server, uploaded
from tests.support.counted_bucket import CountedBucket, kinds, without_obstore
from tests.support.faulty_bucket import Answer, Fault, FaultyBucket, Request, never
from tests.support.servers import bucket, environment, faulty_gcs, faulty_s3, gcs, s3
from xckpt import LoadOptions, SaveOptions
from xckpt.storage import copy_checkpoint as copying
from xckpt.storage.buckets import server_side

__all__ = ["bucket", "environment", "faulty_gcs", "faulty_s3", "gcs", "s3", "server"]

STATE: dict[str, Any] = {
    "w": np.random.default_rng(0).standard_normal((256, 128), np.float32),
    "none": np.zeros((0, 3)),
    "step": 3,
}
SMALL = SaveOptions(chunk_bytes=1 << 14, pack_bytes=0)
PACKED = SaveOptions(pack_bytes=1 << 18)


def check(url: str) -> None:
    assert xckpt.open(url).verify() == []
    assert np.array_equal(xckpt.load(url)["w"], STATE["w"])


@pytest.mark.parametrize(("options", "objects"), [(SMALL, 12), (PACKED, 3)])
def test_the_bytes_and_requests_of_a_copy(
    bucket: CountedBucket, options: SaveOptions, objects: int
) -> None:
    """Eight chunks or a pack, some zarr.json, the digests."""
    xckpt.save("s3://bucket/a", STATE, options=options)
    bucket.taken()
    xckpt.copy("s3://bucket/a", "s3://bucket/b")
    requests = bucket.taken()
    assert sum(request.copy for request in requests) == objects
    # The manifest of the source, before and after, and of the copy; the claim of both, twice.
    assert len(requests) <= objects + 12
    assert uploaded(requests) + sum(request.answered for request in requests) < 0.1 * 256 * 128 * 4
    assert not any(kind.startswith("PUT chunk") for kind in kinds(requests))
    xckpt.delete("s3://bucket/a")
    check("s3://bucket/b")
    xckpt.save("s3://bucket/b", {"w": STATE["w"] + 1}, overwrite=True)
    xckpt.copy("s3://bucket/b", "s3://bucket/a")  # from a generation
    xckpt.copy("s3://bucket/b", "s3://bucket/a", overwrite=True)
    assert xckpt.open("s3://bucket/a").verify() == []


def test_a_copy_to_another_bucket_passes_through(bucket: CountedBucket) -> None:
    xckpt.save("s3://bucket/a", STATE, options=SMALL)
    bucket.taken()
    xckpt.copy("s3://bucket/a", "s3://other/b")
    assert not any(request.copy for request in bucket.taken())
    check("s3://other/b")


def test_without_the_package_all_passes_through(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xckpt.save("s3://bucket/a", STATE)
    without_obstore(monkeypatch)
    bucket.taken()
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.copy("s3://bucket/a", "s3://bucket/b")
    assert uploaded(bucket.taken()) > STATE["w"].nbytes
    assert caplog.text.count('pip install "xckpt[buckets]"') == 1
    check("s3://bucket/b")


@pytest.mark.parametrize("answer", [Answer(403, "AccessDenied"), Answer(501, "NotImplemented")])
def test_what_may_not_be_copied_passes_through(
    server: FaultyBucket, answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    xckpt.save(f"{server.name}/a", STATE, options=SMALL)
    server.fault = lambda request: answer if request.source else None
    shown: list[xckpt.Progress] = []
    server.seen.clear()
    with caplog.at_level(logging.INFO, "xckpt"):
        progress = LoadOptions(progress=shown.append)
        xckpt.copy(f"{server.name}/a", f"{server.name}/b", options=progress)
    server.fault = never
    assert copies(server) == (1 if answer.status == 501 else 2)
    assert caplog.text.count("the bucket does not copy") == 1 and str(answer.status) in caplog.text
    assert shown[-1].done == shown[-1].total
    check(f"{server.name}/b")


def test_a_source_that_is_another_for_a_while(server: FaultyBucket) -> None:
    """Its manifest is the same again, and what was copied meanwhile may be another's."""
    other = {**STATE, "w": STATE["w"] + 1}
    xckpt.save(f"{server.name}/a", STATE, options=SMALL)
    lock, asked = threading.Lock(), list[str]()

    def amid(request: Request) -> Fault:
        if request.source:
            with lock:
                asked.append(request.source)
                if len(asked) in (2, 5):
                    xckpt.delete(f"{server.name}/a")
                    state = other if len(asked) == 2 else STATE
                    xckpt.save(f"{server.name}/a", state, options=SMALL)
        return None

    server.fault = amid
    options = LoadOptions(concurrency=2)
    with pytest.raises(xckpt.StorageError, match="was replaced while it was copied"):
        xckpt.copy(f"{server.name}/a", f"{server.name}/b", options=options)
    server.fault = never
    assert len(asked) >= 5 and not xckpt.exists(f"{server.name}/b")
    check(f"{server.name}/a")


def test_copies_that_go_elsewhere_are_noticed(
    bucket: CountedBucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket says that it has copied, and this process does not find it."""
    xckpt.save("s3://bucket/a", STATE, options=SMALL)
    monkeypatch.setattr(server_side, "_store", lambda where: None)

    async def copied(*_: object) -> None:
        return None

    monkeypatch.setattr("obstore.copy_async", copied)
    shown: list[xckpt.Progress] = []
    with caplog.at_level(logging.INFO, "xckpt"):
        progress = LoadOptions(progress=shown.append)
        xckpt.copy("s3://bucket/a", "s3://bucket/b", options=progress)
    assert caplog.text.count("is not there; the endpoints may differ") == 1
    assert shown[-1].done == shown[-1].total
    check("s3://bucket/b")


@pytest.mark.parametrize(("chunks", "length"), [(1 << 17, 16 << 17), (1 << 31, 0)])
def test_a_copy_whose_source_claims_much_deletes_what_it_wrote(
    bucket: CountedBucket, tmp_path: Path, chunks: int, length: int
) -> None:
    """It deleted each key that the manifest claims: of 16 million it took minutes and 6 GiB."""
    claim_chunks(tmp_path / "claims", chunks, length)
    with pytest.raises(xckpt.CorruptCheckpointError, match="missing"):
        xckpt.copy(tmp_path / "claims", "s3://bucket/x")
    assert not bucket.objects and len(bucket.taken()) < 100


def test_a_copy_within_a_bucket_whose_source_claims_much_ends_at_the_first_gap(
    bucket: CountedBucket, tmp_path: Path
) -> None:
    """It listed all claimed keys in memory, asked for a copy of each, and deleted each."""
    claim_chunks(tmp_path / "claims", 1 << 17, 16 << 17)
    for path in filter(Path.is_file, (tmp_path / "claims").rglob("*")):
        key = f"a/{path.relative_to(tmp_path / 'claims')}"
        bucket.objects[key] = (f'"{key}"', path.read_bytes())
    before = dict(bucket.objects)
    with pytest.raises(xckpt.CorruptCheckpointError, match="w/c/0: it is missing"):
        xckpt.copy("s3://bucket/a", "s3://bucket/x", options=LoadOptions(concurrency=4))
    assert bucket.objects == before and len(bucket.taken()) < 100


def test_a_copy_that_fails_leaves_nothing(bucket: CountedBucket) -> None:
    xckpt.save("s3://bucket/a", STATE, options=SMALL)
    before = set(bucket.objects)
    bucket.refused = "b/w/c/3/0"
    with pytest.raises(xckpt.StorageError):
        xckpt.copy("s3://bucket/a", "s3://bucket/b")
    assert set(bucket.objects) == before and any(request.copy for request in bucket.taken())


def test_a_source_that_is_replaced_meanwhile_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, link = tmp_path / "source", copying.link_or_copy
    plain = xckpt.SaveOptions(pack_bytes=0)
    xckpt.save(source, {"w": np.arange(3), "v": np.ones(2)}, options=plain)

    def late(old: Path, new: Path) -> None:
        monkeypatch.setattr(copying, "link_or_copy", link)
        xckpt.save(source, {"u": np.arange(4)}, overwrite=True, options=plain)
        link(old, new)

    monkeypatch.setattr(copying, "link_or_copy", late)
    with pytest.raises(xckpt.StorageError, match="was replaced while it was copied; copy it again"):
        xckpt.copy(source, tmp_path / "copy")
    assert os.listdir(tmp_path) == ["source"]
