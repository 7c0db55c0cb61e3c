"""Arrays written without torch: torch loads them, bit for bit."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.arrays import filled, same_bits
from tests.support.examples import examples
from xckpt.core.dtypes import DTYPES
from xckpt.formats.torch_save.archive import Archive, Where
from xckpt.formats.torch_save.values import MappedTensor
from xckpt.formats.torch_save.write import SAVED_DTYPES, write_saved
from xckpt.torch.leaf import to_numpy, torch_dtype


@examples(60)
@given(
    dtype=st.sampled_from(sorted(SAVED_DTYPES)),
    shape=st.lists(st.integers(0, 5), max_size=4),
    turned=st.booleans(),
)
def test_torch_loads_it_and_so_do_we(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, shape: list[int], turned: bool
) -> None:
    path = tmp_path_factory.mktemp("saved") / "w.pt"
    array = filled(dtype, shape).T if turned else filled(dtype, shape)
    write_saved(path, array)
    for mapped in (False, True):
        tensor = torch.load(path, weights_only=True, mmap=mapped)
        assert tensor.is_contiguous() and same_bits(to_numpy(tensor), array)
    found = Archive.open(path.parent, Where(path.name, 0, path.stat().st_size)).value()
    assert isinstance(found, MappedTensor)
    assert found.position % 64 == 0 and same_bits(found.array(), array)


@pytest.mark.parametrize("size", [127, 128, 255, 256, 32767, 32768, 65536, 1 << 23])
def test_numbers_of_any_length(tmp_path: Path, size: int) -> None:
    """Sizes around where a number takes a byte more."""
    array = np.zeros((2, size), np.uint8)
    array[1] = 1
    write_saved(tmp_path / "w.pt", array)
    loaded = torch.load(tmp_path / "w.pt")
    assert loaded.shape == (2, size) and loaded.sum(1).tolist() == [0, size]


def test_the_checksums_are_right(tmp_path: Path) -> None:
    write_saved(tmp_path / "w.pt", np.arange(1000))
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() is None


def test_what_torch_can_save() -> None:
    named = {name for name in DTYPES if torch_dtype(name) is not None}
    assert named - {"int2", "int4"} == SAVED_DTYPES


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_saved(tmp_path / "w.pt", np.arange(3))
    write_saved(tmp_path / "w.pt", np.arange(5))
    assert torch.load(tmp_path / "w.pt").tolist() == [0, 1, 2, 3, 4]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_saved(tmp_path / "w.pt", np.arange(7))
    assert [path.name for path in tmp_path.iterdir()] == ["w.pt"]
    assert torch.load(tmp_path / "w.pt").tolist() == [0, 1, 2, 3, 4]
