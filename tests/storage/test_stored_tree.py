"""Sub-trees of an open checkpoint, its typed getters, its end, and targets from what is stored."""

from __future__ import annotations

import pickle
from collections import namedtuple
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import xckpt
from tests.support.steps import steps
from xckpt.core.metadata import BytesStorageMetadata, Metadata
from xckpt.core.part.selection import Selection
from xckpt.core.tree import flatten
from xckpt.storage.stored_tree import StoredTree

Pair = namedtuple("Pair", "mu nu")
WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tree") / "ckpt"
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "model"), None))
    state = {
        "model": {"w": jax.device_put(WEIGHT, sharding), "layers": [np.ones(2), np.zeros(3)]},
        "opt": Pair(np.full(4, 2.0), (1.5, [])),
        "key": jax.random.key(3),
        "note": "x" * 5000,
    }
    xckpt.save(path, state)
    return path


def test_the_name_of_a_container_gives_a_subtree(path: Path) -> None:
    checkpoint = xckpt.open(path)
    model = checkpoint["model"]
    assert isinstance(model, StoredTree)
    assert list(model) == ["w", "layers/0", "layers/1"] and len(model) == 3
    assert model.array("layers/0").name == "model/layers/0"
    layers = model["layers"]
    assert isinstance(layers, StoredTree)
    assert np.array_equal(layers.array("1")[:], np.zeros(3))
    assert repr(layers).startswith("<StoredTree ") and repr(layers).endswith(
        "layers: 2 leaves, 40 B>"
    )
    tree = layers.tree
    assert isinstance(tree, list) and np.array_equal(tree[0][:], np.ones(2))
    assert model["layers"] is layers and layers.tree is tree
    again = pickle.loads(pickle.dumps(layers))
    assert list(again) == ["0", "1"] and np.array_equal(again.array("1")[:], np.zeros(3))
    opt = checkpoint["opt"]
    assert isinstance(opt, StoredTree) and type(opt.tree).__name__ == "Pair"
    assert opt["nu/1"].tree == []  # type: ignore[union-attr]


def test_what_is_in_a_checkpoint(path: Path) -> None:
    checkpoint = xckpt.open(path)
    assert {"model", "model/w", "opt/nu/1", "note"} <= {
        name for name in ("model", "model/w", "opt/nu/1", "note", "x") if name in checkpoint
    }
    assert "x" not in checkpoint and 3 not in checkpoint
    with pytest.raises(KeyError, match="did you mean model/w"):
        checkpoint["modle/w"]
    with pytest.raises(KeyError, match="ckpt: model has no leaf 'v'"):
        checkpoint["model"]["v"]  # type: ignore[index]


@pytest.mark.parametrize("key", [3, None, 1.5, ("model", "w"), b"note"])
def test_what_is_no_name_is_no_leaf(path: Path, key: Any) -> None:
    checkpoint = xckpt.open(path)
    for mapping in (checkpoint, checkpoint["model"], checkpoint.metadata):
        assert key not in mapping and mapping.get(key) is None  # type: ignore[union-attr]
        with pytest.raises(KeyError) as raised:
            mapping[key]  # type: ignore[index]
        assert str(raised.value.args[0]).endswith(f"has no leaf {key!r}")


def test_the_root_is_a_subtree_too(path: Path) -> None:
    checkpoint = xckpt.open(path)
    root = checkpoint[""]
    assert isinstance(root, StoredTree) and list(root) == list(checkpoint)
    assert "ckpt: the root: " in repr(root)


names = st.sampled_from(["a", "b", "b/c", 0])
states = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=3), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(states, st.randoms())
def test_a_subtree_is_what_a_selection_of_all_would_give(state: object, random: Random) -> None:
    """Leaves of other formats come in any order."""
    flat = flatten({"root": state, "other": (1, {"a": 2})})
    order = random.sample([*flat.leaves], len(flat.leaves))
    metadata = Metadata(
        {name: BytesStorageMetadata("int") for name in order},
        dict(random.sample([*flat.containers.items()], len(flat.containers))),
        user_metadata="of the user",
    )
    whole = StoredTree(flat.leaves.__getitem__, metadata, "ckpt")  # pyright: ignore
    for name in whole._nodes.keys() - flat.leaves.keys():
        inside, expected = whole[name], Selection(name).of(metadata)
        assert isinstance(inside, StoredTree) and inside.metadata == expected
        assert [*inside] == [*expected] and [*inside.metadata.containers] == [*expected.containers]
        for below in inside._nodes:
            if isinstance(deeper := inside[below], StoredTree):
                assert deeper.metadata == Selection(below).of(expected)


def test_each_subtree_is_found_in_its_own_time() -> None:
    """Each took the time of the whole checkpoint, and so did each look at ``tree``."""

    def look(checkpoint: Any) -> None:
        for n, layer in enumerate(checkpoint.tree["layers"]):
            assert checkpoint["layers"][f"{n}"]["w"] == checkpoint.tree["layers"][n]["b"] == n
            assert layer == {"w": n, "b": n}

    each: list[float] = []
    for count in (50, 400):
        state = {"layers": [{"w": n, "b": n} for n in range(count)]}
        xckpt.save("memory://sub-trees", state, overwrite=True)
        each.append(steps(lambda: look(xckpt.open("memory://sub-trees"))) / count)
    assert each[1] < 1.1 * each[0], each


def test_getting_what_is_missing_looks_for_no_name_near_it() -> None:
    """Each took 60 ms where there are 20,000 leaves, for a message that nobody sees."""
    xckpt.save("memory://nothing-near", {f"layer{n}": n for n in range(50)})
    checkpoint = xckpt.open("memory://nothing-near")
    assert checkpoint.get("layer7") == 7 and checkpoint.get("level7", "none") == "none"
    assert steps(lambda: checkpoint.get("level7")) <= steps(lambda: checkpoint.get("layer7"))


def test_typed_getters(path: Path) -> None:
    checkpoint = xckpt.open(path)
    assert np.array_equal(checkpoint.array("model/w")[2:4, 1], WEIGHT[2:4, 1])
    assert checkpoint.value("opt/nu/0") == 1.5 and checkpoint.value("note") == "x" * 5000
    with pytest.raises(TypeError, match=r"'opt/nu/0' is the float 1\.5, not an array"):
        checkpoint.array("opt/nu/0")
    with pytest.raises(TypeError, match="'model' is a container, not an array"):
        checkpoint.array("model")
    with pytest.raises(TypeError, match=r"a float64 array of shape \(2,\), not a Python value"):
        checkpoint.value("model/layers/0")


def test_nothing_is_read_after_the_end(path: Path) -> None:
    with xckpt.open(path) as checkpoint:
        stored, whole = checkpoint.array("model/w"), checkpoint.array("model/layers/0")
        assert np.array_equal(stored[0], WEIGHT[0])
    for read in (lambda: stored[0], lambda: whole[:], lambda: checkpoint["note"]):
        with pytest.raises(ValueError, match="is closed; open it again"):
            read()
    assert stored.shape == (8, 8)


def test_targets_for_each_framework(path: Path) -> None:
    checkpoint = xckpt.open(path)
    for framework, kind in (("torch", torch.Tensor), ("numpy", np.ndarray), ("jax", jax.Array)):
        cast = framework == "jax"
        like = checkpoint.like(framework, cast=cast)
        loaded = xckpt.load(path, like, cast=cast)
        assert isinstance(loaded["model"]["w"], kind)
        assert np.array_equal(np.asarray(loaded["model"]["w"]), WEIGHT)
        assert loaded["note"] == "x" * 5000 and type(loaded["opt"]).__name__ == "Pair"
    part = checkpoint["model"].like("numpy")  # type: ignore[union-attr]
    assert np.array_equal(xckpt.load(path, part, at="model")["w"], WEIGHT)


def test_the_stored_sharding_on_another_mesh(path: Path) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    like = xckpt.open(path).like("jax", mesh=mesh, cast=True)
    loaded = xckpt.load(path, like, cast=True)
    weight = loaded["model"]["w"]
    assert weight.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(("data", "model"))), 2
    )
    assert np.array_equal(weight, WEIGHT)
    assert loaded["model"]["layers"][0].sharding.is_fully_replicated
    assert len(loaded["model"]["layers"][0].sharding.device_set) == 4
    assert loaded["key"] == jax.random.key(3)


def test_any_sharding(path: Path) -> None:
    mesh = jax.make_mesh((8,), ("x",))

    def rule(name: str, stored: xckpt.StoredArray) -> PartitionSpec:
        return PartitionSpec(None, "x") if len(stored.shape) == 2 else PartitionSpec()

    model = xckpt.open(path)["model"]
    assert isinstance(model, StoredTree)
    ruled = xckpt.load(path, model.like("jax", mesh=mesh, sharding=rule, cast=True), **PART)
    assert ruled["w"].sharding == NamedSharding(mesh, PartitionSpec(None, "x"))
    one = SingleDeviceSharding(jax.devices()[3])
    for arguments in ({"sharding": one}, {"device": "cpu:3"}, {"device": jax.devices()[3]}):
        loaded = xckpt.load(path, model.like("jax", cast=True, **arguments), **PART)
        assert loaded["w"].sharding == one and np.array_equal(loaded["w"], WEIGHT)


PART = {"at": "model", "cast": True}


def test_places_without_sense(path: Path) -> None:
    model = xckpt.open(path)["model"]
    assert isinstance(model, StoredTree)
    mesh = jax.make_mesh((8,), ("x",))
    with pytest.raises(ValueError, match="w: it was saved in shards along the mesh axes data, mod"):
        model.like("jax", mesh=mesh)
    for framework, arguments, message in (
        ("jax", {"mesh": "x"}, "mesh= takes a jax.sharding.Mesh, not a str"),
        ("jax", {"sharding": PartitionSpec("x")}, "a PartitionSpec needs mesh="),
        ("jax", {"sharding": "x"}, "takes a Sharding or PartitionSpec, got 'x'"),
        ("jax", {"mesh": mesh, "device": "cpu"}, "give device= or a mesh"),
        ("torch", {"mesh": mesh}, "mesh= takes a DeviceMesh"),
        ("torch", {"sharding": "x"}, "placements of torch, which need mesh="),
    ):
        with pytest.raises(TypeError, match=message):
            model.like(framework, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="host memory"):
        model.like("numpy", mesh=mesh)
