"""The demo itself: it passes, and its verdict can fail."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import xckpt
from examples.record import Record, same
from xckpt.convert import convert

ROOT = Path(__file__).parents[2]


def floats(*values):
    return np.array(values, dtype=np.float32)


def test_record_names_each_leaf_that_is_not_as_recorded():
    tensors = {
        "a": floats(1.0, 0.0),
        "b": np.arange(3),
        "c": np.ones((2, 3)),
        "d": np.ones(()),
    }
    record = Record(tensors, {"lr": 0.5, "fused": None})
    state = tensors | {"lr": 0.5, "fused": None}
    assert record.differences(state) == []
    assert record.differences(state | {"a": floats(1.0, -0.0)}) == ["a"]
    assert record.differences(state | {"b": np.arange(3.0)}) == ["b"]
    assert record.differences(state | {"c": np.ones((3, 2)), "d": np.ones(1)}) == ["c", "d"]
    assert record.differences(state | {"lr": 1, "fused": False, "new": 0}) == ["fused", "lr", "new"]
    assert record.differences({k: v for k, v in state.items() if k != "b"}) == ["b"]


def test_a_record_comes_back_from_its_files_as_it_was(tmp_path):
    record = Record({}, {})
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {"a/b.c": matrix.T, "n": np.array(7.0), "lr": 0.1, "x": None}
    for name, leaf in state.items():
        record.add(name, leaf)
    record.write(tmp_path / "record")
    assert Record.read(tmp_path / "record").differences(state) == []


def output(demo, keep):
    """What a demo prints that passes."""
    run = subprocess.run(
        [sys.executable, "-m", f"examples.{demo}", "--keep", str(keep)],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def read(node):
    """A leaf as zarr-python alone reads it: one array, or a group of pieces with offsets."""
    if isinstance(node, zarr.Array):
        return np.asarray(node[...])
    whole = np.full(node.attrs["shape"], np.nan, dtype=np.float32)
    for piece in node.array_values():
        offset = piece.attrs["offset"]
        box = tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))
        whole[box] = piece[...]
    return whole


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_demo_of_a_run_ends_where_an_uninterrupted_one_does(tmp_path):
    printed = output("demo_run", tmp_path)
    assert printed.count("PASS") == 4 and "FAIL" not in printed
    # The step that was damaged is named, each time that it is passed over.
    assert printed.count("  skipped step ") == 2
    # The frozen model is stored once in a root.
    for root in ("straight", "run", "elsewhere"):
        files = [path.stat() for path in (tmp_path / root).rglob("*") if path.is_file()]
        assert sum({f.st_ino: f.st_size for f in files}.values()) < sum(f.st_size for f in files)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_demo_passes_and_zarr_reads_both_its_checkpoints(tmp_path):
    printed = output("demo", tmp_path)
    assert printed.count("PASS") == 6
    assert "FAIL" not in printed

    recorded = Record.read(tmp_path / "record-at-save").tensors
    for checkpoint in ("saved-by-torch", "saved-by-jax"):
        plain = tmp_path / f"{checkpoint}-plain"  # the small leaves lie in packs
        convert(tmp_path / checkpoint, plain, options=xckpt.SaveOptions(pack_bytes=0))
        root = zarr.open_group(str(plain), mode="r")
        assert [name for name in recorded if not same(read(root[name]), recorded[name])] == []
