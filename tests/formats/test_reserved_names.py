"""Leaves with names that a format or xckpt itself uses: what is written can be loaded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

import xckpt
from xckpt.convert import convert

NAMES = [
    "xckpt.json",
    "xckpt.saving",
    "xckpt.packs",
    "zarr.json",
    ".generations",
    ".metadata",
    "commit_success.txt",
    "model.safetensors.index.json",
]
STATES: dict[str, dict[str, object]] = {
    **{name: {name: np.arange(3), "b": np.arange(4.0)} for name in NAMES},
    **{f"{name} above": {name: {"a": np.arange(3)}, "b": np.arange(4.0)} for name in NAMES},
    "empty": {"": np.arange(3), "b": np.arange(4.0)},
    "empty beside a number": {"": np.arange(3), "b": 1},
    "empty alone": {"": np.arange(3)},
    "a number of an empty key": {"": 1, "b": np.arange(3)},
    "a number of the name with dots": {"a": {"b": np.arange(3)}, "a.b": 1},
    "a number below the name with dots": {"a": {"b": np.arange(3)}, "a.b": {"c": 1}},
}


@pytest.mark.parametrize("format", ["safetensors", "orbax", "dcp"])
@pytest.mark.parametrize("name", STATES)
def test_what_is_written_is_loaded(tmp_path: Path, name: str, format: str) -> None:
    """What cannot be is refused before anything is written."""
    state, path = STATES[name], tmp_path / "made"
    target = path.with_suffix(".safetensors") if format == "safetensors" else path
    xckpt.save(tmp_path / "saved", state)
    try:
        convert(tmp_path / "saved", target, format=format)
    except xckpt.UnsupportedLeafError:
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]
        return
    xckpt.load(target)  # the names make a tree
    assert len(xckpt.open(target)) == len(xckpt.open(tmp_path / "saved"))
    found, saved = (stored(place) for place in (target, tmp_path / "saved"))
    assert len(found) == len(saved)
    for one, other in zip(found, saved, strict=True):
        assert_array_equal(one, other)


def stored(path: Path) -> list[NDArray[np.generic]]:
    """The arrays of a checkpoint, the shortest first."""
    leaves = xckpt.open(path).values()
    return sorted((leaf[...] for leaf in leaves if isinstance(leaf, xckpt.StoredArray)), key=len)
