"""What arrays of other libraries claim, and what is stored of them, is bounded."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tensorstore as ts
import zarr

import xckpt
from xckpt.core.manifest.entries import array_metadata
from xckpt.errors import CorruptCheckpointError, LeafTooLargeError, StorageError
from xckpt.storage.foreign import zarr_limits
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.zarr_arrays import ZarrFolder
from xckpt.storage.location import Location

RAISE = r"raise LoadOptions\(memory_bytes=\), to convert SaveOptions\(memory_bytes=\)"


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files need not be long."""
    monkeypatch.setattr(zarr_limits, "LEAST_LIMIT", 1)
    monkeypatch.setattr(zarr_limits, "TIMES_HELD", 0)


def test_a_chunk_that_the_folder_holds_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the budget: other libraries save a whole array as one chunk."""
    monkeypatch.setattr(zarr_limits, "TIMES_HELD", 4)
    folder = ZarrFolder(tmp_path)
    described(folder, 3, 4000, 8000)
    values = np.arange(8000).astype(np.uint8)
    for number in (0, 1):
        part = values[4000 * number :][:4000].tobytes()
        folder._root.write(f"w/c/{number}", part).result()
    into = np.zeros(8000, np.uint8)
    ZarrFolder(tmp_path, memory=Allowance(1000)).open("w", version=3).read((0,), into)
    np.testing.assert_array_equal(into, values)
    # A folder that holds a quarter less than the chunk claims is a claim.
    described(folder, 3, 16_001, 32_002)
    with pytest.raises(LeafTooLargeError, match="more than memory_bytes"):
        ZarrFolder(tmp_path, memory=Allowance(1000)).open("w", version=3)
    os.truncate(tmp_path / "w/c/0", 1 << 30)  # a hole is not held
    with pytest.raises(LeafTooLargeError, match="more than memory_bytes"):
        ZarrFolder(tmp_path, memory=Allowance(1000)).open("w", version=3)


def test_a_listing_without_an_answer_is_given_up(tmp_path: Path) -> None:
    promise, future = ts.Promise[list[bytes]].new()

    class Silent:
        def list(self, _: object) -> ts.Future[list[bytes]]:
            return future

    where = Location.parse(tmp_path, xckpt.LoadOptions(timeout=0.1))
    with pytest.raises(StorageError, match=r"has not answered within the 0\.1 s"):
        zarr_limits.stored_chunks(cast(ts.KvStore, Silent()), "w", where)
    del promise  # which would have ended the wait


def described(folder: ZarrFolder, version: int, chunk: int, shape: int = 8) -> None:
    """Write the metadata of an array ``w`` of bytes."""
    if version == 3:
        document = array_metadata("uint8", (shape,), (chunk,), None, ())
        folder._root.write("w/zarr.json", json.dumps(document).encode()).result()
        return
    document = {
        "zarr_format": 2, "shape": [shape], "chunks": [chunk], "dtype": "|u1",
        "compressor": None, "fill_value": 0, "order": "C", "filters": None,
    }  # fmt: skip
    folder._root.write("w/.zarray", json.dumps(document).encode()).result()


@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_a_chunk_above_the_budget_is_refused(tmp_path: Path, version: int, ocdbt: bool) -> None:
    described(ZarrFolder(tmp_path, ocdbt=ocdbt), version, 2000, 4000)
    words = rf"a chunk of \(2000,\) is .* 2.0 KiB, more than memory_bytes \(1.0 KiB\); {RAISE}"
    with pytest.raises(LeafTooLargeError, match=words):
        ZarrFolder(tmp_path, ocdbt=ocdbt, memory=Allowance(1024)).open("w", version=version)
    ZarrFolder(tmp_path, ocdbt=ocdbt, memory=Allowance(2000)).open("w", version=version)


@pytest.mark.parametrize("ocdbt", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_what_is_stored_of_a_chunk_is_measured(tmp_path: Path, version: int, ocdbt: bool) -> None:
    key = "w/c/1" if version == 3 else "w/1"
    folder = ZarrFolder(tmp_path, ocdbt=ocdbt)
    described(folder, version, 4)
    for number in (0, 1):
        folder._root.write(f"{key[:-1]}{number}", b"abcd").result()
    folder = ZarrFolder(tmp_path, ocdbt=ocdbt, memory=Allowance(8))
    into = np.zeros(8, np.uint8)
    folder.open("w", version=version).read((0,), into)
    assert into.tobytes() == b"abcdabcd"
    folder._root.write(key, b"abcde" * 1000).result()
    words = rf"{key}: a chunk of \(4,\) is decoded as one, and more than 4 B .*; {RAISE}"
    with pytest.raises(LeafTooLargeError, match=words):
        ZarrFolder(tmp_path, ocdbt=ocdbt, memory=Allowance(8)).open("w", version=version)


@pytest.mark.parametrize("size", [2 << 30, 1 << 40])
def test_a_sparse_file_of_a_chunk_is_not_read(tmp_path: Path, size: int) -> None:
    """TensorStore takes memory for all of it, and ends the process where there is none."""
    folder = ZarrFolder(tmp_path)
    described(folder, 3, 4)
    (tmp_path / "w/c").mkdir()
    (tmp_path / "w/c/0").touch()
    os.truncate(tmp_path / "w/c/0", size)
    with pytest.raises(LeafTooLargeError, match="w/c/0"):
        ZarrFolder(tmp_path).open("w", version=3)


def test_parts_of_a_zarr_shard_are_measured(tmp_path: Path) -> None:
    """A shard may be long, what is decoded of it not."""
    array = zarr.create_array(
        tmp_path / "w", shape=(4000,), chunks=(500,), shards=(4000,), dtype="u1", compressors=None
    )
    values = np.arange(4000, dtype=np.uint8)
    array[:] = values
    into = np.zeros(4000, np.uint8)
    ZarrFolder(tmp_path, memory=Allowance(1100)).open("w", version=3).read((0,), into)
    np.testing.assert_array_equal(into, values)
    with pytest.raises(LeafTooLargeError, match="more than 200 B is stored"):
        ZarrFolder(tmp_path, memory=Allowance(700)).open("w", version=3)
    # One whose index is written otherwise cannot be measured.
    document = json.loads((tmp_path / "w/zarr.json").read_text())
    document["codecs"][0]["configuration"]["index_codecs"].pop()
    (tmp_path / "w/zarr.json").write_text(json.dumps(document))
    with pytest.raises(LeafTooLargeError, match="more than 600 B is stored"):
        ZarrFolder(tmp_path, memory=Allowance(1100)).open("w", version=3)


def test_a_database_is_measured_before_it_is_opened(tmp_path: Path) -> None:
    described(ZarrFolder(tmp_path, ocdbt=True), 3, 4)
    [node] = (tmp_path / "d").iterdir()
    os.truncate(node, 1 << 30)
    with pytest.raises(CorruptCheckpointError, match=rf"the holes in its 1.0 GiB .*, or {RAISE}"):
        ZarrFolder(tmp_path, ocdbt=True)
    os.truncate(tmp_path / "manifest.ocdbt", 1 << 30)
    with pytest.raises(CorruptCheckpointError, match=r"manifest.ocdbt: over 67,108,864 bytes long"):
        ZarrFolder(tmp_path, ocdbt=True)


def test_a_long_document_in_a_database_is_refused(tmp_path: Path) -> None:
    folder = ZarrFolder(tmp_path, ocdbt=True)
    folder._root.write("w/zarr.json", b"{" + b" " * (1 << 20) + b"}").result()
    with pytest.raises(CorruptCheckpointError, match=r"w/zarr.json: over 1,048,576 bytes long"):
        ZarrFolder(tmp_path, ocdbt=True).open("w", version=3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_place_of_a_chunk_is_not_waited_for(tmp_path: Path) -> None:
    described(ZarrFolder(tmp_path), 3, 4)
    (tmp_path / "w/c").mkdir()
    os.mkfifo(tmp_path / "w/c/0")
    (tmp_path / "w/again").symlink_to(tmp_path)
    with pytest.raises(xckpt.XckptError, match="w/c/0 is not a plain file"):
        ZarrFolder(tmp_path).open("w", version=3)


def test_chunks_that_are_decoded_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two reads of 600 bytes, as stored and decoded, do not fit 1000 together."""
    folder = ZarrFolder(tmp_path, memory=Allowance(1000))
    described(folder, 3, 300, 600)
    stored = ZarrFolder(tmp_path, memory=Allowance(1000), fill_missing=True).open("w", version=3)
    seen: list[int] = []
    region = type(stored)._region

    def watched(self: object, *arguments: object) -> object:
        seen.append(stored._memory._used)
        return region(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(stored), "_region", watched)
    threads = [
        threading.Thread(target=stored.read, args=((at,), np.zeros(10, np.uint8)))
        for at in (0, 300, 5, 305)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [600] * 4 and stored._memory._used == 0
