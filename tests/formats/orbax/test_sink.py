"""Checkpoints that Orbax itself restores: v0 and v1, as they are and into sharded arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import xckpt
from tests.formats.arrays import check_source, filled, same_bits
from tests.formats.orbax_writers import quietly, save, v0, v1
from tests.formats.sinks import write
from xckpt.convert import convert
from xckpt.core.dtypes import DTYPES
from xckpt.formats.detect import open_source
from xckpt.formats.orbax import sink
from xckpt.formats.orbax.sink import OrbaxSink
from xckpt.formats.sink import Contents
from xckpt.mapping.spec import TensorSpec

ARRAYS = {
    "a/w": np.arange(120, dtype=np.float32).reshape(12, 10),
    "a/0/k": filled("bfloat16", (2,)),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(3, np.int32),
    "zeros": np.zeros(4),
}
VALUES: dict[str, Any] = {"step": 7, "rate": 0.5, "on": True, "name": "h\u00e9", "none": None}

RESTORE: dict[str, Callable[[Path], Any]] = {
    "v0": lambda path: v0.PyTreeCheckpointer().restore(path),
    "v0 standard": lambda path: v0.StandardCheckpointer().restore(path),
    "v1": v1.load_pytree,
}


def leaves(tree: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {above[:-1]: tree}
    return {name: leaf for k, v in tree.items() for name, leaf in leaves(v, f"{above}{k}/").items()}


@pytest.mark.parametrize("chunk_bytes", [8, 1 << 23])
@pytest.mark.parametrize("way", RESTORE)
def test_orbax_restores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, chunk_bytes: int
) -> None:
    monkeypatch.setattr(sink, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "ckpt"
    write(OrbaxSink(path), ARRAYS, VALUES, {"by": "me"})
    with quietly():
        found = leaves(RESTORE[way](path))
    assert set(found) == set(ARRAYS) | set(VALUES)
    for name, array in ARRAYS.items():
        assert same_bits(np.asarray(found[name]), array), name
    for name, value in VALUES.items():
        assert found[name] == value and type(found[name]) is type(value)
    source = open_source(path)
    check_source(source, ARRAYS)
    assert source.values == VALUES
    assert source.metadata == {"by": "me"}
    assert os.listdir(tmp_path) == ["ckpt"]


def test_every_dtype(tmp_path: Path) -> None:
    packed = ("int2", "int4", "float4_e2m1fn")
    arrays = {
        name: np.ones((3, 4), DTYPES[name]) if name in packed else filled(name, (3, 4))
        for name in DTYPES
    }
    write(OrbaxSink(tmp_path / "all"), arrays)
    with quietly():
        found = RESTORE["v0"](tmp_path / "all")
    for name, array in arrays.items():
        assert same_bits(found[name], array), name


def test_a_manager_restores_it_into_sharded_arrays(tmp_path: Path) -> None:
    write(OrbaxSink(tmp_path / "root" / "5" / "default"), {"a/w": ARRAYS["a/w"]}, {"step": 7})
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y", None))
    like = {"a": {"w": jax.ShapeDtypeStruct((12, 10), np.float32, sharding=sharding)}, "step": 0}
    with quietly(), v0.CheckpointManager(tmp_path / "root") as manager:
        assert manager.all_steps() == [5]
        found = manager.restore(5, args=v0.args.StandardRestore(like))
        latest: Any = v1.load_pytree(tmp_path / "root" / "5" / "default", like)
    for tree in (found, latest):
        assert tree["a"]["w"].sharding == sharding and tree["step"] == 7
        assert np.array_equal(tree["a"]["w"], ARRAYS["a/w"])


def test_what_is_refused(tmp_path: Path) -> None:
    """Everything at once, and nothing is left behind."""
    one = TensorSpec((2,), "int8")
    cases: list[tuple[dict[str, TensorSpec], dict[str, object], list[str]]] = [
        ({}, {"a": b"x", "b": 1j, "c": 1 << 70, "": 1}, ["a", "b", "c", "the root"]),
        ({"a/b": one, "a.b": one}, {}, ["a.b"]),
        ({"_METADATA": one, "..": one, "a%2F": one}, {}, ["..", "_METADATA", "a%2F"]),
        ({"a\ud800": one}, {}, ["a\\ud800"]),
        ({"a": one, "a%2Fb": one}, {}, ["a%2Fb"]),
        ({"ä" * 127: one, "ä" * 128: one}, {"d" * 256: 1, "s" * 256: ""}, ["d" * 256, "ä" * 128]),
    ]
    for specs, values, names in cases:
        with pytest.raises(xckpt.UnsupportedLeafError) as caught:
            OrbaxSink(tmp_path / "ckpt").prepare(Contents(specs, values))
        assert sorted({line.partition(":")[0] for line in caught.value.problems}) == sorted(names)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_orbax_itself_is_replaced_and_ours_is_not(tmp_path: Path) -> None:
    arrays = {"w": np.arange(3)}
    save(tmp_path / "theirs", arrays)
    xckpt.save(tmp_path / "ours", arrays)
    with pytest.raises(xckpt.CheckpointExistsError, match="not a checkpoint of Orbax"):
        write(OrbaxSink(tmp_path / "ours", overwrite=True), arrays)
    write(OrbaxSink(tmp_path / "theirs", overwrite=True), {"w": np.arange(5)})
    check_source(open_source(tmp_path / "theirs"), {"w": np.arange(5)})


def test_an_altered_chunk_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    write(OrbaxSink(path), {"w": np.arange(100)})
    [chunk] = [each for each in (path / "w" / "c").rglob("*") if each.is_file()]
    data = bytearray(chunk.read_bytes())
    data[50] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"/w: \[0, 100\)"):
        check_source(open_source(path), {"w": np.arange(100)})


@pytest.mark.parametrize(
    "user", ["by me", [1], 5, {"by": "me"}, {"run": [3]}, {"xckpt.user": "x"}], ids=repr
)
def test_user_metadata_of_any_type_come_back(tmp_path: Path, user: Any) -> None:
    xckpt.save(tmp_path / "ckpt", {"w": np.arange(3)})
    convert(tmp_path / "ckpt", tmp_path / "theirs", format="orbax", metadata=user)
    assert xckpt.open(tmp_path / "theirs").metadata.user_metadata == user
    convert(tmp_path / "theirs", tmp_path / "back")
    assert xckpt.open(tmp_path / "back").metadata.user_metadata == user
