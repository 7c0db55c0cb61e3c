"""Chunks read from their files in slabs: the elements that were saved, or an error by name."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.engine.ranks.alive import WORK
from xckpt.errors import CorruptCheckpointError, StorageError
from xckpt.storage.array import digest_array, plain_bools
from xckpt.storage.chunks import chunk as chunks
from xckpt.storage.chunks import plain_files, unit_files
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.plain_files import is_leading, write_plain
from xckpt.storage.chunks.requests import Chunk, chunks_of
from xckpt.storage.foreign import files

SHAPE = (3, 40, 50)
W = np.random.default_rng(0).integers(0, 256, (*SHAPE, 2), np.uint8).view(np.uint16)[..., 0]
EDGE = W.reshape(-1)[: 101 * 53].reshape(101, 53)


@pytest.fixture(scope="module")
def small_slabs() -> Iterator[None]:
    """Slabs of a few rows, also of chunks that are usually read as values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "SMALL_BYTES", 0)
        patch.setattr(plain_files, "SLAB_BYTES", 700)
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
    source.integrity.digests.prepare([array])
    return next(itertools.islice(chunks_of(array), number, None))


def _source(path: Path | str) -> ChunkSource:
    return xckpt.open(path).chunk_source


@pytest.mark.parametrize("leaf", ["w", "rows", "flat"])
def test_slabs_are_whole_rows_in_order(path: Path, leaf: str) -> None:
    source = _source(path)
    chunk = _chunk(source, leaf, 1)
    slabs = [(box, slab.copy()) for box, slab in source.slabs(chunk)]
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


def test_chunks_that_are_read_otherwise_have_no_plain_file(path: Path, tmp_path: Path) -> None:
    source = _source(path)
    (edge,) = source.arrays["edge"]
    first, *_, last = chunks_of(edge)
    assert last.box.sizes != edge.chunk
    assert source.is_plain_file(first) and source.is_plain_file(last)
    narrow = ZarrArray("n", 0, "uint16", (0, 0), (4, 7), (4, 4))
    assert [source.is_plain_file(chunk) for chunk in chunks_of(narrow)] == [True, False]
    xckpt.save(tmp_path / "checked", {"w": W}, options=xckpt.SaveOptions(crc32c=True))
    checked = _source(tmp_path / "checked")
    assert not checked.is_plain_file(_chunk(checked, "w"))
    xckpt.save("memory://plain-files", {"w": W})
    elsewhere = _source("memory://plain-files")
    assert not elsewhere.is_plain_file(_chunk(elsewhere, "w"))


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _hole(file: Path) -> None:
    os.truncate(file, 0)
    os.truncate(file, 4000)


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped": (_flip, "its digest differs"),
    "missing": (Path.unlink, "the chunk is missing"),
    "truncated": (lambda file: os.truncate(file, 1000), "truncated: 1,000 bytes long instead of 4"),
    "empty": (lambda file: os.truncate(file, 0), "truncated: 0 bytes long"),
    "longer": (lambda file: os.truncate(file, 4001), "4,001 bytes long, where at most 4,000"),
    "sparse": (_hole, "its digest differs"),
    "pipe": (_pipe, "not a plain file"),
    "device": (_device, "not a plain file"),
    "folder": (_folder, "not a plain file"),
}


def _slabs(source: ChunkSource, chunk: Chunk) -> None:
    for _ in source.slabs(chunk):
        pass


def _whole(source: ChunkSource, chunk: Chunk) -> None:
    source.read(chunk, np.empty(chunk.box.sizes, chunk.dtype))


@pytest.fixture
def one(tmp_path: Path, small_slabs: None) -> Path:
    """A checkpoint of `W`, a matrix a chunk."""
    xckpt.save(tmp_path / "c", {"w": W}, options=xckpt.SaveOptions(chunk_bytes=40 * 50 * 2))
    return tmp_path / "c"


@pytest.mark.parametrize("read", [_slabs, _whole])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(
    one: Path, damage: str, read: Callable[[ChunkSource, Chunk], None]
) -> None:
    act, reason = DAMAGES[damage]
    act(one / "w" / "c" / "1" / "0" / "0")
    source = _source(one)
    with pytest.raises(CorruptCheckpointError, match=rf"{NAMED}.*{reason}"):
        read(source, _chunk(source, "w", 1))


NAMED = r"w: \[1, 2\) x \[0, 40\) x \[0, 50\) in \S+/w/c/1/0/0"
"""Leaf, range and file of the chunk that is damaged."""


def _cut_off(file: Path) -> None:
    """Cut a file off before its second slab is read."""
    os.truncate(file, 701)


def _bad_sector(file: Path) -> None:
    raise OSError(5, "Input/output error")


def _stale_handle(file: Path) -> None:
    raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("happens", "error", "reason"),
    [
        (_cut_off, CorruptCheckpointError, "is truncated"),
        (_bad_sector, StorageError, "Input/output error"),
        (_stale_handle, StorageError, "Stale file handle"),
    ],
)
def test_what_happens_to_a_file_while_it_is_read(
    one: Path,
    happens: Callable[[Path], None],
    error: type[Exception],
    reason: str,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = one / "w" / "c" / "1" / "0" / "0"
    content, number = chunk.read_bytes(), chunk.stat().st_ino
    read = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == number and offset > 0:
            happens(chunk)
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(files.os, "preadv", preadv)
    options = xckpt.LoadOptions(threads=threads)
    transposed = np.zeros(W.shape[::-1], W.dtype).transpose()
    for into in (np.zeros_like(W), transposed):
        with pytest.raises(error, match=rf"{NAMED}.*{reason}"):
            xckpt.load_into(one, {"w": into}, options=options)
        chunk.write_bytes(content)
    with pytest.raises(error, match=rf"{NAMED}.*{reason}"):
        xckpt.load(one, options=options)
    chunk.write_bytes(content)
    (problem,) = xckpt.open(one, options=options).verify()
    assert re.search(rf"{NAMED}.*{reason}", str(problem))


def test_a_file_that_cannot_be_opened_is_a_storage_error(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(one)
    chunk = _chunk(source, "w")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(StorageError, match="check its permissions"):
        _slabs(source, chunk)


def test_a_closed_checkpoint_is_not_read(one: Path) -> None:
    source = _source(one)
    chunk = _chunk(source, "w")
    source.close()
    for read in (_slabs, _whole):
        with pytest.raises(ValueError, match="closed"):
            read(source, chunk)


@given(
    pair=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4),
)
@examples(100)
def test_leading_elements_are_the_first_of_the_file(pair: list[tuple[int, int]]) -> None:
    sizes = tuple(min(each) for each in pair)
    chunk = tuple(max(each) for each in pair)
    numbers = np.arange(math.prod(chunk)).reshape(chunk)
    first = numbers[tuple(slice(0, n) for n in sizes)].reshape(-1)
    assert is_leading(sizes, chunk) == (first.tolist() == list(range(len(first))))


@st.composite
def strided(draw: st.DrawFn) -> np.ndarray:
    """A view of some memory: transposed, stepped, broadcast or plain; bools of any bytes too."""
    sizes = draw(st.lists(st.integers(1, 9), max_size=3))
    dtype = draw(st.sampled_from(["uint8", "uint16", "float64", "bool"]))
    whole = np.random.default_rng(1).integers(0, 256, (*(2 * n for n in sizes), 8), np.uint8)
    whole = whole.view(dtype)[..., 0]
    view = whole[tuple(slice(0, 2 * n, draw(st.sampled_from([1, 2]))) for n in sizes)]
    return view.transpose(draw(st.permutations(range(view.ndim))))


@given(data=strided(), slab=st.integers(1, 200), padding=st.integers(0, 50))
@examples(100)
def test_a_file_holds_the_elements_and_zeros(
    tmp_path_factory: pytest.TempPathFactory, data: np.ndarray, slab: int, padding: int
) -> None:
    within = tmp_path_factory.getbasetemp() / "plain"
    within.mkdir(exist_ok=True)
    path = within / "c" / "0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_files, "SLAB_BYTES", slab)
        digest = write_plain(
            str(path), data, data.nbytes + padding, within=str(within), synced=True
        )
    elements = plain_bools(np.ascontiguousarray(data))
    assert path.read_bytes() == elements.tobytes() + bytes(padding)
    assert digest == digest_array(elements)
    assert os.listdir(path.parent) == ["0"]
    path.unlink()


def test_what_a_killed_save_was_writing_is_no_part_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "0.__lock").write_bytes(b"much longer than what is written")
    write_plain(str(tmp_path / "0"), np.zeros(3, np.uint8), 3, within=str(tmp_path), synced=True)
    assert (tmp_path / "0").read_bytes() == bytes(3) and os.listdir(tmp_path) == ["0"]


def test_large_leaves_of_any_strides_are_saved_in_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_files, "SLAB_BYTES", 1 << 16)
    whole = np.random.default_rng(2).integers(0, 99, (1031, 600), np.int32)
    state = {"w": whole, "t": whole.T, "s": whole[::2, 100:], "b": whole % 2 == 0}
    written: list[str] = []
    write = unit_files.write_plain

    def recorded(path: str, data: np.ndarray, nbytes: int, *, within: str, synced: bool) -> bytes:
        written.append(path.split("/")[-4])
        return write(path, data, nbytes, within=within, synced=synced)

    monkeypatch.setattr(unit_files, "write_plain", recorded)
    for threads in (1, 2):
        # Rows do not divide: the last chunk of each leaf is padded.
        options = xckpt.SaveOptions(chunk_bytes=1 << 19, threads=threads)
        xckpt.save(tmp_path / "c", state, options=options, overwrite=True)
        assert set(written) == set(state)
        written.clear()
        assert xckpt.open(tmp_path / "c").verify() == []
        loaded, group = xckpt.load(tmp_path / "c"), zarr.open_group(tmp_path / "c", mode="r")
        for name, array in state.items():
            np.testing.assert_array_equal(loaded[name], array)
            np.testing.assert_array_equal(np.asarray(group[name]), array)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", ["pwrite", "sync", "rename"])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, threads: int
) -> None:
    large = {"w": np.ones((600, 1000))}
    options = xckpt.SaveOptions(chunk_bytes=1 << 20, threads=threads)
    xckpt.save(tmp_path / "c", {"w": 1})

    real = getattr(os, call)

    def refuse(*arguments: object) -> object:
        if call == "rename" and not str(arguments[0]).endswith(".__lock"):
            return real(*arguments)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(plain_files if call == "sync" else plain_files.os, call, refuse)
        with pytest.raises(StorageError, match=r"w: .*No space left.*the disk is full"):
            xckpt.save(tmp_path / "c", large, options=options, overwrite=True)
    assert os.listdir(tmp_path) == ["c"]
    assert xckpt.load(tmp_path / "c") == {"w": 1}


@pytest.mark.parametrize("most", [1 << 20, 7])
def test_each_write_shows_that_the_rank_got_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Be it a whole slab or the part of one that the disk has taken."""
    moved: list[float] = []
    write = os.pwrite

    def pwrite(descriptor: int, content: memoryview, position: int) -> int:
        moved.append(WORK.get().moved)
        WORK.get().moved = 0.0
        return write(descriptor, content[:most], position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with (tmp_path / "chunk").open("wb") as file:
        assert plain_files.write_at(file.fileno(), memoryview(bytes(range(20))), 3) == 23
    moved.append(WORK.get().moved)
    assert all(moved[1:])
    assert (tmp_path / "chunk").read_bytes() == bytes(3) + bytes(range(20))
