"""The zarr.json documents: what zarr-python reads out of them is what the manifest says."""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

import xckpt.zarr_dtypes  # noqa: F401  (registers the types)
from tests.support.examples import examples
from tests.support.manifests import example, manifests
from tests.support.steps import steps
from xckpt.core.dtypes import EXTENDED, numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import Grid, count_cells
from xckpt.core.manifest import entries
from xckpt.core.manifest.entries import (
    BytesEntry,
    DocumentTree,
    Manifest,
    TensorEntry,
    ValueEntry,
    arrays,
    documents,
    is_packed,
    leaf_arrays,
)
from xckpt.core.manifest.objects import check_objects, count_leaf_objects
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.rules import count_leaf_packed
from xckpt.core.names import zarr_path
from xckpt.errors import PlanError

Group = zarr.Group


def stored(manifest: Manifest) -> MemoryStore:
    """A store that holds a checkpoint's documents and nothing else."""
    store = MemoryStore()
    make = default_buffer_prototype().buffer.from_bytes

    async def fill() -> None:
        for key, content in documents(manifest):
            await store.set(key, make(content))

    asyncio.run(fill())
    return store


def opened(manifest: Manifest) -> tuple[Group, Group]:
    """The root group as it is opened by default, and without consolidated metadata."""
    store = stored(manifest)
    return (
        zarr.open_group(store, mode="r", zarr_format=3),
        zarr.open_group(store, mode="r", zarr_format=3, use_consolidated=False),
    )


@given(manifests())
@examples(40)
def test_zarr_python_finds_every_array_as_the_manifest_has_it(manifest):
    for group in opened(manifest):
        for array in arrays(manifest):
            found = group[array.path]
            assert isinstance(found, zarr.Array)
            assert found.shape == array.shape and found.dtype == numpy_dtype(array.dtype)
            assert found.chunks == array.chunk
            assert found.shards == array.shard
            names = found.metadata.to_dict().get("dimension_names")
            assert (names is None) is (manifest.zarr_json == 1)
            assert names is None or (
                isinstance(names, tuple) and len(set(names)) == len(array.shape)
            )
            assert found.nchunks == array.count


@given(manifests())
@examples(20)
def test_the_consolidated_tree_is_the_whole_tree(manifest):
    consolidated, plain = opened(manifest)
    lacking = {array.dtype for array in arrays(manifest)} & set(EXTENDED)
    is_listed = consolidated.metadata.consolidated_metadata is not None
    assert is_listed is (manifest.zarr_json == 1 or not lacking)
    if not is_listed:
        attributes: Any = consolidated.attrs["xckpt"]
        assert attributes["data_types"] == sorted(lacking)
    names = {name for name, _ in consolidated.members(max_depth=None)}
    with warnings.catch_warnings():
        assert names == {name for name, _ in plain.members(max_depth=None)}
    expected = {array.path for array in arrays(manifest)}
    groups = {
        "/".join(path.split("/")[:n]) for path in expected for n in range(1, 1 + path.count("/"))
    }
    assert names == expected | groups


def test_a_leaf_in_pieces_is_a_group_that_says_where_its_pieces_are():
    group, _ = opened(example())
    pieces = group["model/pieces"]
    assert isinstance(pieces, Group) and pieces.attrs["shape"] == [101, 4]
    offsets = {name: array.attrs["offset"] for name, array in pieces.arrays()}
    assert offsets == {"0": [0, 0], "1": [7, 0], "2": [20, 0]}


def test_the_root_of_very_many_pieces_does_not_repeat_them(monkeypatch):
    tensors = [leaf for leaf in example().leaves if isinstance(leaf, TensorEntry)]
    known = [msgspec.structs.replace(leaf, dtype="float32") for leaf in tensors]
    whole = msgspec.structs.replace(example(), leaves=tuple(known), containers={})
    root = dict(documents(whole))["zarr.json"]
    monkeypatch.setattr(entries, "MANY_PIECES", 3)  # as many as there are
    assert dict(documents(whole))["zarr.json"] == root
    monkeypatch.setattr(entries, "MANY_PIECES", 2)
    *others, (_, alone) = documents(whole)
    assert "consolidated_metadata" not in json.loads(alone)
    assert len(alone) < 1000 < len(root)
    assert {key for key, _ in others} == {key for key, _ in documents(whole)} - {"zarr.json"}
    _, group = opened(whole)
    pieces = group["model/pieces"]
    assert isinstance(pieces, Group) and len(dict(pieces.arrays())) == 3
    first = msgspec.structs.replace(whole, zarr_json=1)
    assert "consolidated_metadata" in json.loads(dict(documents(first))["zarr.json"])


def test_every_chunk_has_a_checksum_where_the_manifest_asks_for_one():
    texts = {key: json.loads(content) for key, content in documents(example())}
    for array in arrays(example()):
        codecs = texts[f"{array.path}/zarr.json"]["codecs"]
        if array.shard is not None:
            (sharding,) = codecs
            assert sharding["configuration"]["chunk_shape"] == list(array.chunk)
            assert [c["name"] for c in sharding["configuration"]["index_codecs"]] == [
                "bytes",
                "crc32c",
            ]
            codecs = sharding["configuration"]["codecs"]
        assert [codec["name"] for codec in codecs] == ["bytes", "crc32c"]


@given(manifests())
@examples(30)
def test_documents_are_a_function_of_the_manifest(manifest):
    """The same bytes each time, each key once, the root's last; a leaf's own depend on it alone."""
    made = list(documents(manifest))
    assert made == list(documents(manifest))
    keys = [key for key, _ in made]
    assert len(set(keys)) == len(keys) and keys[-1] == "zarr.json"
    for key, content in made:
        assert json.loads(content)["zarr_format"] == 3
        assert key == "zarr.json" or key.endswith("/zarr.json")
    others = [
        leaf
        for leaf in manifest.leaves
        if not isinstance(leaf, ValueEntry | BytesEntry) and leaf.pieces is None
    ]
    if others:
        alone = msgspec.structs.replace(manifest, leaves=(others[0],), containers={})
        key = f"{zarr_path(others[0].name)}/zarr.json"
        assert dict(documents(alone))[key] == dict(made)[key]


def test_values_have_no_place_in_zarr():
    keys = [key for key, _ in documents(example())]
    assert not any(key.startswith("opt/0") for key in keys) and "opt/1/zarr.json" in keys


def test_leaves_of_one_folder_need_not_stand_together():
    """zarr-python loses children that stand apart in consolidated metadata."""
    names = ("a/x", "b/y", "a/z/w", "c", "a/y", "b/x")
    leaves = tuple(TensorEntry(name, "int8", (2,), chunk=(2,)) for name in names)
    consolidated, plain = opened(Manifest(leaves, ""))
    for group in (consolidated, plain):
        found = {
            path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)
        }
        assert found == set(names)


def test_documents_that_come_in_parts_are_those_that_come_at_once():
    """Each is made once: the second part repeats none of the first."""
    manifest = example()
    leaves = manifest.leaves
    with_chunks = {f"{array.path}/zarr.json" for array in arrays(manifest) if array.count}
    for cut in range(len(leaves) + 1):
        tree = DocumentTree(manifest.codecs, manifest.pack_bytes)
        parts = [*tree.add(leaves[:cut]), *tree.add(leaves[cut:]), ("zarr.json", tree.root())]
        assert len(dict(parts)) == len(parts)
        others = {key: text for key, text in documents(manifest) if key not in with_chunks}
        assert dict(parts) == others


def test_leaves_that_are_packed_and_alike_take_a_few_steps_each():
    leaves = [TensorEntry(f"layers.{n}/w", "int8", (4,), chunk=(4,)) for n in range(200)]
    tree = DocumentTree((), 4)
    assert steps(lambda: [*tree.add(leaves)]) < 6 * len(leaves)
    assert b'"packed_arrays": 200' in tree.root()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(0, 400),
    st.booleans(),
)
def test_packed_pieces_are_counted_as_one_by_one(heights, pack_bytes, sharded):
    rows, start = [], 0
    for height, chunk in heights:
        shard = ((2 * chunk, 4),) if sharded else ()
        rows.append(((start, 0), (height, 4), (chunk, 4), *shard))
        start += height
    pieces = Pieces.listed(rows)
    leaf = TensorEntry("w", "int16", (start, 4), pieces=pieces)
    in_packs = [array for array in leaf_arrays(leaf) if is_packed(array, pack_bytes)]
    others = [array for array in leaf_arrays(leaf) if not is_packed(array, pack_bytes)]
    packed = len(in_packs)
    assert pieces.packed(pack_bytes // 2) == packed
    assert count_leaf_packed(leaf, pack_bytes) == sum(array.count for array in in_packs)
    objects = sum(count_cells(array.shape, array.unit) for array in others)
    assert count_leaf_objects(leaf, pack_bytes) == objects
    manifest = Manifest((leaf,), "", pack_bytes=pack_bytes, zarr_json=2)
    made = dict(documents(manifest))
    root = json.loads(made["zarr.json"])
    assert root["attributes"].get("xckpt", {}).get("packed_arrays", 0) == packed
    assert ("w/zarr.json" in made) == (packed < len(rows))
    assert len(made) == 1 + (packed < len(rows)) + len(rows) - packed


def test_too_many_pieces_are_refused_without_an_array_for_each():
    count = 1_200_000
    starts = np.arange(count)[:, None]
    pieces = Pieces.of(Grid(Boxes(starts, np.ones_like(starts)), np.ones_like(starts)))
    leaf = TensorEntry("w", "int8", (count,), pieces=pieces)
    began = time.process_time()
    with pytest.raises(
        PlanError, match=r"1,200,000 objects.* w alone has 1,200,000 in 1,200,000 p"
    ):
        check_objects(Manifest((leaf,), ""))
    assert time.process_time() - began < 1.5
