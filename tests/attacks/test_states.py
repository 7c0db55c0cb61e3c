"""States that no training should have: each is saved as it is, or refused by name before a byte.

One table: the state, and what is said of it; empty where it comes back as it was.
"""

from __future__ import annotations

import collections
import enum
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from tests.attacks.victim import outcome

pytestmark = pytest.mark.thorough


class Color(enum.Enum):
    RED = 1


class Raises(dict):  # type: ignore[type-arg]
    """A mapping that lies about what it holds."""

    def items(self) -> Any:
        raise RuntimeError("boom")


class Holds:
    """An object whose state is whatever it is given."""

    def __init__(self, give: Callable[[Holds], Any]) -> None:
        self.give = give

    def state_dict(self) -> Any:
        return self.give(self)

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("boom")


def recursive() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["a"] = {"b": [state]}
    return state


def deep(levels: int) -> dict[str, Any]:
    state: dict[str, Any] = {"w": np.ones(2)}
    for _ in range(levels):
        state = {"a": state}
    return state


def freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def misaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(b"\0" * 17, np.uint8)[1:].view(np.float64)


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "a NaN key": (lambda: {float("nan"): 1}, "dict key nan is a float"),
    "a bool key": (lambda: {True: 1}, "dict key True is a bool"),
    "a None key": (lambda: {None: 1}, "is a NoneType"),
    "a tuple key": (lambda: {(1, 2): 1}, "is a tuple"),
    "a bytes key": (lambda: {b"a": 1}, "is a bytes"),
    "an enum key": (lambda: {Color.RED: 1}, "is a Color"),
    "a key of a megabyte": (lambda: {"k" * 1_000_000: 1}, ""),
    "a lone surrogate": (lambda: {"\ud800": 1}, "not text that UTF-8"),
    "an int key of 5000 digits": (lambda: {10**5000: 1}, "key"),
    "NUL, empty and bidi keys": (lambda: {"a\0b": 1, "": {"": 2}, "\u202ea\x1b[2J": 3}, ""),
    "int and str keys alike": (lambda: {0: 1, "0": 2, -1: 3}, ""),
    "itself": (recursive, "the tree contains itself"),
    "100,000 levels": (lambda: deep(100_000), "more than 64 containers deep"),
    "60 levels": (lambda: deep(60), ""),
    "its own state": (lambda: {"s": Holds(lambda own: {"me": own})}, "s/me: a Holds in the state"),
    "no state": (lambda: {"s": Holds(lambda own: 5)}, "s: state_dict() of this Holds gives an int"),
    "text of 4 MiB": (lambda: {"v": "x" * (4 << 20)}, ""),
    "text with a surrogate": (lambda: {"v": "\ud800"}, ""),
    "NaN, infinities, -0.0": (lambda: {"v": [float("nan"), float("-inf"), -0.0]}, ""),
    "an int of 10,000 bits": (lambda: {"v": 1 << 10_000}, ""),
    "objects": (lambda: {"w": np.array([object()])}, "w: NumPy dtype object"),
    "fields": (lambda: {"w": np.zeros(3, [("a", "i4")])}, "each field as an array"),
    "dates": (lambda: {"w": np.zeros(3, "M8[s]")}, "datetime64"),
    "text arrays": (lambda: {"w": np.array(["a"])}, "save text as a list"),
    "long doubles": (lambda: {"w": np.ones(3, np.longdouble)}, "convert it to float64"),
    "a masked array": (
        lambda: {"w": np.ma.masked_array([1.0, 2.0], [True, False])},
        "its data and mask",
    ),
    "40 dimensions": (
        lambda: {"w": np.ones((1,) * 40)},
        "w: 40 dimensions, and",
    ),
    "big endian": (lambda: {"w": np.arange(3, dtype=">i4")}, ""),
    "backwards": (lambda: {"w": np.arange(6)[::-1]}, ""),
    "overlapping itself": (
        lambda: {"w": np.lib.stride_tricks.as_strided(np.arange(10), (5, 5), (8, 8))},
        "",
    ),
    "misaligned": (lambda: {"w": misaligned()}, ""),
    "freed": (lambda: {"w": freed()}, "w: the storage of this tensor of shape (1000,) was freed"),
    "sparse": (lambda: {"w": torch.eye(3).to_sparse()}, "w: a sparse"),
    "meta": (lambda: {"w": torch.ones(3, device="meta")}, "w: a tensor on the meta device"),
    "conjugated and negated": (lambda: {"w": torch.ones(2, dtype=torch.complex64).conj().imag}, ""),
    "needs a gradient": (lambda: {"w": torch.ones(2, requires_grad=True) * 2}, ""),
    "inference mode": (lambda: {"w": torch.inference_mode()(lambda: torch.ones(2))()}, ""),
    "a function": (lambda: {"f": outcome}, "f: a builtins.function"),
    "a generator": (lambda: {"g": (n for n in range(3))}, "g: a builtins.generator"),
    "a lock": (lambda: {"l": threading.Lock()}, "l: a _thread.lock"),
    "a file": (lambda: {"f": io.BytesIO()}, "f: a _io.BytesIO"),
    "a set": (lambda: {"s": {1}}, "s: a builtins.set"),
    "a deque": (lambda: {"d": collections.deque([1])}, "d: a collections.deque"),
    "nothing": (lambda: None, ""),
    "a lone number": (lambda: 5, ""),
}


@pytest.mark.parametrize("what", STATES)
def test_a_state_that_no_training_should_have(tmp_path: Path, what: str) -> None:
    make, said = STATES[what]
    for call in (xckpt.save, lambda path, state: xckpt.save_async(path, state).result()):
        path = tmp_path / f"{next(_numbers)}"
        done = outcome(call, path, make())
        if said:
            assert done.xckpt and said in done.text, (done.kind, done.text)
            assert os.listdir(tmp_path) == [] or not path.exists()
        else:
            assert done.kind == "done", (done.kind, done.text)
            assert xckpt.open(path).verify() == []
            xckpt.load(path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


_numbers = itertools.count()


def test_errors_of_the_callers_own_objects_come_through(tmp_path: Path) -> None:
    """They are not xckpt's, and they leave nothing."""
    for state in (Raises(a=1), {"s": Holds(lambda own: 1 / 0)}):
        done = outcome(xckpt.save, tmp_path / "a", state)
        assert done.kind in ("RuntimeError", "ZeroDivisionError")
    xckpt.save(tmp_path / "b", {"s": Holds(lambda own: {"w": np.ones(2)})})
    done = outcome(xckpt.load_into, tmp_path / "b", {"s": Holds(lambda own: {"w": np.ones(2)})})
    assert done.kind == "RuntimeError" and "boom" in done.text
    assert os.listdir(tmp_path) == ["b"]


METADATA: dict[str, Any] = {
    "NaN": {"a": float("nan")},
    "itself": recursive(),
    "no JSON": {"a": object()},
    "a tuple key": {(1,): 1},
    "a surrogate": {"a": "\ud800"},
    "deep": deep(3000),
    "an int of 5000 digits": {"a": 10**5000},
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_json_lacks(tmp_path: Path, what: str) -> None:
    done = outcome(xckpt.save, tmp_path / "a", {"w": np.ones(2)}, metadata=METADATA[what])
    assert done.fair, (done.kind, done.text)
    if done.kind == "done":
        assert xckpt.open(tmp_path / "a").user_metadata is not None
    else:
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("answer", [None, 5, "text", 1 / 3])
def test_a_serialiser_that_gives_no_bytes(tmp_path: Path, answer: Any) -> None:
    options = xckpt.SaveOptions(serialise=lambda leaf: answer)
    done = outcome(xckpt.save, tmp_path / "a", {"x": {1}}, options=options)
    assert done.kind in ("UnsupportedLeafError", "TypeError") and "x" in done.text
    assert os.listdir(tmp_path) == []


RAISED = [StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, MemoryError, OSError]


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("call", ["save", "load"])
def test_callbacks_that_raise_anything(
    tmp_path: Path, raised: type[BaseException], call: str
) -> None:
    """It comes out as it is, from whatever thread; the old checkpoint stays, and nothing else."""

    def progress(seen: object) -> None:
        raise raised("a callback")

    path = tmp_path / "a"
    state = {str(n): np.full((64, 64), n) for n in range(4)}
    xckpt.save(path, {**state, "step": 1})
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: xckpt.save(
            path,
            {**state, "step": 2},
            overwrite=True,
            options=xckpt.SaveOptions(progress=progress),
        ),
        "load": lambda: xckpt.load(path, options=xckpt.LoadOptions(progress=progress)),
    }
    with pytest.raises(raised):
        calls[call]()
    assert xckpt.open(path).verify() == [] and xckpt.load(path)["step"] == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_save_within_a_callback_of_a_save(tmp_path: Path) -> None:
    state = {"w": np.ones(1000)}
    inner: list[str] = []

    def progress(seen: object) -> None:
        if not inner:
            inner.append("")
            inner[0] = outcome(xckpt.save, tmp_path / "inner", state).kind

    xckpt.save(tmp_path / "a", state, options=xckpt.SaveOptions(progress=progress))
    assert inner == ["done"] and xckpt.open(tmp_path / "inner").verify() == []


def broken_targets() -> Iterator[tuple[str, Any]]:
    array = np.ones((4, 4), np.float32)
    frozen = array.copy()
    frozen.setflags(write=False)
    yield "read-only", frozen
    yield "broadcast", np.broadcast_to(np.float32(1), (4, 4))
    yield "freed", torch.ones(4, 4).untyped_storage() and _freed_target()
    yield "meta", torch.ones(4, 4, device="meta")
    yield "expanded", torch.ones(1, 1).expand(4, 4)
    yield "a number", 5
    yield "text", "x"
    yield "None", None


def _freed_target() -> torch.Tensor:
    tensor = torch.ones(4, 4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("what", [what for what, _ in broken_targets()])
def test_targets_that_cannot_be_filled_in_place(tmp_path: Path, what: str) -> None:
    xckpt.save(tmp_path / "a", {"w": np.full((4, 4), 7, np.float32)})
    target = dict(broken_targets())[what]
    done = outcome(xckpt.load_into, tmp_path / "a", {"w": target})
    assert done.fair and done.kind != "done" and "w" in done.text, (done.kind, done.text)


def test_one_array_for_two_leaves(tmp_path: Path) -> None:
    """It holds one of the two; neither load nor verify dies of it."""
    xckpt.save(tmp_path / "a", {"v": np.full(1000, 1), "w": np.full(1000, 2)})
    shared = np.zeros(1000, int)
    done = outcome(xckpt.load_into, tmp_path / "a", {"v": shared, "w": shared})
    assert done.fair


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arrays_that_change_while_they_are_saved(tmp_path: Path, kind: str) -> None:
    """What was saved is refused by a reader, or is what was there at one moment of each chunk."""
    array = np.zeros(1 << 20, np.int64)
    leaf: Any = array if kind == "numpy" else torch.from_numpy(array)
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            array.__iadd__(1)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for number in range(5):
            xckpt.save(tmp_path / str(number), {"w": leaf})
            xckpt.save_async(tmp_path / f"async{number}", {"w": leaf}).result()
    finally:
        done.set()
        changing.join()
    for name in os.listdir(tmp_path):
        loaded = outcome(xckpt.load, tmp_path / name)
        assert loaded.kind in ("done", "CorruptCheckpointError"), (loaded.kind, loaded.text)
        assert "async" not in name or loaded.kind == "done"
