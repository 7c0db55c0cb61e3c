"""Boxes of tensors in files: NumPy's strides and slices are the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.formats.arrays import boxes, filled, same_bits
from tests.support.tilings import Box, region
from xckpt.formats import strided_ranges
from xckpt.formats.strided_ranges import FileTensor, row_major, write_box
from xckpt.storage.foreign.files import OpenFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranges")


@given(
    boxes(),
    st.permutations(range(4)),
    st.sampled_from(["bool", "bfloat16", "float32", "complex128"]),
    st.integers(1, 3),
    st.sampled_from([16, 4096]),
)
def test_a_box_of_any_strides(
    folder: Path,
    case: tuple[tuple[int, ...], Box],
    order: list[int],
    dtype: str,
    step: int,
    most: int,
) -> None:
    """The tensor is every ``step``-th element of a transposed array, read into such memory too."""
    shape, box = case
    axes = [axis for axis in order if axis < len(shape)]
    dense = filled(
        dtype, [shape[axis] for axis in axes[:-1]] + [shape[a] * step for a in axes[-1:]]
    )
    tensor = dense[..., ::step] if shape else dense
    tensor = tensor.transpose(np.argsort(axes)) if shape else tensor
    path = folder / "tensor"
    path.write_bytes(b"before!" + dense.tobytes())
    strides = tuple(s // tensor.itemsize for s in tensor.strides)
    stored = FileTensor(OpenFile(path), 7, tensor.dtype, shape, strides)
    every_other = (..., *(slice(None, None, 2) for _ in shape))
    into = np.zeros([n * 2 for n in box[1]], tensor.dtype)[every_other]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided_ranges, "SCRATCH_BYTES", most)
        stored.read(box[0], into)
    assert same_bits(into, tensor[region(box)].reshape(box[1]))


@given(boxes(), st.sampled_from(["bool", "float8_e4m3fn", "float32"]))
def test_a_box_is_written_where_it_belongs(
    folder: Path, case: tuple[tuple[int, ...], Box], dtype: str
) -> None:
    shape, box = case
    whole, part = filled(dtype, shape, 1), filled(dtype, box[1], 2)
    path = folder / "written"
    path.write_bytes(b"before" + whole.tobytes() + b"after")
    file = OpenFile(path, write=True)
    write_box(file, 6, shape, box[0], np.array(part, order="F"))
    file.close()
    whole = whole.copy()
    whole[region(box)] = part if shape else part[()]
    assert path.read_bytes() == b"before" + whole.tobytes() + b"after"


@pytest.mark.parametrize("worth, far", [(251, (64, 4)), (252, (16, 1024))])
def test_what_few_calls_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, worth: int, far: tuple[int, int]
) -> None:
    """Whole rows in one call, columns in stretches; far ones row by row if gaps cost more."""
    path = folder / "matrix"
    matrix = np.arange(64 * 64, dtype=np.int32).reshape(64, 64)
    path.write_bytes(matrix.tobytes())
    monkeypatch.setattr(strided_ranges, "SCRATCH_BYTES", 64 * 16)
    monkeypatch.setattr(strided_ranges, "CALL_BYTES", worth)
    file = OpenFile(path)
    reads: list[int] = []
    real = OpenFile.read_into

    def counted(self: OpenFile, position: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        real(self, position, buffer)

    monkeypatch.setattr(OpenFile, "read_into", counted)
    tensor = FileTensor(file, 0, matrix.dtype, (64, 64), row_major((64, 64)))
    for columns, calls, most in [(64, 1, 64 * 256), (32, 16, 1024), (1, *far)]:
        into = np.zeros((64, columns), np.int32)
        tensor.read((0, 0), into)
        assert np.array_equal(into, matrix[:, :columns])
        assert len(reads) == calls and max(reads) <= most
        reads.clear()


def test_a_file_that_was_cut_off_meanwhile(folder: Path) -> None:
    path = folder / "cut"
    path.write_bytes(bytes(100))
    tensor = FileTensor(OpenFile(path), 0, np.dtype("u1"), (100,), (1,))
    path.write_bytes(bytes(60))
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"cut is truncated: .* \[50, 90\)"):
        tensor.read((50,), np.zeros(40, np.uint8))
