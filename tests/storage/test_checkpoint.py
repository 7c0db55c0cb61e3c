"""An open checkpoint: a mapping of stored arrays that slice as NumPy's do."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.states import LAYOUTS, everything, expected, same
from xckpt.storage.stored_array import StoredArray

keys_of = st.one_of(
    st.integers(-9, 8),
    st.builds(
        slice,
        st.none() | st.integers(-12, 12),
        st.none() | st.integers(-12, 12),
        st.none() | st.sampled_from([1, 2, 3, 4, -1, -2, -5]),
    ),
    st.just(...),
)

SLICED = {
    "plain": np.arange(9 * 5 * 7, dtype=np.int32).reshape(9, 5, 7),
    "line": np.arange(9).astype(ml_dtypes.bfloat16),
    "scalar": np.array(4.5),
    "empty": np.zeros((9, 0, 2)),
}


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> xckpt.Checkpoint:
    path = tmp_path_factory.mktemp("sliced") / "ckpt"
    options = xckpt.SaveOptions(chunk_bytes=70, shard_bytes=300)
    xckpt.save(path, SLICED | {"pieces": everything()["pieces"]}, options=options)
    return xckpt.open(path)


@given(name=st.sampled_from(sorted([*SLICED, "pieces"])), index=st.lists(keys_of, max_size=4))
def test_stored_arrays_slice_as_numpy_does(sliced, name: str, index: list[object]) -> None:
    array = {**expected(everything()), **SLICED}[name]
    stored = sliced[name]
    for key in (tuple(index), index[0] if len(index) == 1 else tuple(index)):
        try:
            wanted = array[key]
        except IndexError:
            with pytest.raises(IndexError):
                stored[key]
        else:
            assert same(stored[key], np.asarray(wanted))


def test_stored_arrays_refuse_other_indices(sliced) -> None:
    for key in ([0, 9], [[0, 1]], np.array([True] * 8), None, 1.5, "a", True, (..., ...)):
        with pytest.raises(IndexError):
            sliced["plain"][key]
    assert sliced["plain"][np.int64(3)].shape == (5, 7)
    with pytest.raises(KeyError, match="no leaf"):
        sliced["nothing"]


def test_a_slice_reads_just_its_chunks(tmp_path: Path) -> None:
    array = np.arange(1000, dtype=np.int64).reshape(100, 10)
    xckpt.save(tmp_path / "ckpt", {"w": array}, options=xckpt.SaveOptions(chunk_bytes=800))
    chunks = sorted((tmp_path / "ckpt" / "w" / "c").rglob("*/0"))
    assert len(chunks) == 10
    for chunk in chunks[1:]:
        chunk.unlink()
    stored = xckpt.open(tmp_path / "ckpt")["w"]
    assert isinstance(stored, StoredArray)
    assert same(stored[2:9, 3], array[2:9, 3])
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"w: \[10, 20\) x \[0, 10\)"):
        stored[2:11]


def test_an_open_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    state = everything()
    saved = xckpt.save(tmp_path / "ckpt", state, metadata={"a": 1})
    checkpoint = xckpt.open(tmp_path / "ckpt")
    names = [*list(state)[:-1], "nested/list/0", "nested/list/1/x", "nested/%30"]
    assert sorted(checkpoint) == sorted(names) == sorted(saved.state_dict_metadata)
    assert len(checkpoint) == len(names) and "step" in checkpoint and "nope" not in checkpoint
    assert checkpoint["note"] == state["note"] and checkpoint["nothing"] is None
    tree = checkpoint.tree
    assert isinstance(tree, dict) and list(tree) == list(state)
    np.testing.assert_array_equal(np.asarray(tree["nested"]["list"][1]["x"]), [0, 1, 2])
    pieces = checkpoint["pieces"]
    assert isinstance(pieces, StoredArray)
    assert (pieces.regular, pieces.chunks, len(pieces.pieces)) == (False, None, 4)
    even = checkpoint["even"]
    assert isinstance(even, StoredArray) and even.regular and even.chunks == (16, 16)
    assert repr(checkpoint).startswith("<Checkpoint ")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_that_was_replaced_is_not_called_damaged(tmp_path: Path, layout: str) -> None:
    state = {"w": np.arange(1000), "v": np.arange(1000), "note": "x" * 5000}
    xckpt.save(tmp_path / "ckpt", state, options=LAYOUTS[layout])
    opened = xckpt.open(tmp_path / "ckpt")
    stored = opened["w"]
    assert isinstance(stored, StoredArray) and stored[3] == 3
    other = {"w": np.arange(1, 1001), "v": np.zeros(1000, int), "note": "y" * 5000}
    xckpt.save(tmp_path / "ckpt", other, overwrite=True, options=LAYOUTS[layout])
    slices = (lambda: stored[...], lambda: opened["v"][...])  # type: ignore[index]
    for read in (*slices, lambda: opened["note"], opened.verify):
        with pytest.raises(xckpt.StorageError, match="was replaced or removed while it was read"):
            read()
    shutil.rmtree(tmp_path / "ckpt")
    for read in (slices[0], opened.verify):
        with pytest.raises(xckpt.CheckpointReplacedError, match="or this host does not see"):
            read()
