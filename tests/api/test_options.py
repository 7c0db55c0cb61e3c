"""Options of saves and loads: any of them gives the same bytes; progress counts them."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from conformance.implementations.threads import ThreadGroup, results
from tests.support.examples import examples
from tests.support.sharded_arrays import cut
from tests.support.states import LAYOUTS, arrays, everything, expected, random_array, same
from xckpt.core.dtypes import DTYPES


@examples(60)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    dtype=st.sampled_from(["bool", "int8", "bfloat16", "float32", "complex128"]),
    chunk_bytes=st.integers(1, 300),
    shard_bytes=st.sampled_from([0, 64, 1000]),
    crc32c=st.booleans(),
    threads=st.sampled_from([None, 1, 3]),
    memory_bytes=st.sampled_from([1, 100, 1 << 20]),
)
def test_any_options(shape, dtype, chunk_bytes, shard_bytes, crc32c, threads, memory_bytes) -> None:
    options = xckpt.SaveOptions(
        chunk_bytes=chunk_bytes,
        shard_bytes=shard_bytes,
        crc32c=crc32c,
        threads=threads,
        memory_bytes=memory_bytes,
    )
    array = random_array(shape, DTYPES[dtype], seed=chunk_bytes)
    xckpt.save("memory://any-options", {"w": array}, overwrite=True, options=options)
    back = xckpt.LoadOptions(threads=threads, memory_bytes=memory_bytes)
    assert same(xckpt.load("memory://any-options", options=back), {"w": array})


OF_THE_LAYOUT = {
    "chunk_bytes": 1 << 20,
    "shard_bytes": 1 << 20,
    "readers": 8,
    "pack_bytes": 0,
    "crc32c": True,
    "dimension_names": {"w": ["rows"]},
}
"""Options that decide what is stored, with another value than the default."""
OTHERS = {"many_objects", "threads", "memory_bytes", "compare_replicas", "verify_base"} | {
    "serialise",  # A planner's `lasting_key` has it.
    "progress",
    "metrics",
}


def test_each_option_is_of_the_layout_or_is_not() -> None:
    """What is planned or converted with another layout is made anew; see `SaveOptions.layout`."""
    of_any_call = {field.name for field in fields(xckpt.LoadOptions)} - OTHERS
    assert {field.name for field in fields(xckpt.SaveOptions)} - of_any_call - OTHERS == set(
        OF_THE_LAYOUT
    )
    for name, value in OF_THE_LAYOUT.items():
        changed = xckpt.SaveOptions(**{name: value})
        assert changed.layout != xckpt.SaveOptions().layout, name
    assert xckpt.SaveOptions(threads=1, memory_bytes=1).layout == xckpt.SaveOptions().layout


@pytest.mark.parametrize(
    "name, value",
    [
        ("chunk_bytes", 0),
        ("chunk_bytes", 1 << 40),
        ("shard_bytes", -1),
        ("shard_bytes", 1 << 40),
        ("readers", -1),
        ("readers", 1 << 21),
        ("threads", 0),
        ("memory_bytes", 0),
    ],
)
def test_impossible_options_are_refused_when_made(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        xckpt.SaveOptions(**{name: value})  # type: ignore[arg-type]
    if name in ("threads", "memory_bytes"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            xckpt.LoadOptions(**{name: value})  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    """They were refused, though a manager takes them."""
    given = {"chunk_bytes": 1 << 20, "threads": 2, "readers": 8, "retries": 3, "timeout": 5.0}
    numpy: dict[str, Any] = {name: np.array(number)[()] for name, number in given.items()}
    options = xckpt.SaveOptions(**numpy)
    assert options == xckpt.SaveOptions(**given)  # type: ignore[arg-type]
    assert type(options.threads) is int
    with pytest.raises(TypeError, match="not the bool"):
        xckpt.SaveOptions(threads=np.bool_(True))  # type: ignore[arg-type]


WRONG_NAMES = [
    (3, "not an int"),
    ({"w": "xy"}, "not a str for w"),
    ({"w": ["x", 1]}, "not an int among those of w"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG_NAMES)
def test_dimension_names_of_another_form_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        xckpt.SaveOptions(dimension_names=wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"share_reads": "hosts"}, ValueError, "'host' or 'job', not the str 'hosts'"),
        ({"share_reads": 1}, TypeError, "takes True or False, not"),
        ({"host": 3}, TypeError, "takes a name or None, not"),
        ({"host": " "}, ValueError, "takes a name or None, not ' '"),
    ],
)
def test_what_is_no_way_to_share_reads(wrong: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        xckpt.LoadOptions(**wrong)


@pytest.mark.parametrize("coordinator", [0, 1])
def test_the_coordinator_decides_on_checksums(tmp_path: Path, coordinator: int) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)

    def save(group: ThreadGroup) -> None:
        state = {"w": cut(whole, [((2 * group.rank, 0), (2, 6))]), f"own{group.rank}": whole}
        options = xckpt.SaveOptions(crc32c=group.rank == 0)
        xckpt.save(tmp_path / "ckpt", state, group=group, options=options)

    results(2, save, coordinator=coordinator)
    loaded = xckpt.load(tmp_path / "ckpt")
    assert all(np.array_equal(loaded[name], whole) for name in ("w", "own0", "own1"))
    for name in loaded:
        document = json.loads((tmp_path / "ckpt" / name / "zarr.json").read_text())
        assert ("crc32c" in str(document["codecs"])) == (coordinator == 0)


def test_a_serialiser_carries_what_is_unsupported() -> None:
    options = xckpt.SaveOptions(serialise=lambda leaf: repr(leaf).encode())
    xckpt.save("memory://opaque", {"set": {3}, "w": np.ones(2)}, overwrite=True, options=options)
    assert xckpt.load("memory://opaque")["set"] == b"{3}"
    assert xckpt.open("memory://opaque")["set"] == b"{3}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_progress_reaches_the_total(layout: str) -> None:
    seen: list[xckpt.Progress] = []
    options = xckpt.SaveOptions(
        chunk_bytes=LAYOUTS[layout].chunk_bytes,
        shard_bytes=LAYOUTS[layout].shard_bytes,
        crc32c=LAYOUTS[layout].crc32c,
        progress=seen.append,
    )
    state = everything()
    xckpt.save("memory://progress", state, overwrite=True, options=options)
    sizes = [leaf.nbytes for leaf in expected(state).values() if isinstance(leaf, np.ndarray)]
    assert seen[-1].done == seen[-1].total > sum(sizes)
    assert [p.done for p in seen] == sorted({p.done for p in seen})
    assert all(0 < p.done <= p.total for p in seen)

    seen.clear()
    xckpt.load("memory://progress", options=xckpt.LoadOptions(progress=seen.append))
    assert seen[-1].done == seen[-1].total >= sum(sizes)
    assert [p.done for p in seen] == sorted({p.done for p in seen})


def test_an_error_in_the_callback_stops_the_save(tmp_path: Path) -> None:
    """Nothing is left, also of what was under way when it came."""

    def stop(progress: xckpt.Progress) -> None:
        raise RuntimeError("enough")

    large = {str(n): np.full((1024, 300), n, np.float32) for n in range(60)}
    for state in (arrays(), large):
        with pytest.raises(RuntimeError, match="enough"):
            xckpt.save(tmp_path / "ckpt", state, options=xckpt.SaveOptions(progress=stop))
        time.sleep(0.3)
        assert list(tmp_path.iterdir()) == []
