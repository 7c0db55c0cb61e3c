"""How objects are cut for readers where the caller says nothing: in a bucket, and in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import xckpt
from tests.support.counted_bucket import CountedBucket
from tests.support.servers import bucket
from xckpt import SaveOptions
from xckpt.convert import convert
from xckpt.storage import ZarrStorageWriter
from xckpt.torch.dcp import XckptStorageWriter

__all__ = ["bucket"]

ROWS, COLUMNS = 1024, 2048
W = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
URL = "s3://bucket/cut"


def parts(path: str | Path) -> tuple[int, int]:
    """Into how many chunks the rows and columns of a checkpoint's only tensor are cut."""
    chunks = xckpt.open(path).array("w").chunks
    assert chunks is not None
    return ROWS // chunks[0], COLUMNS // chunks[1]


def test_a_reader_of_columns_in_a_bucket_reads_little_else(bucket: CountedBucket) -> None:
    xckpt.save(URL, {"w": W})
    assert len([key for key in bucket.objects if "/w/c/" in key]) == 1
    assert parts(URL)[1] == 4  # rather than 8: a chunk is a sixteenth of its object, or more
    array = xckpt.open(URL).array("w")
    bucket.taken()
    columns = array[:, 512:1024]
    np.testing.assert_array_equal(columns, W[:, 512:1024])
    assert sum(request.answered for request in bucket.taken()) <= 1.1 * columns.nbytes


@pytest.mark.parametrize(
    "asked",
    [
        SaveOptions(readers=0),
        SaveOptions(shard_bytes=16 << 20),
        SaveOptions(crc32c=True),
        SaveOptions(pack_bytes=16 << 20),
    ],
)
def test_what_is_asked_for_holds_in_a_bucket(bucket: CountedBucket, asked: SaveOptions) -> None:
    xckpt.save(URL, {"w": W}, options=asked)
    assert parts(URL) == (1, 1)


def test_files_are_cut_as_their_writer_cuts(tmp_path: Path) -> None:
    for place in (tmp_path / "c", "memory://cut-as-the-writer"):
        xckpt.save(place, {"w": W})
        assert parts(place) == (1, 1)


def test_a_base_in_a_bucket_keeps_its_chunks(bucket: CountedBucket) -> None:
    """Else nothing could be shared with one that an earlier release saved."""
    xckpt.save(URL, {"w": W}, options=SaveOptions(readers=0))
    xckpt.save(f"{URL}-next", {"w": W}, base=URL)
    assert parts(f"{URL}-next") == (1, 1)


def test_other_ways_to_save_into_a_bucket_cut_alike(bucket: CountedBucket, tmp_path: Path) -> None:
    xckpt.save_async(f"{URL}-async", {"w": W}).result()
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.from_numpy(W)}, storage_writer=XckptStorageWriter(f"{URL}-dcp"))
    xckpt.save(tmp_path / "c", {"w": W})
    convert(tmp_path / "c", f"{URL}-converted")
    xckpt.save_state_dict({"w": W}, ZarrStorageWriter(f"{URL}-writer"), no_dist=True)
    made = [parts(f"{URL}-{way}") for way in ("async", "dcp", "converted", "writer")]
    assert set(made) == {(4, 4)}
