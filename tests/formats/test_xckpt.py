"""A checkpoint as a source: any box, as NumPy slices it, verified and read once."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.errors import CorruptCheckpointError, MappingError
from xckpt.formats.source import TensorSource
from xckpt.formats.xckpt import XckptSource
from xckpt.mapping.spec import TensorSpec

W = np.arange(13 * 7 * 3, dtype=np.int16).reshape(13, 7, 3)


@pytest.fixture(scope="module")
def source() -> XckptSource:
    options = xckpt.SaveOptions(chunk_bytes=64)
    state = {"w": W, "layers": [{"b": np.ones(3, np.float32)}], "step": 7, "empty": np.ones((0, 2))}
    # A worker may make it twice, with tests of other modules between.
    xckpt.save(
        "memory://sources", state, metadata={"format": "pt"}, options=options, overwrite=True
    )
    return XckptSource("memory://sources")


def test_it_is_a_source_and_says_what_it_holds(source: XckptSource) -> None:
    assert isinstance(source, TensorSource)
    assert source.specs["w"] == TensorSpec((13, 7, 3), "int16")
    assert set(source.specs) == {"w", "layers/0/b", "empty"}
    assert source.values == {"step": 7}
    assert source.metadata == {"format": "pt"}
    assert prod(source.chunks("w")) <= 32


@given(data=st.data())
@examples(60)
def test_a_box_is_what_numpy_slices(source: XckptSource, data: st.DataObject) -> None:
    low = [data.draw(st.integers(0, n)) for n in W.shape]
    high = [data.draw(st.integers(a, n)) for a, n in zip(low, W.shape, strict=True)]
    axes = data.draw(st.permutations(range(3)))
    sizes = tuple(b - a for a, b in zip(low, high, strict=True))
    memory = np.zeros([sizes[axis] for axis in axes], np.int16)
    into = memory.transpose(np.argsort(axes))
    source.read("w", ChunkStorageMetadata(tuple(low), sizes), into)
    region = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    np.testing.assert_array_equal(into, W[region])


def test_a_box_reads_the_chunks_that_it_touches_once() -> None:
    rows = np.arange(64 * 8, dtype=np.int64).reshape(64, 8)
    xckpt.save("memory://rows", {"w": rows}, options=xckpt.SaveOptions(chunk_bytes=1 << 9))
    source = XckptSource("memory://rows")
    assert source.chunks("w") == (8, 8)
    into = np.empty((16, 8), np.int64)
    source.read("w", ChunkStorageMetadata((8, 0), (16, 8)), into)
    assert source.bytes_read == into.nbytes


def test_two_leaves_of_one_mapping_name_are_refused() -> None:
    xckpt.save("memory://twins", {"a": {0: np.ones(1), "0": np.ones(1)}})
    with pytest.raises(MappingError, match=r"a/0: a/0 and a/%30 are two leaves"):
        XckptSource("memory://twins")


def test_damage_is_noticed_and_located(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"w": W}, options=xckpt.SaveOptions(chunk_bytes=1 << 20))
    before = XckptSource(tmp_path / "c").identity()
    [chunk] = (tmp_path / "c" / "w" / "c").rglob("0/0/0")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match=r"w: \[0, 13\) x \[0, 7\)"):
        XckptSource(tmp_path / "c").read(
            "w", ChunkStorageMetadata((0, 0, 0), (1, 1, 1)), np.empty((1, 1, 1), np.int16)
        )
    assert XckptSource(tmp_path / "c").identity() == before
    xckpt.save(tmp_path / "c", {"w": W + 1}, overwrite=True)
    assert XckptSource(tmp_path / "c").identity() != before
