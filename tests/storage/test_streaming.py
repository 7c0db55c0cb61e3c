"""Chunks read slab by slab: the same elements, and the same refusals, as chunks read whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.errors import CorruptCheckpointError, StorageError
from xckpt.storage import chunk as chunks
from xckpt.storage import streaming
from xckpt.storage.chunk import ChunkSource
from xckpt.storage.foreign import files
from xckpt.storage.streaming import ChunkStream

SHAPE = (3, 40, 50)
W = np.random.default_rng(0).integers(0, 256, (*SHAPE, 2), np.uint8).view(np.uint16)[..., 0]
EDGE = W.reshape(-1)[: 101 * 53].reshape(101, 53)


@pytest.fixture(scope="module")
def small_slabs() -> Iterator[None]:
    """Slabs of a few rows, also of chunks that are usually read as values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "SMALL_BYTES", 0)
        patch.setattr(streaming, "SLAB_BYTES", 700)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, small_slabs: None) -> Path:
    folder = tmp_path_factory.mktemp("streaming") / "c"
    # One matrix a chunk, rows that are longer than a slab, and a last chunk that is not full.
    state = {"w": W, "rows": W.reshape(4, -1), "edge": EDGE, "flat": W.reshape(-1)}
    xckpt.save(folder, state, options=xckpt.SaveOptions(chunk_bytes=40 * 50 * 2))
    return folder


def _stream(source: ChunkSource, leaf: str, number: int = 0) -> ChunkStream:
    key = (leaf, 0)
    source.prepare([key])
    array = source.array(key)
    grid = [-(-n // c) for n, c in zip(array.shape, array.chunk, strict=True)]
    at = np.unravel_index(number, grid)
    cell = tuple(int(a) * c for a, c in zip(at, array.chunk, strict=True)), array.chunk
    return ChunkStream(source, key, number, cell, source.plain_file(key, cell))


def _source(path: Path) -> ChunkSource:
    return xckpt.open(path).chunk_source


@pytest.mark.parametrize("leaf", ["w", "rows", "flat"])
def test_slabs_are_whole_rows_in_order(path: Path, leaf: str) -> None:
    source = _source(path)
    with contextlib.closing(_stream(source, leaf, 1)) as stream:
        slabs = [(where, slab.copy()) for where, slab in stream.slabs()]
    chunk = source.array((leaf, 0)).chunk
    made = np.zeros(chunk, np.uint16)
    for where, slab in slabs:
        made[where] = slab
        assert slab.nbytes <= 700 or slab.shape[len(where) - 1] == 1
    assert len(slabs) > 1
    key = (leaf, 0)
    whole = np.empty(chunk, np.uint16)
    grid = [n // c for n, c in zip(source.array(key).shape, chunk, strict=True)]
    offsets = tuple(int(a) * c for a, c in zip(np.unravel_index(1, grid), chunk, strict=True))
    source.read(key, 1, (offsets, chunk), whole)
    np.testing.assert_array_equal(made, whole)
    assert source.bytes_read == 2 * whole.nbytes


@given(data=st.data())
@examples(100)
def test_a_box_in_any_order_is_what_numpy_slices(path: Path, data: st.DataObject) -> None:
    from xckpt.formats.source import XckptSource

    name = data.draw(st.sampled_from(["w", "edge"]))
    whole = W if name == "w" else EDGE
    low = [data.draw(st.integers(0, n - 1)) for n in whole.shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, whole.shape, strict=True)]
    axes = data.draw(st.permutations(range(whole.ndim)))
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    into = np.zeros([sizes[axis] for axis in axes], np.uint16).transpose(np.argsort(axes))
    XckptSource(path).read(name, ChunkStorageMetadata(tuple(low), sizes), into)
    region = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    np.testing.assert_array_equal(into, whole[region])


def test_chunks_that_are_read_otherwise_have_no_file(path: Path, tmp_path: Path) -> None:
    source = _source(path)
    edge = source.array(("edge", 0))
    last = tuple((n - 1) // c * c for n, c in zip(edge.shape, edge.chunk, strict=True))
    inside = tuple(n - o for n, o in zip(edge.shape, last, strict=True))
    assert inside != edge.chunk
    assert source.plain_file(("edge", 0), (last, inside)) == ""
    assert source.plain_file(("edge", 0), ((0, 0), edge.chunk)).endswith("edge/c/0/0")
    xckpt.save(tmp_path / "checked", {"w": W}, options=xckpt.SaveOptions(crc32c=True))
    assert _source(tmp_path / "checked").plain_file(("w", 0), ((0, 0, 0), SHAPE)) == ""
    xckpt.save("memory://streaming", {"w": W})
    elsewhere = xckpt.open("memory://streaming").chunk_source
    assert elsewhere.plain_file(("w", 0), ((0, 0, 0), SHAPE)) == ""


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, "its digest differs"),
        (Path.unlink, "the chunk is missing"),
        (lambda file: os.truncate(file, 1000), "the chunk is truncated"),
        (lambda file: os.truncate(file, 0), "the chunk is truncated"),
        (lambda file: os.truncate(file, 4001), "4,001 bytes long, where at most 4,000"),
        (_pipe, "no plain file"),
    ],
    ids=["flipped", "missing", "truncated", "empty", "longer", "pipe"],
)
def test_damage_is_refused_by_name(
    tmp_path: Path, small_slabs: None, damage: Callable[[Path], None], reason: str
) -> None:
    xckpt.save(tmp_path / "c", {"w": W}, options=xckpt.SaveOptions(chunk_bytes=40 * 50 * 2))
    damage(tmp_path / "c" / "w" / "c" / "1" / "0" / "0")
    source = _source(tmp_path / "c")
    with (
        pytest.raises(CorruptCheckpointError, match=rf"w: \[1, 2\) x \[0, 40\).*{reason}"),
        contextlib.closing(_stream(source, "w", 1)) as stream,
    ):
        for _ in stream.slabs():
            pass


def test_a_file_that_cannot_be_opened_is_a_storage_error(
    tmp_path: Path, small_slabs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save(tmp_path / "c", {"w": W})
    source = _source(tmp_path / "c")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(StorageError, match="check the permissions"):
        _stream(source, "w")
