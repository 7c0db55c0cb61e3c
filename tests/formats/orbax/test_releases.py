"""Checkpoints that five releases of Orbax wrote: read strictly, converted there and back."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import xckpt
from tests.formats.orbax.trees import CUSTOM, JSON, METRICS, keys, trees
from tests.formats.orbax_writers import quietly, v0, v1
from xckpt.convert import convert

FIXTURES = Path(__file__).parent / "fixtures"
RELEASES = ["0.4.8", "0.5.23", "0.7.0", "0.11.10", "0.12.8"]
NEW = ["0.11.10", "0.12.8"]
"""Those with custom metadata and random keys."""
EITHER_END = [
    pytest.param(name, marks=() if name in (RELEASES[0], RELEASES[-1]) else pytest.mark.thorough)
    for name in RELEASES
]
"""All are read by the default tier; what is read is written in one way, whoever wrote it."""
NAMES = ["optax", "train_state", "empty"]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def written(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What that release wrote."""
    folder = tmp_path_factory.mktemp(release)
    with tarfile.open(FIXTURES / f"orbax-{release}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@cache
def expected(release: str) -> dict[str, Any]:
    return {**trees(), "keys": keys()} if release in NEW else trees()


def assert_equal(found: Any, wanted: Any) -> None:
    """The same containers, dtypes and elements, the kinds of random keys included."""

    def leaves(tree: Any) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten(tree, is_leaf=lambda node: node is None)

    mine, theirs = leaves(found), leaves(wanted)
    assert mine[1] == theirs[1]
    for one, other in zip(mine[0], theirs[0], strict=True):
        if other is None:
            assert one is None
            continue
        assert one.dtype == other.dtype
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.array_equal(one, other)


def test_each_tree_is_read_strictly(written: Path, release: str) -> None:
    for name, tree in expected(release).items():
        assert_equal(xckpt.load(written / "single" / name, tree), tree)


@pytest.mark.parametrize("release", EITHER_END, indirect=True, scope="module")
@pytest.mark.parametrize("name", [*NAMES, "keys"])
def test_there_and_back_and_orbax_restores_it_into_its_own_targets(
    written: Path, release: str, tmp_path: Path, name: str
) -> None:
    tree = expected(release).get(name)
    if tree is None:
        assert not (written / "single" / name).exists()
        return
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    convert(written / "single" / name, ours)
    assert_equal(xckpt.load(ours, tree), tree)
    convert(ours, theirs, format="orbax")
    assert_equal(xckpt.load(theirs, tree), tree)
    with quietly():
        assert_equal(v0.StandardCheckpointer().restore(theirs, tree), tree)
        assert_equal(v1.load_pytree(theirs, tree), tree)
        arguments = v0.checkpoint_utils.construct_restore_args(tree)
        restored = v0.PyTreeCheckpointer().restore(theirs, item=tree, restore_args=arguments)
    assert_equal(restored, tree)


@pytest.mark.parametrize("name", NAMES)
def test_orbax_restores_what_xckpt_saved_from_such_a_tree(tmp_path: Path, name: str) -> None:
    """Here the checkpoint knows the classes: a state of no leaves is not None."""
    tree = trees()[name]
    xckpt.save(tmp_path / "ours", tree)
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    with quietly():
        assert_equal(v0.StandardCheckpointer().restore(tmp_path / "theirs", tree), tree)
    assert_equal(xckpt.load(tmp_path / "theirs", tree), tree)


def test_a_step_comes_with_its_items_of_json(written: Path, release: str, tmp_path: Path) -> None:
    step, state = written / "root" / "10", trees()["train_state"]
    assert_equal(xckpt.load(step, state), state)
    convert(step, tmp_path / "ours")
    user = xckpt.open(tmp_path / "ours").user_metadata
    assert isinstance(user, dict)
    items = {"dataset": {**JSON, "step": 10}, "metrics": METRICS}
    assert user == {"orbax.items": items, **(CUSTOM if release in NEW else {})}
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    convert(tmp_path / "theirs", tmp_path / "again")
    assert xckpt.open(tmp_path / "again").user_metadata == user


def test_custom_metadata_of_a_tree_alone_comes_along(
    written: Path, release: str, tmp_path: Path
) -> None:
    convert(written / "single" / "empty", tmp_path / "ours")
    user = xckpt.open(tmp_path / "ours").user_metadata
    assert user == (CUSTOM if release in NEW else None)


def test_roots_and_steps_are_found(written: Path) -> None:
    tree = trees()["optax"]
    for path in ("plain", "plain/3", "plain/3/default"):
        assert_equal(xckpt.load(written / path, tree), tree)
    with pytest.raises(xckpt.NotACheckpointError, match=r"holds 2 steps: 2, 10; .*root/10"):
        xckpt.load(written / "root")


def test_items_that_are_neither_trees_nor_json_are_named(tmp_path: Path) -> None:
    tree = {"w": np.arange(3)}
    with quietly(), v0.CheckpointManager(tmp_path / "root") as manager:
        args = v0.args.Composite(
            state=v0.args.StandardSave(tree), noise=v0.args.JaxRandomKeySave(jax.random.key(0))
        )
        manager.save(1, args=args)
        manager.wait_until_finished()
    with pytest.warns(UserWarning, match=r"noise: items that are neither a tree nor JSON"):
        found = xckpt.load(tmp_path / "root" / "1")
    assert np.array_equal(found["w"], tree["w"])


def test_an_aggregated_leaf_is_called_what_it_is(tmp_path: Path) -> None:
    """Orbax up to 0.6 wrote small leaves so; later ones read them, but write none."""
    with quietly():
        v0.PyTreeCheckpointer().save(tmp_path / "ckpt", {"w": np.arange(3)})
    path = tmp_path / "ckpt" / "_METADATA"
    text = path.read_text()
    altered = text.replace('"skip_deserialize": false', '"skip_deserialize": true')
    assert altered != text
    path.write_text(altered)
    with pytest.raises(xckpt.ManifestError, match=r"'w'.*lies in the msgpack file 'checkpoint'"):
        xckpt.load(tmp_path / "ckpt")
