"""zarr arrays for, and from, other libraries: NumPy and zarr-python are the oracles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from tests.support.tilings import region, shapes
from xckpt.core.manifest.entries import array_metadata
from xckpt.errors import CorruptCheckpointError
from xckpt.storage.foreign.documents import Allowance
from xckpt.storage.foreign.zarr_arrays import ZarrFolder


@examples(20, 400)
@given(st.data())
def test_boxes_of_chunks_in_and_any_boxes_out(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = data.draw(shapes(max_rank=3))
    chunk = tuple(data.draw(st.integers(1, max(1, n))) for n in shape)
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    root = tmp_path_factory.mktemp("zarr")
    folder = ZarrFolder(root)
    stored = folder.create("a/w", "int32", shape, chunk)
    assert stored.chunk == chunk
    for index in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunk, strict=True))):
        low = tuple(i * c for i, c in zip(index, chunk, strict=True))
        part = array[tuple(slice(a, a + c) for a, c in zip(low, chunk, strict=True))]
        stored.write(low, np.asarray(part))
    low = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = (low, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, low, strict=True)))
    into = np.full(box[1], -1, np.int32)
    folder.open("a/w", version=3).read(low, into)
    assert np.array_equal(into, array[region(box)].reshape(box[1]))
    assert np.array_equal(np.asarray(zarr.open_array(root / "a" / "w", mode="r")[...]), array)


def test_what_is_there_is_opened_or_refused(tmp_path: Path) -> None:
    folder = ZarrFolder(tmp_path)
    folder.create("w", "int32", (4,), (2,)).write((0,), np.arange(4, dtype=np.int32))
    again = folder.create("w", "int32", (4,), (2,))
    into = np.zeros(4, np.int32)
    again.read((0,), into)
    assert into.tolist() == [0, 1, 2, 3]
    for dtype, shape, chunk in [("int8", (4,), (2,)), ("int32", (5,), (2,)), ("int32", (4,), (4,))]:
        with pytest.raises(xckpt.StorageError, match="w: "):
            folder.create("w", dtype, shape, chunk)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"there is no zarr\.json"):
        folder.open("v", version=3)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"there is no \.zarray"):
        folder.open("w", version=2)


def test_a_missing_chunk_is_an_error_unless_it_stands_for_zeros(tmp_path: Path) -> None:
    ZarrFolder(tmp_path).create("w", "int32", (4,), (2,)).write((0,), np.ones(2, np.int32))
    into = np.full(4, -1, np.int32)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"w: \[0, 4\)"):
        ZarrFolder(tmp_path).open("w", version=3).read((0,), into)
    ZarrFolder(tmp_path, fill_missing=True).open("w", version=3).read((0,), into)
    assert into.tolist() == [1, 1, 0, 0]


def test_a_name_never_leads_out(tmp_path: Path) -> None:
    ZarrFolder(tmp_path / "out").create("w", "int32", (1,), (1,))
    folder = ZarrFolder(tmp_path / "in")
    for name in ("../out/w", "/etc", "a/../../out/w"):
        with pytest.raises(xckpt.XckptError):
            folder.open(name, version=3)
        with pytest.raises(xckpt.XckptError):
            folder.create(name, "int32", (1,), (1,))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("chunk", [1 << 27, 1 << 50])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_an_array_that_is_huge_by_its_shape_alone_is_refused(
    tmp_path: Path, version: int, chunk: int, ocdbt: bool
) -> None:
    """Missing chunks are zeros: 300 bytes can claim a pebibyte."""
    if version == 2:
        document = {
            "zarr_format": 2, "shape": [1 << 50], "chunks": [chunk], "dtype": "<f4",
            "compressor": None, "fill_value": 0, "order": "C", "filters": None,
        }  # fmt: skip
        key = "w/.zarray"
    else:
        document = array_metadata("float32", (1 << 50,), (chunk,), None, ())
        key = "w/zarr.json"
    folder = ZarrFolder(tmp_path, ocdbt=ocdbt, fill_missing=True)
    folder._root.write(key, json.dumps(document).encode()).result()
    for stored in (False, True):
        if stored:
            folder._root.write("w/c/0" if version == 3 else "w/0", b"\0" * 64).result()
        with pytest.raises(CorruptCheckpointError, match=r"4.0 PiB|4096.0 TiB"):
            folder.open("w", version=version)
    small = array_metadata("float32", (1 << 30,), (1 << 20,), None, ())
    folder._root.write("v/zarr.json", json.dumps(small).encode()).result()
    into = np.ones(3, np.float32)
    folder.open("v", version=3).read((5,), into)
    assert not into.any()


def test_a_chunk_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    """TensorStore would end the process: a few bytes can claim any chunk, a sparse file be it."""
    folder = ZarrFolder(tmp_path, memory=Allowance(1 << 50))
    document = array_metadata("float32", (1 << 45,), (1 << 45,), None, ())
    folder._root.write("w/zarr.json", json.dumps(document).encode()).result()
    words = (
        r"/w: a chunk of \(35184372088832,\) is decoded as one and takes 128.0 TiB, more than half"
    )
    with pytest.raises(xckpt.LeafTooLargeError, match=words):
        folder.open("w", version=3)
