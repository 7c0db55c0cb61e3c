"""Stored arrays index as NumPy's and zarr's do, travel to other processes, and read no more."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from tests.support.sharded_arrays import rows
from tests.support.states import same

SHAPE = (13, 5, 7)
CUBE = np.arange(13 * 5 * 7, dtype=np.int32).reshape(SHAPE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indexed") / "ckpt"
    state = {
        "cube": CUBE,
        "pieces": rows(CUBE, 3, 10),
        "half": CUBE[0].astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5),
    }
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=120))
    return path


def array(path: Path, name: str = "cube") -> xckpt.StoredArray:
    found = xckpt.open(path)[name]
    assert isinstance(found, xckpt.StoredArray)
    return found


def keys(size: int) -> st.SearchStrategy[object]:
    position = st.integers(-size, size - 1)
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.one_of(
        position,
        st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 5, 20, -1, -3, -20])),
        st.lists(position, max_size=6),
        st.lists(st.booleans(), min_size=size, max_size=size).map(np.array),
    )


def orthogonally(whole: np.ndarray, index: tuple[Any, ...]) -> np.ndarray:
    """What an index picks, one dimension after the other."""
    dropped = 0
    for d, key in enumerate(index):
        key = np.array(key, np.intp) if isinstance(key, list) else key
        whole = whole[(*[slice(None)] * (d - dropped), key)]
        dropped += isinstance(key, int)
    return np.asarray(whole)


@given(
    name=st.sampled_from(["cube", "pieces"]),
    index=st.tuples(*map(keys, SHAPE)),
    given=st.integers(1, 3),
)
@examples(60)
def test_each_dimension_is_indexed_on_its_own(
    saved: Path, name: str, index: tuple[object, ...], given: int
) -> None:
    stored, index = array(saved, name), index[:given]
    assert same(stored.oindex[index], orthogonally(CUBE, index))  # type: ignore[index]
    if sum(isinstance(key, list | np.ndarray) for key in index) <= 1:
        assert same(stored[index], orthogonally(CUBE, index))  # type: ignore[index]


@given(
    name=st.sampled_from(["cube", "pieces"]),
    points=st.lists(st.tuples(*(st.integers(-n, n - 1) for n in SHAPE)), max_size=12),
)
@examples(30)
def test_single_elements_are_picked_as_numpy_does(
    saved: Path, name: str, points: list[tuple[int, ...]]
) -> None:
    stored = array(saved, name)
    index = tuple(np.array(points, np.intp).reshape(-1, 3).T)
    assert same(stored.vindex[index], CUBE[index])
    assert same(stored[index], CUBE[index])
    mask = np.zeros(SHAPE, bool)
    mask[index] = True
    assert same(stored[mask], CUBE[mask])


def test_positions_are_broadcast(saved: Path) -> None:
    index = (np.arange(4).reshape(2, 2), np.array([1, 2]), 3)
    assert same(array(saved).vindex[index], CUBE[index])
    assert array(saved).vindex[0, 1, 2].shape == ()


def test_arrays_of_any_framework_index_as_numpys_do(saved: Path) -> None:
    import jax.numpy as jnp
    import torch

    stored = array(saved)
    for make in (np.asarray, torch.tensor, jnp.asarray):
        np.testing.assert_array_equal(stored[make(-2)], CUBE[-2])  # as int does, it drops the axis
        np.testing.assert_array_equal(stored[1, make([3, 0]), make(6)], CUBE[1, [3, 0], 6])
        np.testing.assert_array_equal(stored[make([True, False] * 6 + [True])], CUBE[::2])
        odd = CUBE % 2 == 1
        for mask in (make(odd), (make(odd),), odd.tolist()):  # of single elements
            np.testing.assert_array_equal(stored[mask], CUBE[odd])
            np.testing.assert_array_equal(stored.vindex[mask], CUBE[odd])
        with pytest.raises(IndexError, match="cube: index 13 is outside dimension 0 with size 13"):
            stored[make(13)]
        for wrong in (True, 1.0):
            with pytest.raises(IndexError, match="cube: "):
                stored[make(wrong)]


def test_zarr_python_picks_the_same(saved: Path) -> None:
    beside = zarr.open_array(saved / "cube", mode="r")
    stored = array(saved)
    assert same(
        stored.oindex[[4, 1], :, [0, 2]],
        np.asarray(beside.oindex[np.array([4, 1]), :, np.array([0, 2])]),
    )
    assert same(
        stored.vindex[[4, 1], [0, 2], [0, 2]], np.asarray(beside.vindex[[4, 1], [0, 2], [0, 2]])
    )
    assert same(stored[[4, 1]], np.asarray(beside[[4, 1]]))
    for name in ("shape", "ndim", "size", "nbytes", "dtype", "chunks"):
        assert getattr(stored, name) == getattr(beside, name), name
    assert len(stored) == beside.shape[0]


def test_what_can_mean_two_things_is_refused(saved: Path) -> None:
    stored = array(saved)
    with pytest.raises(IndexError, match=r"cube: .* stored.oindex"):
        stored[[0, 1], :, [0, 1]]
    for index in [([0, 1], [0, 1, 2], 0), ([0, 1],), np.ones((13, 5, 6), bool)]:
        with pytest.raises(IndexError, match="cube"):
            stored.vindex[index]
    for index in [[13], [-14], [0.5], "a", [[0, 1]], [[0], [0, 1]], [2**64 - 1]]:
        with pytest.raises(IndexError):
            stored.oindex[index]  # type: ignore[index]
        with pytest.raises(IndexError):
            stored.vindex[index, 0]  # type: ignore[index]
    with pytest.raises(IndexError, match="scalar: too many indices"):
        array(saved, "scalar").vindex[np.array(True)]


def test_scattered_positions_read_their_chunks_alone(tmp_path: Path) -> None:
    table = np.arange(1000).reshape(100, 10)
    xckpt.save(tmp_path / "ckpt", {"w": table}, options=xckpt.SaveOptions(chunk_bytes=800))
    for number in (1, 2, 3, 4, 6, 7, 8):
        (tmp_path / f"ckpt/w/c/{number}/0").unlink()
    stored = array(tmp_path / "ckpt", "w")
    assert same(stored[[95, 3, 55, 3]], table[[95, 3, 55, 3]])
    assert same(stored.vindex[[99, 0], [1, 2]], table[[99, 0], [1, 2]])
    assert same(stored[::50], table[::50]) and same(stored[::-45][:1], table[::-45][:1]) is True
    with pytest.raises(xckpt.CorruptCheckpointError, match="w: "):
        stored[[95, 15]]


def test_it_looks_like_an_array(saved: Path) -> None:
    half = array(saved, "half")
    assert half.dtype == ml_dtypes.bfloat16 and half.dtype_name == "bfloat16"
    assert (half.ndim, half.size, half.nbytes, len(half)) == (2, 35, 70, 5)
    assert np.asarray(half, np.float32).dtype == np.float32
    assert [row.shape for row in half] == [(7,)] * 5
    with pytest.raises(TypeError, match="scalar: a tensor of no dimensions"):
        len(array(saved, "scalar"))
    with pytest.raises(TypeError, match="scalar: a tensor of no dimensions"):
        list(array(saved, "scalar"))
    with pytest.raises(ValueError, match=r"half: .* by a copy only"):
        half.__array__(copy=False)  # as NumPy 2 asks for np.asarray(half, copy=False)


def test_large_slices_are_read_by_several_threads(tmp_path: Path) -> None:
    """In any number of threads, and within a memory of fewer bytes than a chunk."""
    table = np.random.default_rng(0).random((1 << 10, 1 << 10))
    xckpt.save(tmp_path / "ckpt", {"w": table}, options=xckpt.SaveOptions(chunk_bytes=1 << 19))
    for threads, memory in ((None, 1 << 20), (1, 1), (8, 1 << 28)):
        options = xckpt.LoadOptions(threads=threads, memory_bytes=memory)
        stored = xckpt.open(tmp_path / "ckpt", options=options)["w"]
        assert isinstance(stored, xckpt.StoredArray)
        assert same(stored[1:, ::-1], table[1:, ::-1])


def test_it_travels_to_another_process(saved: Path, tmp_path: Path) -> None:
    checkpoint = xckpt.open(saved)
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps((array(saved, "pieces"), checkpoint["half"], checkpoint)))
    assert sent.stat().st_size < 4096
    script = (
        "import pickle, sys; pieces, half, checkpoint = pickle.load(open(sys.argv[1], 'rb'));"
        "print(int(pieces[-1].sum()), half.dtype, float(half[2, 1]), sorted(checkpoint))"
    )
    command = [sys.executable, "-c", script, str(sent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == (
        f"{CUBE[-1].sum()} bfloat16 15.0 ['cube', 'half', 'pieces', 'scalar']\n"
    ), done.stderr


@pytest.mark.parametrize(
    "later", [{"w": np.arange(4)}, {"w": np.arange(3), "step": 2}, {"w": np.zeros((3, 1), int)}]
)
def test_an_array_of_a_replaced_checkpoint_is_refused(
    tmp_path: Path, later: dict[str, Any]
) -> None:
    """Also by one that differs in values or a shape: its chunks have the digests of the first."""
    old = np.arange(3) if later["w"].any() else np.zeros((1, 3), int)
    xckpt.save(tmp_path / "ckpt", {"w": old, "step": 1})
    sent = pickle.dumps(array(tmp_path / "ckpt", "w")), pickle.dumps(xckpt.open(tmp_path / "ckpt"))
    xckpt.save(tmp_path / "ckpt", later, overwrite=True)
    stored, checkpoint = map(pickle.loads, sent)  # neither raises, nor once more
    stored, checkpoint = map(pickle.loads, map(pickle.dumps, (stored, checkpoint)))
    assert "was replaced" in repr(stored) and "was replaced" in repr(checkpoint)
    for use in (
        *(lambda: stored[:], lambda: np.asarray(stored), lambda: len(stored), lambda: stored.dtype),
        *(lambda: list(checkpoint), lambda: checkpoint["w"], lambda: checkpoint.array("w")),
        *(lambda: len(checkpoint), lambda: "w" in checkpoint, checkpoint.verify),
    ):
        with pytest.raises(xckpt.CheckpointReplacedError, match=r"was replaced.*open it again"):
            use()


IN_A_POOL = """
import multiprocessing, sys, xckpt

def first(stored):
    return int(stored[0])

if __name__ == "__main__":
    path, how = sys.argv[1:]
    stored = xckpt.open(path)["w"]
    if how == "replaced":
        xckpt.save(path, {"w": [5]}, overwrite=True)
    else:
        xckpt.delete(path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply_async(first, [stored]).get(30)
        except Exception as error:
            print(type(error).__name__)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how, kind", [("replaced", "CheckpointReplacedError"), ("deleted", "NotACheckpointError")]
)
def test_a_pool_hears_that_a_checkpoint_was_replaced(tmp_path: Path, how: str, kind: str) -> None:
    """The error came while the task was unpickled: its process died, and the pool waited."""
    xckpt.save(tmp_path / "ckpt", {"w": np.arange(3)})
    script = tmp_path / "script.py"
    script.write_text(IN_A_POOL)
    command = [sys.executable, str(script), str(tmp_path / "ckpt"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{kind}\n", "")


def test_dask_takes_it(saved: Path) -> None:
    import dask.array

    stored = array(saved)
    lazy = dask.array.from_array(stored, chunks=(5, 5, 7))  # type: ignore[arg-type]
    assert int(lazy[::2].sum().compute(scheduler="threads")) == int(CUBE[::2].sum())
    same_name = dask.array.from_array(array(saved), chunks=(5, 5, 7)).name  # type: ignore[arg-type]
    assert lazy.name == same_name


def test_torch_takes_it(saved: Path) -> None:
    import torch

    assert torch.equal(torch.as_tensor(np.asarray(array(saved))), torch.from_numpy(CUBE))
    loader = torch.utils.data.DataLoader(array(saved), batch_size=None)  # type: ignore[arg-type]
    assert len(list(loader)) == 13
