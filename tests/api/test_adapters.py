"""Adapters of one's own: the page's example, the defaults, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import chdir
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from conformance.implementations.threads import run_ranks
from xckpt.adapters import Adapter, ArrayAdapter, register, unregister
from xckpt.engine import adapters as known

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that the page's code leaves, gone through in one folder."""
    names: dict[str, Any] = {}
    before = list(known._REGISTERED)
    with chdir(tmp_path_factory.mktemp("adapters")):
        for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            exec(compile(code, "docs/adapters.md", "exec"), names)
        yield names
    for adapter in list(known._REGISTERED):
        if adapter not in before:
            unregister(adapter)


def test_the_page_does_what_it_says(page: dict[str, Any]) -> None:
    truth = np.arange(6.0).reshape(2, 3)
    for each in (page["loaded"], page["like"]):
        assert isinstance(each["w"], page["DeviceArray"])
        assert np.array_equal(np.from_dlpack(each["w"]), truth) and each["step"] == 7
    assert np.array_equal(page["arrays"]["w"], truth)
    assert page["dated"]["day"] == date(2024, 2, 29)
    assert page["plain"]["day"] == b"2024-02-29"


def test_an_array_in_many_chunks_saved_in_the_background(
    page: dict[str, Any], tmp_path: Path
) -> None:
    array = page["DeviceArray"](np.arange(4096.0).reshape(64, 64))
    options = xckpt.SaveOptions(chunk_bytes=1024)
    xckpt.save(tmp_path / "now", {"w": array}, options=options)
    xckpt.save_async(tmp_path / "later", {"w": array}, options=options).result()
    for path in ("now", "later"):
        stored = xckpt.open(tmp_path / path)
        leaf = stored["w"]
        assert isinstance(leaf, xckpt.StoredArray) and leaf.chunks == (2, 64)
        assert np.array_equal(xckpt.load(tmp_path / path)["w"], np.from_dlpack(array))


class Odd:
    """An array of a dtype that the format has not."""

    shape = (2,)
    dtype = np.dtype("datetime64[s]")


class OddAdapter(ArrayAdapter[Odd]):
    leaves = (Odd,)


def test_what_an_adapter_cannot_do_is_said_by_name() -> None:
    odd = OddAdapter()
    register(odd)
    register(odd)
    try:
        with pytest.raises(
            xckpt.UnsupportedLeafError, match="a/odd: an Odd of a dtype that cannot"
        ):
            xckpt.save("memory://odd", {"a": {"odd": Odd()}})
    finally:
        unregister(odd)
    with pytest.raises(ValueError, match="OddAdapter is not registered"):
        unregister(odd)
    with pytest.raises(xckpt.UnsupportedLeafError, match="neither a tensor"):
        xckpt.save("memory://odd", {"a": {"odd": Odd()}})
    with pytest.raises(TypeError, match=r"register an instance .* not OddAdapter"):
        register(OddAdapter)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Adapter.leaves names no class"):
        register(Adapter[object]())


class Block:
    """An array that can be saved; nothing says how to make one."""

    def __init__(self) -> None:
        self.data = np.arange(3.0)
        self.shape, self.dtype = self.data.shape, self.data.dtype

    def __array__(self) -> np.ndarray:
        return self.data


class BlockAdapter(ArrayAdapter[Block]):
    leaves = (Block,)


class LostDevice(BlockAdapter):
    def from_numpy(self, data: np.ndarray, like: Block) -> Block:
        raise RuntimeError("the device is gone")


class FullDevice(BlockAdapter):
    def from_numpy(self, data: np.ndarray, like: Block) -> Block:
        raise MemoryError("the device is full")


class Forgetful(BlockAdapter):
    def from_numpy(self, data: np.ndarray, like: Block) -> Any:
        Block()


@pytest.mark.parametrize(
    "adapter, load, said",
    [
        (BlockAdapter, xckpt.load, "a Block can be saved, but not loaded"),
        (LostDevice, xckpt.load, "LostDevice.from_numpy failed with RuntimeError: the device is"),
        (Forgetful, xckpt.load, "Forgetful.from_numpy failed with TypeError: it returned None"),
        (LostDevice, xckpt.load_into, "LostDevice.copy_into failed with RuntimeError: the device"),
    ],
)
def test_an_adapter_that_makes_no_array_is_said_with_the_leaf(
    tmp_path: Path, adapter: Callable[[], Any], load: Callable[..., Any], said: str
) -> None:
    xckpt.save(tmp_path, {"a": {"b": np.zeros(3)}})
    register(it := adapter())
    try:
        with pytest.raises(xckpt.UnsupportedLeafError, match=f"^a/b: {said}"):
            load(tmp_path, {"a": {"b": Block()}})
    finally:
        unregister(it)


def test_a_lack_of_memory_in_an_adapter_stays_one(tmp_path: Path) -> None:
    xckpt.save(tmp_path, {"b": np.zeros(3)})
    register(it := FullDevice())
    try:
        with pytest.raises(MemoryError, match="the device is full"):
            xckpt.load(tmp_path, {"b": Block()})
    finally:
        unregister(it)


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("shape_of", lambda: 1 / 0, "shape_of failed with ZeroDivisionError: division by zero"),
        ("shape_of", lambda: None, "shape_of failed with TypeError: 'NoneType'"),
        ("shape_of", lambda: (3.0,), "shape_of failed with TypeError: 'float'"),
        ("dtype_of", lambda: {}["f"], "dtype_of failed with KeyError: 'f'"),
        ("dtype_of", lambda: "double", "dtype_of failed with TypeError: it returned 'double', not"),
        ("dtype_of", lambda: np.dtype("f8"), "dtype_of failed with TypeError: it returned dtype"),
    ],
)
@pytest.mark.parametrize("call", [xckpt.save, xckpt.load, xckpt.load_into])
def test_an_adapter_that_describes_wrongly_is_said_with_the_leaf(
    tmp_path: Path, method: str, answer: Callable[[], Any], said: str, call: Callable[..., Any]
) -> None:
    if "load" in call.__name__:
        xckpt.save(tmp_path, {"a": {"b": np.zeros(3)}})
    wrong = type("Wrong", (BlockAdapter,), {method: lambda self, leaf: answer()})
    register(it := wrong())
    try:
        with pytest.raises(xckpt.UnsupportedLeafError, match=f"a/b: Wrong.{said}"):
            call(tmp_path, {"a": {"b": Block()}})
    finally:
        unregister(it)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda: 1 / 0, "failed with ZeroDivisionError: division by zero"),
        (lambda: None, "failed with TypeError: it returned a NoneType, not a NumPy"),
        (lambda: [1.0, 2.0], "failed with TypeError: it returned a list, not a NumPy"),
    ],
)
@pytest.mark.parametrize(
    "save", [xckpt.save, lambda *args, **kwargs: xckpt.save_async(*args, **kwargs).result()]
)
@pytest.mark.parametrize("pack_bytes", [0, 1 << 18])
def test_an_adapter_that_cannot_read_is_said_with_the_leaf(
    tmp_path: Path, answer: Callable[[], Any], said: str, save: Callable[..., Any], pack_bytes: int
) -> None:
    wrong = type("Wrong", (BlockAdapter,), {"to_numpy": lambda self, data: answer()})
    options = xckpt.SaveOptions(pack_bytes=pack_bytes)
    register(it := wrong())
    try:
        with pytest.raises(
            xckpt.UnsupportedLeafError, match=f"a/b: Wrong.to_numpy {said}"
        ) as error:
            save(tmp_path, {"a": {"b": Block()}}, options=options)
        if save is xckpt.save:  # one in the background lists all such leaves
            assert isinstance(error.value.__cause__, ZeroDivisionError | TypeError)
    finally:
        unregister(it)


class BrokenDevice(BlockAdapter):
    def to_numpy(self, data: Block) -> np.ndarray:
        raise RuntimeError("the device is gone")


def test_ranks_that_compare_such_leaves_name_the_leaf(tmp_path: Path) -> None:
    register(it := BrokenDevice())
    try:
        state = {"a": {"b": Block()}, "c": Block()}
        for outcome in run_ranks(2, lambda group: xckpt.save(tmp_path / "a", state, group=group)):
            assert "a/b: BrokenDevice.to_numpy failed with RuntimeError" in str(outcome.error)
    finally:
        unregister(it)


class Listed:
    """An array that has its shape as a list."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, list(array.shape), array.dtype


class ListedAdapter(ArrayAdapter[Any]):
    leaves = (Listed,)

    def shape_of(self, leaf: Any) -> Any:
        return leaf.shape

    def to_numpy(self, data: Any) -> Any:
        return data.array


def test_a_shape_may_be_a_list() -> None:
    truth, listed = np.arange(6.0).reshape(2, 3), ListedAdapter()
    register(listed)
    try:
        xckpt.save("memory://listed", {"w": Listed(truth)})
    finally:
        unregister(listed)
    assert np.array_equal(xckpt.load("memory://listed")["w"], truth)


class Point:
    """An object of a class that xckpt does not know."""

    def __init__(self, x: int) -> None:
        self.x = x


POINTS = xckpt.LoadOptions(deserialise=lambda content: Point(int(content)))


@pytest.fixture
def pointed(tmp_path: Path) -> Path:
    options = xckpt.SaveOptions(serialise=lambda leaf: str(leaf.x).encode())  # type: ignore[attr-defined]
    xckpt.save(tmp_path / "ckpt", {"a": {"p": Point(7)}, "n": 1}, options=options)
    return tmp_path / "ckpt"


def test_an_object_comes_back_as_an_object(pointed: Path) -> None:
    assert xckpt.load(pointed, options=POINTS)["a"]["p"].x == 7
    like = {"a": {"p": Point(0)}, "n": 0}
    loaded = xckpt.load(pointed, like, options=POINTS)
    assert (loaded["a"]["p"].x, loaded["n"], like["a"]["p"].x) == (7, 1, 0)  # type: ignore[index]
    state: Any = {"a": {"p": Point(0)}, "n": 0}
    xckpt.load_into(pointed, state, options=POINTS)
    assert (state["a"]["p"].x, state["n"]) == (7, 1)
    assert xckpt.open(pointed, options=POINTS)["a/p"] == b"7"


def test_without_a_deserialiser_it_stays_bytes(pointed: Path) -> None:
    assert xckpt.load(pointed) == {"a": {"p": b"7"}, "n": 1}
    assert xckpt.load(pointed, {"a": {"p": b""}, "n": 0})["a"]["p"] == b"7"
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"a/p: .*Point is not a .*deserialise"):
        xckpt.load(pointed, {"a": {"p": Point(0)}, "n": 0})
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"n: .*Point is not a target; give"):
        xckpt.load(pointed, {"a": {"p": b""}, "n": Point(0)}, options=POINTS)


@pytest.mark.parametrize("compare_replicas", [None, True])
def test_a_serialiser_that_fails_names_the_leaf(compare_replicas: bool | None) -> None:
    def refuse(leaf: object) -> bytes:
        raise KeyError("no writer for a point")

    options = xckpt.SaveOptions(serialise=refuse, compare_replicas=compare_replicas)
    failed = r"a/p: serialise failed on its Point with KeyError: 'no writer for a point'"
    with pytest.raises(xckpt.UnsupportedLeafError, match=failed) as raised:
        xckpt.save("memory://serialise-fails", {"a": {"p": Point(3)}}, options=options)
    assert isinstance(raised.value.__cause__, KeyError | xckpt.UnsupportedLeafError)


def test_a_deserialiser_that_fails_names_the_leaf(pointed: Path) -> None:
    options = xckpt.LoadOptions(deserialise=lambda content: {}[content])
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"a/p: deserialise failed .* KeyError"):
        xckpt.load(pointed, options=options)
    with pytest.raises(TypeError, match="deserialise"):
        xckpt.LoadOptions(deserialise="pickle")  # type: ignore[arg-type]
