"""Local zarr shards: the bytes that TensorStore writes, read at the chunks that are wanted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.geometry.box import Box
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.geometry.shards import inner
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.array import digest_array
from xckpt.storage.chunks import plain_files
from xckpt.storage.chunks.chunk import ChunkSource
from xckpt.storage.chunks.requests import chunks_of
from xckpt.storage.chunks.shards.files import open_in_shard, sealed, write_shard

W = np.random.default_rng(0).integers(0, 1 << 16, (96, 80), np.uint16)
STATE = {"w": W, "bools": W > 1 << 15, "columns": W.T, "edge": W[:91, :77]}
OPTIONS = xckpt.SaveOptions(chunk_bytes=96 * 80 * 2, readers=4)


@pytest.fixture(scope="module", autouse=True)
def small_shards():
    """Chunks of some hundred bytes in shards of some thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inner, "LEAST_SHARD", 1 << 10)
        patch.setattr(inner, "LEAST_CHUNK", 1 << 9)
        patch.setattr(inner, "LEAST_ROW", 1 << 4)
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory, small_shards) -> Path:
    path = tmp_path_factory.mktemp("shards") / "c"
    xckpt.save(path, STATE, options=OPTIONS)
    return path


@pytest.fixture
def path(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "c"))


def _array(path: Path, leaf: str = "w") -> ZarrArray:
    (array,) = xckpt.open(path).chunk_source.arrays[leaf]
    return array


@pytest.mark.parametrize("leaf", STATE)
def test_a_shard_is_what_tensorstore_writes(saved: Path, leaf: str, tmp_path: Path) -> None:
    opened = ts.open({"driver": "zarr3", "kvstore": f"file://{saved}/{leaf}/"}).result()
    spec = opened.spec(retain_context=False).to_json()
    spec["kvstore"], spec["create"] = f"file://{tmp_path}/", True
    spec["store_data_equal_to_fill_value"] = True
    ts.open(spec).result().write(np.ascontiguousarray(STATE[leaf])).result()
    names = [
        name.relative_to(saved / leaf) for name in (saved / leaf / "c").rglob("*") if name.is_file()
    ]
    assert names and _array(saved, leaf).shard is not None
    for name in names:
        assert (saved / leaf / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_zarr_and_xckpt_read_them(saved: Path) -> None:
    loaded = xckpt.load(saved)
    for leaf, array in STATE.items():
        np.testing.assert_array_equal(zarr.open_array(saved, path=leaf, mode="r")[:], array)
        np.testing.assert_array_equal(loaded[leaf], array)
    assert not xckpt.open(saved).verify()


@given(
    st.tuples(st.integers(0, 90), st.integers(1, 91)),
    st.tuples(st.integers(0, 76), st.integers(1, 77)),
    st.sampled_from(list(STATE)),
)
@examples(50)
def test_any_slice_is_numpys(saved: Path, rows, columns, leaf) -> None:
    at = tuple(slice(low, low + size) for low, size in (rows, columns))
    np.testing.assert_array_equal(xckpt.open(saved).array(leaf)[at], STATE[leaf][at])


@given(st.data())
@examples(50)
def test_any_shard_any_slabs(tmp_path_factory, data) -> None:
    """Any sizes, strides and slabs: each chunk is read as it was, and its digest is that."""
    rank = data.draw(st.integers(1, 3))
    chunk = tuple(data.draw(st.integers(1, 5)) for _ in range(rank))
    shard = tuple(step * data.draw(st.integers(1, 3)) for step in chunk)
    sizes = tuple(data.draw(st.integers(1, size)) for size in shard)
    array = ZarrArray("w", 0, "int32", (0,) * rank, sizes, chunk, shard)
    order = data.draw(st.permutations(range(rank)))
    elements = np.arange(np.prod(sizes), dtype=np.int32).reshape([sizes[d] for d in order])
    elements = elements.transpose(np.argsort(order))
    folder = tmp_path_factory.mktemp("any")
    file = str(folder / "shard")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_files, "SLAB_BYTES", data.draw(st.sampled_from([8, 64, 1 << 20])))
        digests = write_shard(file, elements, array, within=str(folder), synced=False)
    chunks = list(chunks_of(array))
    assert len(digests) == len(chunks)
    for each, digest in zip(chunks, digests, strict=True):
        expected = np.ascontiguousarray(elements[each.box.slices()])
        assert digest == digest_array(expected)
        if each.box.sizes == chunk:
            opened, got = open_in_shard(file, array, each.box), np.empty(chunk, np.int32)
            opened.fill(got)
            opened.close()
            np.testing.assert_array_equal(got, expected)


def test_no_more_is_read_than_the_chunks_that_are_wanted(saved: Path, monkeypatch) -> None:
    """A column's chunks and the index, not the shards."""
    monkeypatch.setattr(ChunkSource, "_open", None)  # TensorStore is not asked
    stored = xckpt.open(saved)
    np.testing.assert_array_equal(stored.array("w")[:, 3:5], W[:, 3:5])
    array = _array(saved)
    assert array.chunk[1] < array.shape[1]
    assert stored.chunk_source.bytes_read == 96 * array.chunk[1] * 2


def _shards_of(path: Path) -> list[Path]:
    return sorted(name for name in (path / "w" / "c").rglob("*") if name.is_file())


def _refused(path: Path, *says: str) -> None:
    texts: list[str] = [str(problem) for problem in xckpt.open(path).verify()]
    assert texts
    for read in (lambda: xckpt.load(path), lambda: xckpt.open(path).array("w")[...]):
        with pytest.raises(CorruptCheckpointError) as caught:
            read()
        texts.append(str(caught.value))
    for text in texts:
        assert text.startswith("w:") and all(word in text for word in says), text


@pytest.mark.parametrize("length", [0, 3, 100, -1, -100])
def test_a_short_shard_is_refused(path: Path, length: int) -> None:
    file = _shards_of(path)[0]
    os.truncate(file, length if length >= 0 else file.stat().st_size + length)
    _refused(path)


def test_a_long_shard_is_refused(path: Path) -> None:
    with _shards_of(path)[0].open("ab") as file:
        file.write(b"\0")
    _refused(path)


def test_a_missing_shard_is_refused(path: Path) -> None:
    _shards_of(path)[0].unlink()
    _refused(path, "missing")


def _with_index(path: Path, change) -> None:
    array, file = _array(path), _shards_of(path)[0]
    content = file.read_bytes()
    assert array.shard is not None
    count = int(np.prod(array.shard) // np.prod(array.chunk))
    entries = np.frombuffer(content[-count * 16 - 4 : -4], "<u8").reshape(-1, 2).copy()
    change(entries)
    file.write_bytes(content[: -count * 16 - 4] + sealed(entries.tobytes()))


def test_a_swapped_index_is_refused_by_digests(path: Path) -> None:
    def swap(entries):
        entries[[0, 1]] = entries[[1, 0]]

    _with_index(path, swap)
    _refused(path, "digest")


def test_overlapping_chunks_are_refused(path: Path) -> None:
    def overlap(entries):
        entries[1, 0] -= 2

    _with_index(path, overlap)
    _refused(path, "overlap")


def test_an_index_that_is_damaged_is_refused(path: Path) -> None:
    file = _shards_of(path)[0]
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    _refused(path, "index")


def test_chunks_in_another_order_are_read(path: Path) -> None:
    """As another writer may have put them."""
    array, file = _array(path), _shards_of(path)[0]
    size = int(np.prod(array.chunk)) * 2
    content = bytearray(file.read_bytes())
    content[:size], content[size : 2 * size] = content[size : 2 * size], content[:size]
    file.write_bytes(content)

    def swap(entries):
        entries[[0, 1]] = entries[[1, 0]]

    _with_index(path, swap)
    np.testing.assert_array_equal(xckpt.load(path)["w"], W)
    assert not xckpt.open(path).verify()


def test_a_flipped_bit_of_any_chunk_is_found(path: Path) -> None:
    array, file = _array(path), _shards_of(path)[0]
    size = int(np.prod(array.chunk)) * 2
    content = file.read_bytes()
    boxes = [each.box for each in chunks_of(array)]
    for number in range(3):
        damaged = bytearray(content)
        damaged[number * size + 5] ^= 4
        file.write_bytes(damaged)
        with pytest.raises(CorruptCheckpointError, match="digest"):
            xckpt.open(path).array("w")[boxes[number].slices()]
        other = Box.whole(boxes[(number + 1) % 3].sizes).slices()
        assert other
        at = boxes[(number + 1) % 3].slices()
        np.testing.assert_array_equal(xckpt.open(path).array("w")[at], W[at])
