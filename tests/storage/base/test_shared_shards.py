"""Zarr shards are shared with a base as chunks are: where each of their chunks is equal."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.storage.base.test_sharing import shared
from xckpt import SaveOptions

W = np.arange(1024 * 512, dtype=np.float32).reshape(1024, 512)
SHARDS = SaveOptions(chunk_bytes=1 << 19, readers=8)
ROWS = SaveOptions(chunk_bytes=1 << 12, shard_bytes=1 << 19)
FILES = {f"w/c/{n}/0" for n in range(4)}


@pytest.mark.parametrize("options", [SHARDS, ROWS])
def test_an_equal_shard_has_two_names(options: SaveOptions, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": W}, options=options)
    changed = W.copy()
    changed[300, 7] = -1
    xckpt.save(tmp_path / "b", {"w": changed}, base=tmp_path / "a", options=options)
    assert shared(tmp_path / "a", tmp_path / "b") == FILES - {"w/c/1/0"}
    for path, state in (("a", W), ("b", changed)):
        np.testing.assert_array_equal(xckpt.load(tmp_path / path)["w"], state)
        assert not xckpt.open(tmp_path / path).verify()


def test_a_base_keeps_its_shards(tmp_path: Path) -> None:
    """Whatever the options: else nothing were equal."""
    xckpt.save(tmp_path / "a", {"w": W}, options=SHARDS)
    xckpt.save(tmp_path / "b", {"w": W}, base=tmp_path / "a")
    assert shared(tmp_path / "a", tmp_path / "b") == FILES
    xckpt.save(tmp_path / "c", {"w": W}, options=SaveOptions(chunk_bytes=1 << 19))
    xckpt.save(tmp_path / "d", {"w": W}, base=tmp_path / "c", options=SHARDS)
    assert shared(tmp_path / "c", tmp_path / "d") == FILES


def test_a_short_shard_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xckpt.save(tmp_path / "a", {"w": W}, options=SHARDS)
    file = tmp_path / "a" / "w" / "c" / "2" / "0"
    os.truncate(file, file.stat().st_size - 1)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(tmp_path / "b", {"w": W}, base=tmp_path / "a", options=SHARDS)
    assert "bytes long instead of" in caplog.text
    assert shared(tmp_path / "a", tmp_path / "b") == FILES - {"w/c/2/0"}
    assert not xckpt.open(tmp_path / "b").verify()


@pytest.mark.parametrize("at", [1000, -30])
def test_a_damaged_shard_is_written_anew_if_it_is_read(at: int, tmp_path: Path) -> None:
    """A flipped bit of a chunk, or of the index."""
    xckpt.save(tmp_path / "a", {"w": W}, options=SHARDS)
    file = tmp_path / "a" / "w" / "c" / "2" / "0"
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
    options = SaveOptions(chunk_bytes=1 << 19, readers=8, verify_base=True)
    xckpt.save(tmp_path / "b", {"w": W}, base=tmp_path / "a", options=options)
    assert shared(tmp_path / "a", tmp_path / "b") == FILES - {"w/c/2/0"}
    assert not xckpt.open(tmp_path / "b").verify()


def test_shards_with_checksums_are_written(tmp_path: Path) -> None:
    options = SaveOptions(chunk_bytes=1 << 19, readers=8, crc32c=True)
    xckpt.save(tmp_path / "a", {"w": W}, options=options)
    xckpt.save(tmp_path / "b", {"w": W}, base=tmp_path / "a", options=options)
    assert not shared(tmp_path / "a", tmp_path / "b") & FILES
    assert not xckpt.open(tmp_path / "b").verify()
