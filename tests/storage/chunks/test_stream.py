"""Chunks read slab by slab: the same elements, and the same refusals, as chunks read whole."""

from __future__ import annotations

import contextlib
import itertools
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
from xckpt.storage.chunks import chunk as chunks
from xckpt.storage.chunks import stream as streaming
from xckpt.storage.chunks.chunk import Chunk, ChunkSource, chunks_of
from xckpt.storage.chunks.stream import ChunkStream
from xckpt.storage.foreign import files

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


def _chunk(source: ChunkSource, leaf: str, number: int = 0) -> Chunk:
    (array,) = source.arrays[leaf]
    source.integrity.prepare([array])
    return next(itertools.islice(chunks_of(array), number, None))


def _stream(source: ChunkSource, leaf: str, number: int = 0) -> ChunkStream:
    chunk = _chunk(source, leaf, number)
    return ChunkStream(source, chunk, source.plain_file(chunk))


def _source(path: Path | str) -> ChunkSource:
    return xckpt.open(path).chunk_source


@pytest.mark.parametrize("leaf", ["w", "rows", "flat"])
def test_slabs_are_whole_rows_in_order(path: Path, leaf: str) -> None:
    source = _source(path)
    with contextlib.closing(_stream(source, leaf, 1)) as stream:
        slabs = [(box, slab.copy()) for box, slab in stream.slabs()]
    chunk = _chunk(source, leaf, 1)
    assembled = np.zeros(chunk.box.sizes, np.uint16)
    for box, slab in slabs:
        assembled[box.slices()] = slab
        rows = next((axis for axis, n in enumerate(chunk.box.sizes) if n > 1), slab.ndim - 1)
        assert slab.nbytes <= 700 or slab.shape[rows] == 1
    assert len(slabs) > 1
    whole = np.empty(chunk.box.sizes, np.uint16)
    source.read(chunk, whole)
    np.testing.assert_array_equal(assembled, whole)
    assert source.bytes_read == 2 * whole.nbytes


@given(data=st.data())
@examples(100)
def test_a_box_in_any_order_is_what_numpy_slices(path: Path, data: st.DataObject) -> None:
    from xckpt.formats.xckpt import XckptSource

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
    (edge,) = source.arrays["edge"]
    first, *_, last = chunks_of(edge)
    assert last.box.sizes != edge.chunk
    assert source.plain_file(last) == ""
    assert source.plain_file(first).endswith("edge/c/0/0")
    xckpt.save(tmp_path / "checked", {"w": W}, options=xckpt.SaveOptions(crc32c=True))
    checked = _source(tmp_path / "checked")
    assert checked.plain_file(_chunk(checked, "w")) == ""
    xckpt.save("memory://streaming", {"w": W})
    elsewhere = _source("memory://streaming")
    assert elsewhere.plain_file(_chunk(elsewhere, "w")) == ""


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
