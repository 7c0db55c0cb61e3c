"""zarr-python, which knows nothing of xckpt, reads what was saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import xckpt
import xckpt.zarr_dtypes  # registers bfloat16 and the other types that NumPy does not have
from tests.support.sharded_arrays import Sharded
from tests.support.states import LAYOUTS, arrays, everything, random_array, same
from xckpt.core.dtypes import DTYPES
from xckpt.storage.commit import staging


def read(node: object) -> np.ndarray:
    """A leaf as zarr-python reads it: one array, or a group of pieces with their offsets."""
    if isinstance(node, zarr.Array):
        return np.asarray(node[...])
    assert isinstance(node, zarr.Group)
    shape = tuple(node.attrs["shape"])  # type: ignore[arg-type]
    whole: np.ndarray | None = None
    for _, piece in node.arrays():
        data = np.asarray(piece[...])
        whole = np.empty(shape, data.dtype) if whole is None else whole
        offset: list[int] = piece.attrs["offset"]  # type: ignore[assignment]
        whole[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
    assert whole is not None
    return whole


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("consolidated", [True, False])
def test_every_leaf_is_read(tmp_path: Path, layout: str, consolidated: bool) -> None:
    state = everything()
    if consolidated:
        del state["half"]  # bfloat16, for which there would be no consolidated metadata.
    xckpt.save(tmp_path / "ckpt", state, options=LAYOUTS[layout])
    root = zarr.open_group(tmp_path / "ckpt", mode="r")
    assert (root.metadata.consolidated_metadata is not None) is consolidated
    for name, array in arrays().items():
        if name in state:
            assert same(read(root[name]), array), name
    pieces = state["pieces"]
    assert isinstance(pieces, Sharded) and pieces.array is not None
    assert same(read(root["pieces"]), pieces.array)
    assert same(read(root["nested/list/1/x"]), np.arange(3))
    assert bytes(read(root["note"])) == str(state["note"]).encode()
    if consolidated:
        assert sorted(root) == sorted({*arrays(), "pieces", "note", "nested"} - {"half"})
    assert "sharded" not in layout or root["even"].shards is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    state = {str(shape): random_array(shape, DTYPES[dtype]) for shape in [(), (7,), (5, 11)]}
    if dtype in ("int2", "int4", "float4_e2m1fn"):
        # Only the low bits of a byte count; zarr readers may see the others as they like.
        state = {
            name: (array.astype("float32")).astype(DTYPES[dtype]) for name, array in state.items()
        }
    xckpt.save(tmp_path / "ckpt", state, options=LAYOUTS["plain"])
    root = zarr.open_group(tmp_path / "ckpt", mode="r")
    for name, array in state.items():
        assert same(read(root[name]), array), name


def test_odd_names_are_read_by_their_paths(tmp_path: Path) -> None:
    state = {"a/b": 1, "zarr.json": 2, "..": 3, "ü": 4, "": 5, "__x": 6, "a.b": 7, 0: 8, "0": 9}
    xckpt.save(tmp_path / "ckpt", {key: np.full(2, n) for key, n in state.items()})
    root = zarr.open_group(tmp_path / "ckpt", mode="r")
    assert len(list(root)) == len(state)
    found = sorted(int(read(root[name])[0]) for name in root)
    assert found == sorted(state.values())


def test_a_root_that_is_an_array(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", np.arange(5))
    assert same(read(zarr.open_group(tmp_path / "ckpt", mode="r")["%root"]), np.arange(5))


@pytest.mark.parametrize("exchanges", [True, False])
def test_after_an_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """In place on local disks; in a generation's folder where folders cannot be exchanged."""
    if not exchanges:
        monkeypatch.setattr(staging, "can_exchange", lambda folder: False)
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.arange(5), "old": np.arange(3)})
    xckpt.save(path, {"w": np.arange(9)}, overwrite=True)
    root = zarr.open_group(path / xckpt.open(path).manifest.root, mode="r")
    assert list(root) == ["w"] and same(read(root["w"]), np.arange(9))
    assert (xckpt.open(path).manifest.root == "") is exchanges
