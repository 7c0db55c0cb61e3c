"""Which keys are a checkpoint's: all that a save writes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given

import xckpt
from tests.support.examples import examples
from tests.support.manifests import manifests
from tests.support.time_limit import ALLOWANCE
from xckpt.core.manifest.entries import Manifest, TensorEntry, arrays
from xckpt.core.manifest.own_keys import BY_SHAPE, OwnKeys, object_sizes, own_among
from xckpt.core.manifest.pieces import Pieces
from xckpt.options import SaveOptions

LEAVES = (
    TensorEntry("model/w", "int8", (4,), chunk=(2,)),
    TensorEntry("model/c", "int8", (4,), chunk=(2,)),
    TensorEntry("scalar", "int8", (), chunk=()),
    TensorEntry("t", "int8", (3,), pieces=Pieces.listed([((0,), (3,), (3,))])),
    TensorEntry("s", "int8", (9,), pieces=Pieces.listed([((0,), (3,), (3,)), ((3,), (6,), (6,))])),
)
OWN = OwnKeys.of(Manifest(LEAVES, ""))


@pytest.mark.parametrize(
    "key",
    [
        "xckpt.json",
        "xckpt.json.__lock",
        "xckpt.digests",
        "zarr.json",
        "xckpt.saving",
        ".generations/1/w/c/0",
        "model/zarr.json",
        "model/w/zarr.json",
        "model/w/c/0",
        "model/w/c/1.__lock",
        "model/c/c/1",
        "scalar/c",
        "t/zarr.json",
        "t/0/zarr.json",
        "t/0/c/0",
        "s/1/c/0.__lock",
    ],
)
def test_these_are_the_checkpoints(key: str) -> None:
    assert OWN.owns(key) and OWN.needs(key) and BY_SHAPE.owns(key)


@pytest.mark.parametrize(
    "key",
    [
        "config.json",
        "notes/zarr.json",
        "model/w.txt",
        "model/w/notes.txt",
        "other/c/0",
        "model/vocab.json",
        "xckpt.json.bak",
        "t/1/c/0",
        "t/00/c/0",
        "t/x/zarr.json",
        "s/-1/c/0",
        f"s/{'9' * 5000}/c/0",
        "sub/xckpt.json",
        "xckpt.packs/notes.txt",
        f"xckpt.packs/{'0' * 31}.png",
    ],
)
def test_these_are_the_users(key: str) -> None:
    assert not OWN.owns(key) and not OWN.needs(key)


@pytest.mark.parametrize(
    "key",
    [
        *("model", "model/w", "model/w/c/notes", "scalar", "t", "t/0", "s/1", "scalar/c/notes"),
        *("model/w/c/٣", "model/w/c/01", "model/w/c/1/²"),
    ],
)
def test_these_names_are_needed_by_folders_or_below_files(key: str) -> None:
    assert not OWN.owns(key) and OWN.needs(key)


def test_a_generation_has_nothing_outside_of_it() -> None:
    own = OwnKeys.of(Manifest(LEAVES, "", root=".generations/1"))
    assert not own.owns("zarr.json") and own.owns(".generations/1/zarr.json")


@given(manifests())
@examples(30)
def test_every_object_that_a_manifest_implies_is_its_own(manifest: Manifest) -> None:
    manifest = msgspec.structs.replace(manifest, root="")
    own = OwnKeys.of(manifest)
    assert all(own.owns(key) for key, _ in object_sizes(manifest))
    for array in arrays(manifest):
        assert own.is_array(array.path) == (array.place is None)


@pytest.mark.parametrize("crc32c", [False, True])
def test_all_that_a_save_writes_is_its_own(tmp_path: Path, crc32c: bool) -> None:
    state = {"m": {"w": np.arange(50), "x": 1}, "long": "x" * 10_000, "l": [np.ones((3, 3)), 2.0]}
    options = SaveOptions(chunk_bytes=64, shard_bytes=128, crc32c=crc32c)
    xckpt.save(tmp_path / "c", state, options=options)
    own = OwnKeys.of(xckpt.open(tmp_path / "c").manifest)
    for each, _, names in os.walk(tmp_path / "c"):
        for name in names:
            key = (Path(each) / name).relative_to(tmp_path / "c").as_posix()
            assert own.owns(key) and BY_SHAPE.owns(key), key


def test_own_keys_are_found_among_others_with_the_folders_above_them() -> None:
    keys = ["w", "w/c", "w/c/0", "w/zarr.json", "notes", "notes/a.txt", "xckpt.json", "old/c/1"]
    own = OwnKeys(frozenset({"w"}), frozenset({""}))
    assert own_among(keys, [own], "xckpt.json") == ["w", "w/c", "w/c/0", "w/zarr.json"]


@pytest.mark.thorough  # of few keys: above
def test_own_keys_are_found_in_linear_time() -> None:
    keys = [f"w/c/{number}" for number in range(20_000)]
    before = time.process_time()
    assert own_among(keys, [OwnKeys(frozenset({"w"}))]) == keys
    assert time.process_time() - before < 5 * ALLOWANCE
