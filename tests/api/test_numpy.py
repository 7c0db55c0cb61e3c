"""NumPy arrays of every dtype, shape and memory layout, saved and loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

import xckpt
from tests.support.states import LAYOUTS, random_array, same
from xckpt.core.dtypes import DTYPES

SHAPES = [(), (1,), (0,), (7,), (3, 0, 2), (13, 11), (2, 3, 5), (1, 1, 1, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    state = {str(shape): random_array(shape, DTYPES[dtype]) for shape in SHAPES}
    xckpt.save(tmp_path / "ckpt", state, options=LAYOUTS["plain"])
    assert same(xckpt.load(tmp_path / "ckpt"), state)
    assert xckpt.open(tmp_path / "ckpt").verify() == []


def strange_arrays() -> Iterator[tuple[str, NDArray[np.generic]]]:
    base = np.arange(720, dtype=np.float64).reshape(24, 30)
    yield "transposed", base.T
    yield "fortran", np.asfortranarray(base)
    yield "strided", base[::2, ::3]
    yield "backwards", base[::-1, ::-2]
    yield "cut out", base[3:20, 5:11]
    yield "repeated", np.broadcast_to(base[:, :1], (24, 40))
    yield "big-endian", base.astype(">f8")
    yield "big-endian strided", base.astype(">f8")[1::2, ::-1]
    yield "big-endian scalar", np.array(7, ">i4")
    yield "misaligned", np.arange(81, dtype=np.uint8)[1:].view(np.int64)
    frozen = base.copy()
    frozen.flags.writeable = False
    yield "read-only", frozen
    yield "odd bools", np.arange(9, dtype=np.uint8).view(np.bool_)


def test_a_target_whose_elements_share_memory_is_refused() -> None:
    xckpt.save("memory://shared-target", {"w": np.ones((9, 3))}, overwrite=True)
    windows = sliding_window_view(np.zeros(11), 3, writeable=True)
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"w: .* share memory; load into a copy"):
        xckpt.load_into("memory://shared-target", {"w": windows})


@pytest.mark.parametrize("name, array", list(strange_arrays()))
@pytest.mark.parametrize("chunk_bytes", [100, 8 << 20])
def test_however_an_array_lies_in_memory(name: str, array, chunk_bytes: int) -> None:
    before = np.array(array).tobytes()
    options = xckpt.SaveOptions(chunk_bytes=chunk_bytes)
    xckpt.save("memory://strange", {"w": array}, overwrite=True, options=options)
    loaded = xckpt.load("memory://strange")["w"]
    assert loaded.dtype == array.dtype.newbyteorder("=")
    like = xckpt.load("memory://strange", {"w": array})["w"]
    assert like.dtype == array.dtype  # whatever its byte order
    for new in (loaded, like):
        assert new.flags.c_contiguous and new.flags.writeable
        np.testing.assert_array_equal(new, array)
    assert np.array(array).tobytes() == before


@pytest.mark.parametrize("name, array", list(strange_arrays()))
@pytest.mark.parametrize("chunk_bytes", [100, 8 << 20])
def test_however_a_target_lies_in_memory(name: str, array, chunk_bytes: int) -> None:
    target = np.asarray(array)
    values = np.array(array)
    options = xckpt.SaveOptions(chunk_bytes=chunk_bytes)
    xckpt.save("memory://target", {"w": values}, overwrite=True, options=options)
    if not target.flags.writeable:
        with pytest.raises(xckpt.UnsupportedLeafError, match=r"w: .* cannot be filled in place"):
            xckpt.load_into("memory://target", {"w": array})
        return
    base = target if target.base is None else target.base
    untouched = np.array(base)
    target[...] = 0
    xckpt.load_into("memory://target", {"w": target})
    np.testing.assert_array_equal(target, values)
    if name not in ("odd bools",):
        np.testing.assert_array_equal(np.asarray(base), untouched)


SCALARS = [np.float64(0.1), np.float32(3), np.bool_(True), np.int8(-3), np.complex64(1j)]


@pytest.mark.parametrize(
    "scalar", [*SCALARS, ml_dtypes.bfloat16(1.5)], ids=lambda scalar: str(scalar.dtype)
)
def test_a_scalar_comes_back_as_one(tmp_path: Path, scalar: Any) -> None:
    """As the best loss of a run is one, or a learning rate that NumPy has computed."""
    state = {"best": scalar, "pair": (scalar, [scalar])}
    xckpt.save(tmp_path / "ckpt", state)
    zero = type(scalar)(0)
    like = {"best": zero, "pair": (zero, [zero])}
    loaded = xckpt.load(tmp_path / "ckpt", like)
    xckpt.load_into(tmp_path / "ckpt", like)
    for found in (loaded, like):
        assert found == state
        assert {type(each) for each in (found["best"], found["pair"][0], found["pair"][1][0])} == {
            type(scalar)
        }
    assert isinstance(xckpt.load(tmp_path / "ckpt")["best"], np.ndarray)


def test_a_memory_mapped_file_is_saved_and_filled(tmp_path: Path) -> None:
    file = tmp_path / "data"
    mapped = np.memmap(file, np.float32, mode="w+", shape=(100, 7))
    mapped[...] = np.arange(700).reshape(100, 7)
    xckpt.save(tmp_path / "ckpt", {"w": mapped})
    mapped[...] = 0
    xckpt.load_into(tmp_path / "ckpt", {"w": mapped})
    mapped.flush()
    assert np.fromfile(file, np.float32).tolist() == list(range(700))


TEXTS = [np.dtypes.StringDType] if hasattr(np.dtypes, "StringDType") else []
"""NumPy 2 has it."""


@pytest.mark.parametrize(
    "leaf, message",
    [
        (np.array([None, 1]), "w: .*object"),
        (np.array(["a"]), "w: .*<U1"),
        (np.zeros(2, "datetime64[s]"), "w: .*datetime64"),
        (np.zeros(2, [("a", "i4")]), "w: .*save each field as an array of its own"),
        (np.zeros(2, ml_dtypes.uint4), r"w: .*uint4 .*by \.view\(np\.uint8\)"),
        *((np.array(["a"], kind()), "w: .*StringDType.*") for kind in TEXTS),
        (np.ma.masked_array([1, 2], [True, False]), "w: .*mask"),
        (object(), "w: .*builtins.object"),
        ({1, 2}, "w: .*builtins.set"),
        (range(3), "w: .*builtins.range"),
    ],
)
def test_unsupported_leaves_are_refused_by_name(tmp_path: Path, leaf, message: str) -> None:
    with pytest.raises(xckpt.UnsupportedLeafError, match=message):
        xckpt.save(tmp_path / "ckpt", {"good": np.zeros(1), "w": leaf})
    assert list(tmp_path.iterdir()) == []


def test_an_array_without_elements_may_have_any_shape(tmp_path: Path) -> None:
    empty = np.empty((1 << 40, 0), np.float32)
    xckpt.save(tmp_path / "ckpt", {"e": empty})
    assert xckpt.load(tmp_path / "ckpt")["e"].shape == empty.shape
    assert xckpt.open(tmp_path / "ckpt").array("e")[5:7].shape == (2, 0)
    assert xckpt.open(tmp_path / "ckpt").verify() == []


def test_all_unsupported_leaves_are_listed(tmp_path: Path) -> None:
    state = {"a": object(), "b": {"c": [object()]}, "good": 1}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        xckpt.save(tmp_path / "ckpt", state)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["a", "b/c/0"]


def test_two_leaves_may_share_memory(tmp_path: Path) -> None:
    shared = np.arange(10)
    xckpt.save(tmp_path / "ckpt", {"a": shared, "b": shared[2:], "c": shared})
    assert same(xckpt.load(tmp_path / "ckpt"), {"a": shared, "b": shared[2:].copy(), "c": shared})


PEAK = """
import ctypes, gc, sys
from pathlib import Path
import numpy as np, xckpt

def extra(call):
    'Bytes that a call needed at its peak, over what was there before.'
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free would go meanwhile, and hide as much
    Path("/proc/self/clear_refs").write_text("5")
    before, _ = resident()
    call()
    return resident()[1] - before

def resident():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM")]

path, size = sys.argv[1], int(sys.argv[2])
xckpt.save(path + "-warm", {"w": np.ones(1 << 20)})
xckpt.load(path + "-warm")
state = {"w": np.ones((16, size // 64), np.float32)}
print(extra(lambda: xckpt.save(path, state)), end=" ")
state["w"][...] = 0
print(extra(lambda: xckpt.load_into(path, state)), end=" ")
assert (state["w"] == 1).all()
print(extra(lambda: xckpt.load(path)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to measure memory")
def test_memory_is_shared_and_not_copied(tmp_path: Path) -> None:
    """Saving and loading 384 MiB needs less than 256 MiB over the state, or over the targets."""
    size, more = 384 << 20, 256 << 20
    command = [sys.executable, "-c", PEAK, str(tmp_path / "ckpt"), str(size)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    save, load_into, load = (int(number) for number in run.stdout.split())
    assert save < more
    assert load_into < more
    # The kernel counts a process's pages in batches, for each processor apart.
    assert size - (1 << 20) <= load < size + more
