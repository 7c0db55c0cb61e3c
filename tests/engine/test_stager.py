"""Staged states: the same tree, over memory that later changes do not reach, copied once."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import xckpt
from tests.support.examples import examples
from tests.support.schedules import at_once
from tests.support.sharded_arrays import Sharded, cut
from xckpt.core.leaf import HostSource, RemotePart
from xckpt.engine import background, host_copy
from xckpt.engine.fresh_memory import CACHE_LINE, fresh
from xckpt.engine.host_copy import HostCopies
from xckpt.engine.ranks.alive import AwaitedThread
from xckpt.errors import LeafTooLargeError, UnsupportedLeafError
from xckpt.staging import AsyncStager, BlockingAsyncStager

MEBIBYTE = 1 << 20
DTYPES = ("uint8", "int32", "complex128")


class Pair(NamedTuple):
    left: object
    right: object


def copies_of(parts: list[Any]) -> list[NDArray[Any]]:
    return HostCopies(fresh).copy(parts, lambda copies: copies)


@st.composite
def views(draw: st.DrawFn) -> list[NDArray[Any]]:
    """Views of one or two bases: slices with any steps, transposed, of several dtypes, repeated."""
    bases = [np.arange(240, dtype=np.uint8) + start for start in (0, 7)]
    found: list[NDArray[Any]] = []
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(bases))
        table = base.view(draw(st.sampled_from(DTYPES))).reshape(3, -1)
        index = tuple(
            slice(
                draw(st.none() | st.integers(-n, n)),
                draw(st.none() | st.integers(-n, n)),
                draw(st.sampled_from((None, 1, 2, -1, 3, -2))),
            )
            for n in table.shape
        )
        view = table[index]
        found.append(
            draw(st.sampled_from((view, view.T, np.broadcast_to(view, (2, *view.shape)), table[0])))
        )
    return found


@given(views())
@examples(50, 1000)
def test_copies_are_equal_and_apart(parts: list[NDArray[Any]]) -> None:
    expected = [np.array(part) for part in parts]
    copies = copies_of(parts)
    for part, copied, array in zip(parts, copies, expected, strict=True):
        assert copied.dtype == part.dtype
        assert copied.shape == part.shape
        assert not any(np.shares_memory(copied, each) for each in parts)
        assert np.array_equal(copied, array)


@given(views())
@examples(40, 1000)
def test_nothing_is_copied_twice(parts: list[NDArray[Any]]) -> None:
    """Never more bytes than the parts have; and none where memory overlaps."""
    sizes: list[int] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        sizes.append(size)
        return fresh(size)

    HostCopies(allocate).copy(parts, lambda copies: None)
    distinct = {
        (part.__array_interface__["data"][0], part.shape, part.strides, part.dtype): part.nbytes
        for part in parts
    }
    assert sum(sizes) <= sum(distinct.values()) + 2 * CACHE_LINE * len(distinct)


def test_views_of_one_base_are_views_of_one_copy() -> None:
    base = np.arange(20.0).reshape(4, 5)
    parts = [base, base[1:3], base.T, base[:, ::2], base]
    copies = copies_of(parts)
    copies[0][1, 2] = -1
    assert copies[1][0, 2] == copies[2][2, 1] == copies[3][1, 1] == copies[4][1, 2] == -1
    assert [each.strides for each in copies] == [each.strides for each in parts]


def test_a_few_columns_take_no_more_than_their_own_bytes() -> None:
    base = np.arange(100_000, dtype=np.uint8).reshape(1000, 100)
    sizes: list[int] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        sizes.append(size)
        return fresh(size)

    [copied] = HostCopies(allocate).copy([base[:, 3:5]], lambda copies: copies)
    assert sizes[0] <= 2000 + CACHE_LINE
    assert np.array_equal(copied, base[:, 3:5])


@pytest.mark.parametrize("size", [0, 1, 4097, 5 * MEBIBYTE + 3, 9 * MEBIBYTE])
def test_many_pieces_in_many_threads(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "processors", lambda: 5)
    parts = [np.random.default_rng(n).integers(0, 255, size + n, np.uint8) for n in range(3)]
    for part, copied in zip(parts, copies_of(parts), strict=True):
        assert np.array_equal(part, copied)
        assert not size or (copied.ctypes.data - part.ctypes.data) % CACHE_LINE == 0


def test_a_copy_that_fails_in_a_thread_is_raised() -> None:
    def fail() -> None:
        raise OSError("no such page")

    with pytest.raises(OSError, match="no such page"):
        host_copy._run([lambda: None, fail, lambda: None], lambda: None, threads=2)
    with pytest.raises(OSError, match="no such page"):
        host_copy._run([lambda: None] * 9, fail, threads=2)
    with pytest.raises(OSError, match="no such page"):
        host_copy._run([lambda: None, fail, lambda: None], lambda: None, threads=0)


def test_no_thread_copies_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts, alive, begun = [KeyboardInterrupt()], list[threading.Thread](), list[int]()

    class Interrupted(AwaitedThread):
        def join(self, timeout: float | None = None) -> None:
            alive.append(self)
            if interrupts:
                raise interrupts.pop()
            super().join(timeout)

    def copy() -> None:
        begun.append(1)
        time.sleep(0.01)

    monkeypatch.setattr(host_copy, "AwaitedThread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        host_copy._run([copy] * 100, lambda: None, threads=2)
    assert not any(thread.is_alive() for thread in alive) and len(begun) < 100


def test_memory_that_only_its_framework_can_read() -> None:
    log: list[str] = []

    def start(memory: NDArray[Any]) -> None:
        log.append("start")
        memory[...] = 3

    remote = RemotePart((2, 2), np.dtype("int16"), start, lambda: log.append("wait"))
    host, device = copies_of([np.ones(3), remote])
    assert log == ["start", "wait"]
    assert (device == np.full((2, 2), 3, "int16")).all() and (host == 1).all()


@pytest.mark.parametrize("refused", ["build", "wait"])
def test_what_a_framework_copies_is_waited_for_after_a_failure(refused: str) -> None:
    """It could go on to write into memory that was kept for the next copy, or freed."""
    waited: list[str] = []

    def wait(name: str) -> None:
        waited.append(name)
        if name == refused:
            raise OSError("no answer")

    def build(_: object) -> None:
        if refused == "build":
            raise OSError("no memory")

    remote = [
        RemotePart((2,), np.dtype("int16"), lambda _: None, lambda name=name: wait(name))
        for name in ("wait", "other", "last")
    ]
    with pytest.raises(OSError, match="no "):
        HostCopies(fresh).copy(remote, build)
    assert sorted(waited) == ["last", "other", "wait"]


def test_kept_memory_is_used_again_for_the_same_and_for_other_parts() -> None:
    regions: list[NDArray[np.uint8]] = []

    def allocate(size: int) -> NDArray[np.uint8]:
        regions.append(fresh(size))
        return regions[-1]

    copies = HostCopies(allocate, keep=True)
    first, second = np.arange(3 * MEBIBYTE), np.arange(1000) + 5
    for parts in ([first, second], [first, second], [second, first], [first[::-1]]):
        found = copies.copy(parts, lambda found: found)
        assert all(np.array_equal(a, b) for a, b in zip(found, parts, strict=True))
    assert len(regions) == 1
    small = np.arange(10)
    [found] = copies.copy([small], lambda found: found)
    assert len(regions) == 2 and np.array_equal(found, small)


def test_offered_memory_is_written_again() -> None:
    copies = HostCopies(fresh, keep=True)
    part = np.arange(MEBIBYTE)
    for _ in range(3):
        [found] = copies.copy([part], lambda found: found)
        assert np.array_equal(found, part)
        copies.offer()
        part += 1
    HostCopies(fresh).offer()


class Foreign:
    """A stager that does not derive from xckpt's."""

    should_synchronize_after_execute = False
    _synchronize_after_execute = False

    def stage(self, state_dict: object) -> object:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


def test_the_protocol() -> None:
    assert isinstance(Foreign(), AsyncStager)
    assert not isinstance(object(), AsyncStager)

    class Unfinished(AsyncStager): ...

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()  # pyright: ignore[reportAbstractUsage]

    class Own(AsyncStager):
        def stage(self, state_dict: object) -> object:
            return state_dict

    stager = Own()
    assert stager.should_synchronize_after_execute
    assert stager.synchronize_staging() is None
    assert stager.close() is None
    assert isinstance(BlockingAsyncStager(), AsyncStager)
    assert not BlockingAsyncStager().should_synchronize_after_execute


def tree(array: NDArray[Any]) -> dict[str, Any]:
    return {
        "model": OrderedDict(w=array, tied=array, half=array[:2]),
        "opt": [(array.astype(np.float16), 1), Pair(np.zeros((0, 3)), "x")],
        "step": 7,
        "scalar": np.float32(2.5),
        "0-d": np.array(4),
        "empty": {},
        "none": None,
    }


@pytest.mark.parametrize("cached", [False, True])
def test_the_tree_is_the_same_and_later_changes_are_invisible(cached: bool) -> None:
    array = np.arange(12.0).reshape(4, 3)
    state = tree(array)
    staged = BlockingAsyncStager(cached).stage(state)
    array[:] = -1
    state["opt"][0][0][:] = -1
    state["0-d"][...] = -1
    state["step"], state["new"] = 8, 9
    expected = tree(np.arange(12.0).reshape(4, 3))
    assert list(staged) == list(expected)
    assert isinstance(staged["model"], OrderedDict) and isinstance(staged["opt"][1], Pair)
    np.testing.assert_equal(staged, expected)
    assert staged["model"]["tied"] is staged["model"]["w"]
    assert np.shares_memory(staged["model"]["half"], staged["model"]["w"])


def test_cached_memory_is_overwritten_and_uncached_is_not() -> None:
    array = np.arange(1000.0)
    uncached, cached = BlockingAsyncStager(), BlockingAsyncStager(cache_staged_state_dict=True)
    ones = [stager.stage({"w": array})["w"] for stager in (uncached, cached)]
    array += 1
    twos = [stager.stage({"w": array})["w"] for stager in (uncached, cached)]
    assert np.array_equal(ones[0], np.arange(1000.0))
    assert np.array_equal(twos[0], array) and np.array_equal(twos[1], array)
    assert not np.shares_memory(ones[0], twos[0])
    assert np.shares_memory(ones[1], twos[1])
    cached.close()
    assert not np.shares_memory(twos[1], cached.stage({"w": array})["w"])


def test_cached_memory_waits_for_the_save_that_uses_it() -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    array = np.zeros(10)
    staged = stager.stage({"w": array})["w"]
    saving: Future[None] = Future()
    stager.lend(saving)
    array += 1
    thread = threading.Thread(target=stager.stage, args=({"w": array},))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not staged.any()
    saving.set_exception(OSError("even if the save has failed"))
    thread.join(10)
    assert not thread.is_alive() and staged.all()


def test_saves_of_two_threads_share_a_stager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the second one overwrites the memory that the first has not yet handed to its save."""
    lend, gate = BlockingAsyncStager.lend, threading.Barrier(2)

    def slowly(stager: BlockingAsyncStager, until: Future[Any]) -> None:
        time.sleep(0.3)
        lend(stager, until)

    def begun_at_once(group: object) -> None:
        time.sleep(gate.wait() * 0.1)

    monkeypatch.setattr(BlockingAsyncStager, "lend", slowly)
    monkeypatch.setattr(background, "settle", begun_at_once)
    stager = BlockingAsyncStager(cache_staged_state_dict=True)

    def save(number: int) -> None:
        state = {"w": np.full(1000, number)}
        xckpt.save_async(tmp_path / str(number), state, stager=stager).result()

    at_once(lambda: save(1), lambda: save(2))
    for number in (1, 2):
        assert (xckpt.load(tmp_path / str(number))["w"] == number).all()


def test_prepared_memory_is_what_the_first_stage_takes() -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    state = {"w": np.arange(2 * MEBIBYTE)}
    stager.prepare(state)
    region = stager._copies._region
    assert region is not None
    staged = stager.stage(state)["w"]
    assert np.shares_memory(staged, region) and np.array_equal(staged, state["w"])
    with pytest.raises(ValueError, match="cache_staged_state_dict"):
        BlockingAsyncStager().prepare(state)


def test_other_objects_are_copied_or_refused() -> None:
    odd = {"words": {"a", "b"}, "step": 1, "more": bytearray(b"x")}
    staged = BlockingAsyncStager().stage(odd)
    odd["words"].add("c")
    assert staged == {"words": {"a", "b"}, "step": 1, "more": bytearray(b"x")}
    with pytest.raises(UnsupportedLeafError, match=r"words: a builtins\.set") as caught:
        BlockingAsyncStager(type_check=True).stage(odd)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "leaf, words",
    [(np.array(["x"]), "w: NumPy dtype <U1"), (np.ma.masked_array([1], [True]), "w: a masked")],
)
def test_what_cannot_be_saved_is_refused_by_name(leaf: object, words: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=words):
        BlockingAsyncStager().stage({"w": leaf})


@pytest.mark.parametrize("name", ["cache_staged_state_dict", "type_check", "pin_memory"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=rf"BlockingAsyncStager\({name}=\) takes True or False"):
        BlockingAsyncStager(**{name: "no"})  # type: ignore[arg-type]


def test_pinned_memory_needs_an_accelerator() -> None:
    with pytest.raises(RuntimeError, match="no framework that is imported has an accelerator"):
        BlockingAsyncStager(pin_memory=True)
    assert BlockingAsyncStager(pin_memory=False).stage({"step": 1}) == {"step": 1}


def test_a_leaf_whose_class_cannot_be_built_becomes_its_description() -> None:
    array = np.arange(24.0).reshape(6, 4)
    leaf = cut(array, [((0, 0), (2, 4)), ((2, 0), (4, 4))])
    assert isinstance(leaf, Sharded)
    staged = BlockingAsyncStager().stage({"w": leaf})["w"]
    assert isinstance(staged, HostSource)
    for part in leaf.parts:
        part[...] = -1
    xckpt.save("memory://staged-description", {"w": staged})
    assert np.array_equal(
        xckpt.load("memory://staged-description")["w"], np.arange(24.0).reshape(6, 4)
    )


def test_a_tree_that_cannot_be_flattened_is_refused() -> None:
    state: dict[Any, Any] = {1.5: np.ones(2)}
    state["self"] = state
    with pytest.raises(UnsupportedLeafError) as caught:
        BlockingAsyncStager().stage(state)
    assert len(caught.value.problems) == 2


def test_every_stager_can_be_called_from_any_thread() -> None:
    stager = BlockingAsyncStager()
    arrays = [np.full(MEBIBYTE, n, np.uint8) for n in range(4)]
    found: list[Any] = [None] * 4

    def stage(n: int) -> Callable[[], None]:
        def run() -> None:
            found[n] = stager.stage({"w": arrays[n]})["w"]

        return run

    threads = [threading.Thread(target=stage(n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((found[n] == n).all() for n in range(4))


def test_a_state_that_memory_does_not_hold_names_its_largest_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(*arguments: object, **named: object) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", none_left)
    state = {"m": {"large": np.ones(MEBIBYTE), "b": np.ones(3)}, "step": 3}
    words = r"the state, 8.0 MiB.* leaf is m/large, 8.0 MiB"
    with pytest.raises(LeafTooLargeError, match=words):
        xckpt.save_async("memory://no-room", state, stager=BlockingAsyncStager()).result()
    with pytest.raises(LeafTooLargeError, match=words):
        BlockingAsyncStager(cache_staged_state_dict=True).prepare(state)
