"""save, load, load_into and open, with NumPy states."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.jobs import fresh_path
from tests.support.states import LAYOUTS, arrays, everything, expected, same
from xckpt.core.dtypes import DTYPES
from xckpt.storage.stored_array import StoredArray

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["{folder}/ckpt", "memory://{name}"])
def test_everything_in_every_layout(tmp_path: Path, layout: str, place: str) -> None:
    path = place.format(folder=tmp_path, name=tmp_path.name)
    state = everything()
    xckpt.save(path, state, options=LAYOUTS[layout])
    for options in (xckpt.LoadOptions(threads=2), xckpt.LoadOptions(threads=1)):
        assert same(xckpt.load(path, options=options), expected(state))
    checkpoint = xckpt.open(path)
    assert checkpoint.verify() == []
    for name, array in arrays().items():
        stored = checkpoint[name]
        assert isinstance(stored, StoredArray)
        assert (stored.shape, stored.dtype) == (array.shape, array.dtype)
        assert same(stored[...], array)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", ["{folder}/ckpt", "memory://{name}"])
def test_a_checkpoint_does_not_change_with_the_state(
    tmp_path: Path, layout: str, place: str
) -> None:
    path = place.format(folder=tmp_path, name=tmp_path.name)
    state = {"small": np.ones((7, 5), np.float32), "large": np.ones((70, 500), np.float32)}
    xckpt.save(path, state, options=LAYOUTS[layout])
    for array in state.values():
        array += 1
    for array in xckpt.load(path).values():
        assert (array == 1).all()


VALUES = [
    None,
    True,
    0,
    -1,
    2**70,
    -(10**400),
    1.5,
    -0.0,
    float("inf"),
    float("nan"),
    5e-324,
    1j,
    complex(-0.0, float("nan")),
    "",
    "ü\0\n\ud800",
    "x" * 5000,
    b"",
    b"\0\xff" * 4000,
    (),
    [],
    {},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("crc32c", [False, True])
def test_values_come_back_as_they_were(value: object, crc32c: bool) -> None:
    options = xckpt.SaveOptions(chunk_bytes=1000, crc32c=crc32c)
    xckpt.save("memory://values", {"v": value, "in": [value]}, overwrite=True, options=options)
    assert same(xckpt.load("memory://values"), {"v": value, "in": [value]})
    assert xckpt.open("memory://values").verify() == []
    if not isinstance(value, tuple | list | dict):
        for like in (None, value):  # a None takes any value
            state: dict[str, object] = {"v": like, "in": [like]}
            xckpt.load_into("memory://values", state)
            assert same(state, {"v": value, "in": [value]})


def test_containers_come_back(tmp_path: Path) -> None:
    state = {
        "list": [np.ones(2), [], [[3]]],
        "tuple": (1, (np.zeros(1),), ()),
        "point": Point(1.5, np.arange(2)),
        "ordered": OrderedDict(b=1, a=2),
        "keys": {"": 1, "0": 2, 0: 3, -5: 4, "a.b": 5, "a/b": 6, "%": 7, "zarr.json": np.ones(1)},
        ".": {"..": {"c": np.arange(2)}},
    }
    xckpt.save(tmp_path / "ckpt", state)
    loaded = xckpt.load(tmp_path / "ckpt")
    assert list(loaded) == list(state)
    assert same(loaded["list"], state["list"]) and same(loaded["tuple"], state["tuple"])
    assert same(loaded["keys"], state["keys"]) and same(loaded["."], state["."])
    assert type(loaded["point"]).__name__ == "Point" and same(
        list(loaded["point"]), [1.5, *state["point"][1:]]
    )
    like = xckpt.load(tmp_path / "ckpt", state)
    assert type(like["point"]) is Point and type(like["ordered"]) is OrderedDict


@pytest.mark.parametrize("state", [np.arange(5), np.array(3.0), 7, "text", None, [], (), {}, [1]])
def test_the_root_may_be_anything(tmp_path: Path, state: object) -> None:
    xckpt.save(tmp_path / "ckpt", state)
    assert same(xckpt.load(tmp_path / "ckpt"), state)
    assert same(xckpt.load(tmp_path / "ckpt", state), state)
    assert xckpt.open(tmp_path / "ckpt").verify() == []


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {
            "run": "a",
            "lr": 1e-3,
            "steps": [1, 2**63, -(10**30)],
            "nested": {"": {"ü": [None, True]}},
        },
        "text",
        [],
        {"big": ["x" * 1000] * 5000},
    ],
    ids=lambda metadata: repr(metadata)[:20],
)
def test_metadata_comes_back(metadata) -> None:
    saved = xckpt.save("memory://metadata", {"w": 1}, overwrite=True, metadata=metadata)
    assert saved.user_metadata == metadata
    assert xckpt.open("memory://metadata").user_metadata == metadata


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"loss": float("nan")}, "metadata/loss: nan is not a JSON number"),
        ([1, float("-inf")], "metadata/1: -inf is not a JSON number"),
        ({"a": {1: 2}}, "metadata/a: the key 1 is an int"),
        ({"a": {1, 2}}, "metadata/a: a builtins.set"),
        (b"x", "metadata: a builtins.bytes"),
        ({"a": np.float64(1)}, "metadata/a: a numpy.float64"),
        ({"a": np.zeros(2)}, "metadata/a: a numpy.ndarray"),
        ({"\ud800": 1}, "metadata: .*surrogate"),
        ([10**2000], "metadata/0: an int of more than"),
    ],
)
def test_metadata_that_is_no_json_is_refused_before_anything_is_written(
    tmp_path: Path, metadata, message: str
) -> None:
    with pytest.raises(xckpt.ManifestError, match=message):
        xckpt.save(tmp_path / "a" / "ckpt", {"w": np.zeros(2)}, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_contains_itself_is_refused() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    with pytest.raises(xckpt.ManifestError, match="contains itself"):
        xckpt.save("memory://cycle", {}, metadata=cycle)  # type: ignore[arg-type]


def test_load_into_fills_the_arrays_themselves(tmp_path: Path) -> None:
    state = {"w": np.arange(6.0), "b": [np.ones(2), 5], "t": (np.zeros(1), "x"), "step": 3}
    xckpt.save(tmp_path / "ckpt", state)
    target = {"w": np.zeros(6), "b": [np.zeros(2), 0], "t": (np.ones(1), ""), "step": 0}
    held = [target["w"], target["b"], target["b"][0], target["t"][0]]  # type: ignore[index]
    report = xckpt.load_into(tmp_path / "ckpt", target)
    assert report.complete and len(report.loaded) == 6
    assert same(target, state)
    now = [target["w"], target["b"], target["b"][0], target["t"][0]]  # type: ignore[index]
    assert all(a is b for a, b in zip(now, held, strict=True))


@pytest.mark.parametrize("saved, root", [(Point(3, 4.5), Point(0, 0.0)), (5, 0), ((1,), (0,))])
def test_a_root_that_cannot_change_is_refused(saved: object, root: Any) -> None:
    """Its values were read and dropped, without a word."""
    path = fresh_path()
    xckpt.save(path, saved)
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"the root.* cannot be changed in place"):
        xckpt.load_into(path, root)
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"the root.* cannot be changed in place"):
        xckpt.load_state_dict(root, xckpt.storage.ZarrStorageReader(path))


def test_a_tuple_of_what_can_change_is_filled() -> None:
    path = fresh_path()
    xckpt.save(path, (np.arange(3), {"step": 3, "betas": (0.9, 0.99)}))
    state: Any = (np.zeros(3, int), {"step": 0, "betas": (0.0, 0.0)})
    xckpt.load_into(path, state)
    assert state[0].tolist() == [0, 1, 2] and state[1] == {"step": 3, "betas": (0.9, 0.99)}


def test_load_like_reads_only_shape_and_dtype(tmp_path: Path) -> None:
    state = {"w": np.arange(6.0), "step": 3}
    xckpt.save(tmp_path / "ckpt", state)
    like = {"w": np.broadcast_to(np.zeros(1), (6,)), "step": 17}
    assert same(xckpt.load(tmp_path / "ckpt", like), state)
    assert like["step"] == 17 and not like["w"].any()


def test_every_difference_is_listed(tmp_path: Path) -> None:
    state = {"a": np.zeros((2, 3)), "b": np.zeros(4, np.int32), "c": 1, "d": np.zeros(2), "e": 5}
    xckpt.save(tmp_path / "ckpt", state)
    like = {"a": np.zeros((3, 2)), "b": np.zeros(4), "c": np.zeros(1), "d": 7, "new": np.zeros(1)}
    with pytest.raises(xckpt.TreeMismatchError) as caught:
        xckpt.load(tmp_path / "ckpt", like)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        *("a", "b", "c", "d", "new"),
        "e",
    ]
    assert "(2, 3) in the checkpoint, (3, 2) wanted" in caught.value.problems[0]
    assert "int32 in the checkpoint, float64 wanted" in caught.value.problems[1]


def test_not_strict_loads_what_is_shared(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ckpt", {"a": np.arange(3), "b": 1, "c": {"d": 4}})
    like = {"a": np.zeros(3, np.int64), "c": {"new": np.full(2, 9)}, "other": "kept"}
    loaded = xckpt.load(tmp_path / "ckpt", like, strict=False)
    assert same(loaded, {"a": np.arange(3), "c": {"new": np.full(2, 9)}, "other": "kept"})
    with pytest.raises(xckpt.TreeMismatchError, match="a: shape"):
        xckpt.load(tmp_path / "ckpt", {"a": np.zeros(4, np.int64)}, strict=False)


@pytest.mark.parametrize("chunk_bytes", [8, 8 << 20])
def test_cast(tmp_path: Path, chunk_bytes: int) -> None:
    array = np.linspace(-3, 3, 17)
    options = xckpt.SaveOptions(chunk_bytes=chunk_bytes)
    xckpt.save(tmp_path / "ckpt", {"w": array}, options=options)
    for dtype in ("float32", "float16", "bfloat16", "int32", "complex64"):
        like = {"w": np.zeros(17, DTYPES[dtype])}
        with pytest.raises(xckpt.TreeMismatchError, match=f"float64 in the .*, {dtype} wanted"):
            xckpt.load(tmp_path / "ckpt", like)
        loaded = xckpt.load(tmp_path / "ckpt", like, cast=True)["w"]
        assert same(loaded, array.astype(DTYPES[dtype]))
        xckpt.load_into(tmp_path / "ckpt", like, cast=True)
        assert same(like["w"], array.astype(DTYPES[dtype]))


def test_relative_paths_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for number, path in enumerate(["a/b", Path("c"), "~/d", "./e/", f"file://{tmp_path}/f"]):
        xckpt.save(path, {"n": number})
    places = ["a/b", "c", "home/d", "e", "f"]
    assert [xckpt.load(tmp_path / place)["n"] for place in places] == [0, 1, 2, 3, 4]
