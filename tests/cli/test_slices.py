"""What a slice of a leaf is, and what reading it takes: against NumPy, and against chunk files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.support.examples import examples
from tests.support.sharded_arrays import rows
from xckpt.cli.report import (
    ArrayReport,
    CheckpointReport,
    LeafReport,
    SliceReport,
    checkpoint_report,
    parse_box,
    reading,
)
from xckpt.core.geometry.box import Box

ARRAYS = {
    "even": np.arange(256, dtype=np.float32).reshape(16, 16),
    "prime": np.arange(13 * 7, dtype=np.int16).reshape(13, 7),
    "deep": np.linspace(-1, 1, 60).reshape(3, 1, 4, 5),
    "pieces": np.arange(101 * 3, dtype=np.int32).reshape(101, 3),
    "scalar": np.array(2.5),
}
"""In chunks of at most 100 bytes."""

bounds = st.none() | st.integers(-12, 12)
keys = st.integers(-12, 12) | st.builds(slice, bounds, bounds)


def spelt(key: int | slice, space: str = "") -> str:
    if isinstance(key, int):
        return f"{space}{key}"
    ends = ["" if end is None else str(end) for end in (key.start, key.stop)]
    return f"{space}:{space}".join(ends)


@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    given=st.lists(keys, max_size=3),
    space=st.sampled_from(["", " "]),
)
def test_a_slice_is_what_it_is_to_numpy(
    shape: tuple[int, ...], given: list[int | slice], space: str
) -> None:
    text = ",".join(spelt(key, space) for key in given)
    # An int keeps its dimension here, so NumPy is asked dimension by dimension.
    try:
        if len(given) > len(shape):
            raise IndexError
        wanted = [np.arange(n)[key].ravel().tolist() for n, key in zip(shape, given, strict=False)]
    except IndexError:
        with pytest.raises(ValueError, match=r"outside dimension|is a slice of"):
            parse_box(text, shape)
    else:
        wanted += [list(range(size)) for size in shape[len(given) :]]
        box = parse_box(text, shape)
        ranges = map(range, box.offsets, box.ends)
        assert [list(part) for part in ranges] == wanted


@pytest.mark.parametrize("text", ["a", "1:b", "0:2:1", "1,", ",1", "1.5", "...", "0-3", "1;2"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not a slice of dimension \d; write it as 0:100, 5 or :"
    ):
        parse_box(text, (9, 9))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "ckpt"
    state = ARRAYS | {"pieces": rows(ARRAYS["pieces"], 7, 20, 51)}
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=100))
    return path


@pytest.fixture(scope="module")
def report(saved: Path) -> CheckpointReport:
    return checkpoint_report("", xckpt.open(saved).manifest)


def meeting(array: ArrayReport, box: Box) -> Iterator[tuple[int, ...]]:
    """The positions of the chunks that hold an element of a box, one element after another."""
    low = [max(a, o) for a, o in zip(box.offsets, array.offset, strict=True)]
    ends = zip(box.ends, array.offset, array.shape, strict=True)
    high = [min(b, o + n) for b, o, n in ends]
    for index in np.ndindex(*(max(b - a, 0) for a, b in zip(low, high, strict=True))):
        element = [start + i for start, i in zip(low, index, strict=True)]
        local = zip(element, array.offset, array.chunk, strict=True)
        yield tuple((e - o) // n for e, o, n in local)


@contextmanager
def hidden(files: list[Path]) -> Iterator[None]:
    """Files that are not there meanwhile."""
    for file in files:
        file.rename(file.with_suffix(".hidden"))
    try:
        yield
    finally:
        for file in files:
            file.with_suffix(".hidden").rename(file)


@examples(60)
@given(name=st.sampled_from(sorted(ARRAYS)), ends=st.lists(st.integers(0, 101), min_size=8))
def test_the_chunks_named_are_the_ones_that_are_read(
    saved: Path, report: CheckpointReport, name: str, ends: list[int]
) -> None:
    whole = ARRAYS[name]
    pairs = zip(ends[::2], ends[1::2], whole.shape, strict=False)
    low_high = [sorted((a % (n + 1), b % (n + 1))) for a, b, n in pairs]
    box = Box(tuple(a for a, _ in low_high), tuple(b - a for a, b in low_high))
    [leaf] = [leaf for leaf in report.leaves if leaf.name == name]
    touched: set[Path] = set()
    for array in leaf.arrays:
        chunks = set(meeting(array, box))
        touched |= {saved.joinpath(array.path, "c", *map(str, chunk)) for chunk in chunks}
    files = [file for file in (saved / name).rglob("*") if file.is_file()]
    chunk_files = [file for file in files if file.name != "zarr.json"]
    wanted = whole[box.slices()]

    assert reading(leaf, box) == SliceReport(
        box.offsets,
        wanted.shape,
        wanted.nbytes,
        sum(file.stat().st_size for file in touched),
        len(touched),
        len(chunk_files),
    )
    with hidden([file for file in chunk_files if file not in touched]):
        stored = xckpt.open(saved)[name]
        assert isinstance(stored, xckpt.StoredArray)
        assert np.array_equal(stored[box.slices()], wanted)


def test_a_tensor_without_elements_reads_nothing() -> None:
    arrays = (ArrayReport("w", (0, 0), (0, 4), (1, 4), None, 0),)
    leaf = LeafReport("w", "tensor", "int8", (0, 4), 0, "regular", arrays)
    assert reading(leaf, parse_box("", (0, 4))) == SliceReport((0, 0), (0, 4), 0, 0, 0, 0)
