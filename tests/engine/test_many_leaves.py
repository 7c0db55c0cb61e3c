"""A save or a load of very many leaves does little for each: counted in calls, not in seconds."""

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import FrameType
from unittest import mock

import jax
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import xckpt
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import HostSource
from xckpt.core.manifest.codec import parse
from xckpt.core.tree import flatten, rebuild
from xckpt.engine import adapters
from xckpt.storage import ZarrStorageWriter
from xckpt.storage.array import digest_bytes

SAVE_CALLS = 83
LOAD_CALLS = 61
OPEN_CALLS = 5
"""Python functions that may be entered for a leaf, where both frameworks are loaded: 79, 58 and 4
are."""
FRAMEWORKS = jax, torch
"""Their adapters are asked too."""
PIECE_SAVE_CALLS, PIECE_LOAD_CALLS = 44, 65
"""And for a piece of a leaf: 42 and 64 are."""
FEW, MANY = 500, 1500
LOAD_BYTES = 1500
"""Bytes that a load may hold for a leaf at a time, its own array included: about 1,300 are."""
SAVE_BYTES = 1350
"""What a save may take of memory for a leaf, beside the leaf: about 1,100 bytes are."""


def calls_of(call: Callable[[], object]) -> int:
    """How many Python functions a call enters, in all threads that it starts."""
    counter, entered = count(), [0]

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered[0] = next(counter)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return entered[0]


def test_a_save_takes_little_memory_for_a_leaf(tmp_path: Path) -> None:
    peaks: list[int] = []
    for size in (2000, 4, 2000):  # the first imports, and fills what is kept between calls
        state = {"layer": {f"w{n}": np.full(4 + n % 3, n, np.float32) for n in range(size)}}
        tracemalloc.start()
        try:
            xckpt.save(tmp_path / str(len(peaks)), state)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / 2000 < SAVE_BYTES


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float, float]:
    """Calls of a save, of a load, and to open the checkpoint, for each leaf more."""
    made: list[list[int]] = []
    with mock.patch.object(adapters, "_REGISTERED", []):  # other tests' are asked for each leaf
        for size in (FEW, FEW, MANY):  # the first fills what is kept between calls
            state = {"layer": {f"w{n}": np.full(4 + n % 3, n, np.float32) for n in range(size)}}
            path = tmp_path_factory.mktemp("many") / "checkpoint"
            saving = calls_of(lambda path=path, state=state: xckpt.save(path, state))
            loading = calls_of(lambda path=path: xckpt.load(path))
            made.append([saving, loading, calls_of(lambda path=path: xckpt.open(path))])
    save, load, to_open = ((b - a) / (MANY - FEW) for a, b in zip(*made[1:], strict=True))
    return save, load, to_open


def test_a_save_makes_few_calls_for_a_leaf(calls: tuple[float, float, float]) -> None:
    assert calls[0] < SAVE_CALLS


def test_a_load_makes_few_calls_for_a_leaf(calls: tuple[float, float, float]) -> None:
    assert calls[1] < LOAD_CALLS


def test_a_checkpoint_is_opened_with_few_calls_for_a_leaf(
    calls: tuple[float, float, float],
) -> None:
    assert calls[2] < OPEN_CALLS


def test_a_load_takes_little_memory_for_a_leaf(tmp_path: Path) -> None:
    peaks: list[int] = []
    for number, size in enumerate((FEW, FEW, MANY)):
        state = {"layer": {f"w{n}": np.full(4 + n % 3, n, np.float32) for n in range(size)}}
        xckpt.save(tmp_path / str(number), state)
        del state
        tracemalloc.start()
        try:
            xckpt.load(tmp_path / str(number))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert (peaks[2] - peaks[1]) / (MANY - FEW) < LOAD_BYTES, peaks


def collections_of(call: Callable[[], object]) -> int:
    """How often a call has the garbage collector look at young objects."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        kept = call()
    finally:
        gc.callbacks.remove(note)
    del kept
    return seen.count("start")


@pytest.mark.parametrize(
    ("leaf", "tuples"), [(np.zeros(2), 1), (torch.zeros(2), 0)], ids=["numpy", "torch"]
)
def test_leaves_give_the_garbage_collector_little_to_look_at(leaf: object, tuples: int) -> None:
    """It looks at all objects of the process each time that a quarter more have come.

    NumPy makes a tuple each time that an array is asked for its shape.
    """
    tree, known = {f"w{n}": leaf for n in range(10_000)}, adapters.loaded_adapters()
    assert collections_of(lambda: flatten(tree, known)) < 3
    assert collections_of(lambda: rebuild(tree, lambda name, each: each, known)) < 3
    one = 10_000 // gc.get_threshold()[0] + 3  # what an object for each leaf makes
    described = collections_of(lambda: [known.describe(leaf, "w") for _ in tree])
    assert described < one * (1 + tuples)  # a source holds a tuple of its parts
    wanted = collections_of(lambda: [known.target_for(leaf, "w", in_place=True) for _ in tree])
    assert wanted < one * tuples + 3


def in_pieces(pieces: int) -> tuple[HostSource, NDArray[np.float32]]:
    """A leaf whose boxes have no size in common, and its elements."""
    ends = np.cumsum(np.arange(pieces) * 7 % 5 + 3)
    elements = np.arange(ends[-1], dtype=np.float32)
    parts = np.split(elements, ends[:-1])
    boxes = Boxes.of(
        [((end - len(part),), part.shape) for end, part in zip(ends, parts, strict=True)]
    )
    return HostSource(elements.shape, "float32", boxes, tuple(parts), True), elements


def test_a_rank_takes_what_was_committed_without_a_check_of_its_own(tmp_path: Path) -> None:
    """The coordinator has held it against the rules of the format, before it was written."""
    xckpt.save(tmp_path, {f"w{n}": in_pieces(n + 2)[0] for n in range(60)})
    data = (tmp_path / "xckpt.json").read_bytes()
    writer = ZarrStorageWriter(tmp_path / "other")
    checked = calls_of(lambda: parse(data, digest_bytes))
    assert calls_of(lambda: writer.committed_metadata(data)) < checked / 2


def test_a_piece_takes_few_calls(tmp_path: Path) -> None:
    saves, loads = list[int](), list[int]()
    for pieces in (FEW, FEW, MANY):  # the first imports
        source, elements = in_pieces(pieces)
        path, like = tmp_path / str(len(saves)), {"w": np.zeros_like(elements)}
        saves.append(calls_of(lambda path=path, source=source: xckpt.save(path, {"w": source})))
        loads.append(calls_of(lambda path=path, like=like: xckpt.load_into(path, like)))
        assert np.array_equal(like["w"], elements)
    assert (saves[2] - saves[1]) / (MANY - FEW) < PIECE_SAVE_CALLS
    assert (loads[2] - loads[1]) / (MANY - FEW) < PIECE_LOAD_CALLS
