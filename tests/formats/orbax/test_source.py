"""Orbax's checkpoints as a source: Orbax wrote every one of them."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import xckpt
from tests.formats import orbax_writers
from tests.formats.arrays import check_source, filled, read
from xckpt.convert import convert
from xckpt.core.plan.load import DefaultLoadPlanner
from xckpt.engine.load import load_state
from xckpt.engine.ranks.group import LocalGroup
from xckpt.errors import ManifestError
from xckpt.formats.detect import open_source
from xckpt.formats.reader import SourceReader
from xckpt.formats.source import user_of

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4"),
)


def sharded(array: np.ndarray) -> jax.Array:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec("x", "y")
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))


WEIGHT = np.arange(192, dtype=np.float32).reshape(8, 24)
TREE: dict[str, Any] = {
    "a": {"w": WEIGHT, "b": filled("bfloat16", (3,))},
    "list": [np.arange(5), 7, 2.5, "hello", None, True],
    "tuple": (np.zeros((2, 3), np.int8),),
    "empty": {},
    "scalar": np.array(3, np.float32),
    "k/x.y": np.ones(2),
    "one": 1 << 40,
}
ARRAYS = {
    "a/w": WEIGHT,
    "a/b": TREE["a"]["b"],
    "list/0": np.arange(5),
    "tuple/0": np.zeros((2, 3), np.int8),
    "scalar": TREE["scalar"],
    "k%2Fx.y": np.ones(2),
}
VALUES = {
    "list/1": 7,
    "list/2": 2.5,
    "list/3": "hello",
    "list/4": None,
    "list/5": True,
    "one": 1 << 40,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint, as Orbax writes it by default; not to be changed."""
    tree = {**TREE, "a": {**TREE["a"], "w": sharded(WEIGHT)}}
    return orbax_writers.save(tmp_path_factory.mktemp("orbax") / "ckpt", tree)


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


@pytest.mark.parametrize("version, ocdbt, zarr3", orbax_writers.LAYOUTS)
def test_every_layout(tmp_path: Path, version: str, ocdbt: bool, zarr3: bool) -> None:
    tree = {**TREE, "a": {**TREE["a"], "w": sharded(WEIGHT)}}
    path = orbax_writers.save(tmp_path / "ckpt", tree, version, ocdbt, zarr3)
    assert any(path.rglob("manifest.ocdbt")) == ocdbt
    source = open_source(path)
    check_source(source, ARRAYS)
    assert source.values == VALUES
    assert [type(value) for value in source.values.values()] == list(map(type, VALUES.values()))
    assert source.chunks("a/w") == (4, 6)
    source.close()


@pytest.mark.parametrize("zarr3", [True, False])
def test_every_dtype(tmp_path: Path, zarr3: bool) -> None:
    """As NumPy arrays; TensorStore's zarr v2 has no int4."""
    names = [name for name in DTYPES if zarr3 or name != "int4"]
    tree = {name: np.asarray(filled(name, (3, 4))) for name in names}
    if zarr3:
        tree["int4"] = np.arange(-6, 6).reshape(3, 4).astype(jnp.int4)
    check_source(open_source(orbax_writers.save(tmp_path / "all", tree, zarr3=zarr3)), tree)


def test_numbers_of_its_metadata_that_json_lacks_stay(copied: Path, tmp_path: Path) -> None:
    """Metrics may be NaN; they became None. xckpt.json has no such numbers, so it refuses them."""
    custom = {"loss": math.nan, "best": [-math.inf, 1.5], "note": "\u00e9"}
    edit(copied, lambda document: document.update(custom_metadata=custom))
    user: Any = user_of(open_source(copied).metadata)
    assert math.isnan(user.pop("loss")) and user == {"best": [-math.inf, 1.5], "note": "\u00e9"}
    with pytest.raises(ManifestError, match="metadata/loss: nan is not a JSON number"):
        convert(copied, tmp_path / "ours")
    convert(copied, tmp_path / "again", format="orbax")
    again: Any = user_of(open_source(tmp_path / "again").metadata)
    assert math.isnan(again["loss"]) and again["best"] == [-math.inf, 1.5]
    convert(copied, tmp_path / "ours", metadata={"note": "none"})


def test_it_is_loaded_as_it_was(saved: Path) -> None:
    """Whole, with its lists; and into sharded arrays."""
    planner = DefaultLoadPlanner()
    reader = SourceReader(lambda: open_source(saved))
    load_state(None, reader, group=LocalGroup(), planner=planner)
    loaded: Any = planner.result()
    assert loaded["list"][1:] == [7, 2.5, "hello", None, True]
    assert loaded["empty"] == {} and loaded["one"] == 1 << 40
    planner = DefaultLoadPlanner(strict=False)
    reader = SourceReader(lambda: open_source(saved))
    like = {"a": {"w": sharded(np.zeros_like(WEIGHT))}}
    load_state(like, reader, group=LocalGroup(), planner=planner)
    result: Any = planner.result()
    assert result["a"]["w"].sharding == like["a"]["w"].sharding
    assert np.array_equal(result["a"]["w"], WEIGHT)


def test_a_training_state_with_random_keys(tmp_path: Path) -> None:
    """Optax's named tuples; a typed key comes back as one."""
    params = {"dense": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}}
    state = {"params": params, "opt": optax.adam(1e-3).init(params), "rng": jax.random.key(3)}
    source = open_source(orbax_writers.save(tmp_path / "ckpt", state))
    assert read(source, "opt/0/count") == 0
    assert source.specs["opt/0/mu/dense/kernel"].shape == (4, 2)
    assert source.specs["rng"].shape == (2,)
    planner = DefaultLoadPlanner(strict=False)
    reader = SourceReader(lambda: open_source(tmp_path / "ckpt"))
    load_state(state, reader, group=LocalGroup(), planner=planner)
    loaded: Any = planner.result()
    assert jax.random.key_data(loaded["rng"]).tolist() == [0, 3]
    assert type(loaded["opt"][0]) is type(state["opt"][0])


def test_steps_and_items(tmp_path: Path) -> None:
    """A step with one item and a root with one step need no more; others are named."""
    one = orbax_writers.save_steps(tmp_path / "one", 100, default={"w": np.arange(3)})
    for path in (one, one / "100", one / "100" / "default"):
        check_source(open_source(path), {"w": np.arange(3)})
    many = orbax_writers.save_steps(
        tmp_path / "many", 9, 10, params={"w": np.arange(3)}, opt={"m": np.arange(2)}
    )
    with pytest.raises(xckpt.NotACheckpointError, match=r"2 steps: 9, 10; give .*/10$"):
        open_source(many)
    with pytest.raises(xckpt.NotACheckpointError, match=r"items: opt, params; give .*/opt$"):
        open_source(many / "9")
    check_source(open_source(many / "10" / "opt"), {"m": np.arange(2)})
    (many / "9").rename(many / "9.orbax-checkpoint-tmp-3")
    with pytest.raises(
        xckpt.NotACheckpointError, match="has not finished writing it; load an older"
    ):
        open_source(many / "9.orbax-checkpoint-tmp-3")
    with pytest.raises(xckpt.NotACheckpointError, match="several items"):
        open_source(many)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_what_older_versions_do_not_say(tmp_path: Path, ocdbt: bool) -> None:
    """zarr 2, and a database where there is one."""
    path = orbax_writers.save(tmp_path / "ckpt", {"w": WEIGHT}, ocdbt=ocdbt, zarr3=False)
    edit(path, lambda document: [document.pop(key) for key in ("use_ocdbt", "use_zarr3")])
    check_source(open_source(path), {"w": WEIGHT})


def test_another_save_is_another_source(tmp_path: Path) -> None:
    identities = {
        open_source(orbax_writers.save(tmp_path / name, {"w": np.arange(3)})).identity()
        for name in ("a", "b")
    }
    assert len(identities) == 2
    assert open_source(tmp_path / "a").identity() in identities


def edit(path: Path, change: Callable[[dict], object]) -> None:
    document = json.loads((path / "_METADATA").read_text())
    change(document)
    (path / "_METADATA").write_text(json.dumps(document))


def entry(document: dict, name: str) -> dict:
    return document["tree_metadata"][f"('{name}',)"]


def climb(document: dict) -> None:
    document["use_ocdbt"] = False
    entry(document, "scalar")["key_metadata"][0]["key"] = "../../etc/passwd"


SECOND = {"key": "1", "key_type": 1}
"""A position in a list."""

FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no JSON": (lambda p: (p / "_METADATA").write_text("{"), xckpt.ManifestError, "damaged"),
    "a list": (
        lambda p: (p / "_METADATA").write_text("[]"),
        xckpt.ManifestError,
        "damaged: .*array",
    ),
    "an unknown kind": (
        lambda p: edit(p, lambda d: entry(d, "one")["value_metadata"].update(value_type="pickle")),
        xckpt.ManifestError,
        "'one'.*kind 'pickle', which is unknown",
    ),
    "no keys": (
        lambda p: edit(p, lambda d: entry(d, "one").pop("key_metadata")),
        xckpt.ManifestError,
        "'one'.*missing required field `key_metadata`",
    ),
    "a position that is none": (
        lambda p: edit(p, lambda d: entry(d, "one")["key_metadata"][0].update(key_type=1)),
        xckpt.ManifestError,
        "the position 'one'",
    ),
    "flags that are none": (
        lambda p: edit(p, lambda d: d.update(use_zarr3="yes")),
        xckpt.ManifestError,
        "damaged: .*bool.*use_zarr3",
    ),
    "a name that climbs": (
        lambda p: edit(p, climb),
        xckpt.ManifestError,
        "its name leads out of the folder",
    ),
    "the other zarr": (
        lambda p: edit(p, lambda d: d.update(use_zarr3=False)),
        xckpt.CorruptCheckpointError,
        "a/w: .*there is no .zarray",
    ),
    "no database": (
        lambda p: (p / "manifest.ocdbt").unlink(),
        xckpt.CorruptCheckpointError,
        "manifest.ocdbt is missing; restore it from a copy",
    ),
    "a damaged database": (
        lambda p: (p / "manifest.ocdbt").write_bytes(b"hello"),
        xckpt.CorruptCheckpointError,
        "ckpt",
    ),
    "strings missing": (
        lambda p: (p / "_strings.json").unlink(),
        xckpt.CorruptCheckpointError,
        "_strings.json: missing",
    ),
    "a string missing": (
        lambda p: (p / "_strings.json").write_text("{}"),
        xckpt.CorruptCheckpointError,
        "list/3 is not in it",
    ),
    "strings damaged": (
        lambda p: (p / "_strings.json").write_text("["),
        xckpt.ManifestError,
        "_strings.json: damaged",
    ),
    "two leaves of one name": (
        lambda p: edit(p, lambda d: d["tree_metadata"].update(again=entry(d, "scalar"))),
        xckpt.ManifestError,
        "ckpt: .*two leaves of the tree have this name",
    ),
    "a list with a gap": (
        lambda p: edit(p, lambda d: entry(d, "scalar")["key_metadata"].append(SECOND)),
        xckpt.ManifestError,
        "ckpt: .*called a list, but its keys are not 0, 1",
    ),
    "half a character in the metadata": (
        lambda p: edit(p, lambda d: d.update(custom_metadata=["\ud800"])),
        xckpt.ManifestError,
        "its metadata hold half a character",
    ),
    "notes damaged": (
        lambda p: (p / "array_metadatas" / "process_0").write_text("["),
        xckpt.ManifestError,
        "process_0: damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named(copied: Path, fault: str) -> None:
    damage, error, words = FAULTS[fault]
    damage(copied)
    with pytest.raises(error, match=words) as caught:
        open_source(copied, "orbax")
    assert copied.name in str(caught.value)


def sharding(size: int, inner: dict[str, object] | None = None) -> dict[str, object]:
    """A codec of zarr shards, whose chunks have that size."""
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    about = {
        "chunk_shape": [size],
        "codecs": [inner or plain],
        "index_codecs": [plain],
        "index_location": "end",
    }
    return {"name": "sharding_indexed", "configuration": about}


ARRAY_FAULTS: dict[str, dict[str, object]] = {
    "an absurd shape": {"shape": [1 << 40, 1 << 40]},
    "an absurd shape of nothing": {"shape": [1 << 40, 0, 1 << 40]},
    "a shape below 0": {"shape": [-1, 3]},
    "a dtype that kills TensorStore": {"data_type": "r16"},
    "giant chunks": {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 3]}}
    },
    "billions of chunks": {
        "shape": [1 << 33],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1]}},
    },
    "zarr shards of billions of chunks": {
        "shape": [1 << 27],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 27]}},
        "codecs": [sharding(1)],
    },
    "zarr shards within zarr shards": {
        "shape": [1 << 27],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 27]}},
        "codecs": [sharding(1 << 14, sharding(1))],
    },
    "chunks of nothing": {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}
    },
    "no chunks": {"chunk_grid": 3},
    "a group": {"node_type": "group"},
    "another version": {"zarr_format": 4},
    "a codec": {"codecs": [{"name": "exec"}]},
}


@pytest.mark.parametrize("fault", ARRAY_FAULTS)
def test_arrays_that_cannot_be_trusted(tmp_path: Path, fault: str) -> None:
    """All of them are listed, before memory is taken for any."""
    tree = {"v": np.zeros((2, 3)), "w": np.ones((2, 3)), "x": np.ones(1)}
    path = orbax_writers.save(tmp_path / "ckpt", tree, ocdbt=False)
    for name in ("v", "w"):
        document = json.loads((path / name / "zarr.json").read_text())
        (path / name / "zarr.json").write_text(json.dumps({**document, **ARRAY_FAULTS[fault]}))
    with pytest.raises(xckpt.CorruptCheckpointError) as caught:
        open_source(path)
    assert [line[:2] for line in caught.value.problems] == ["v:", "w:"]


def test_chunks_that_are_missing_or_damaged(tmp_path: Path) -> None:
    tree = {"v": np.zeros((2, 3)), "w": np.ones((2, 3))}
    path = orbax_writers.save(tmp_path / "ckpt", tree, ocdbt=False)
    [chunk] = [each for each in (path / "w" / "c").rglob("*") if each.is_file()]
    [other] = [each for each in (path / "v" / "c").rglob("*") if each.is_file()]
    chunk.write_bytes(chunk.read_bytes()[:-4])
    other.unlink()
    source = open_source(path)
    for name in ("v", "w"):
        with pytest.raises(xckpt.CorruptCheckpointError, match=rf"/{name}: \[0, 2\) x \[0, 3\)"):
            read(source, name)
    edit(path, lambda document: document.update(store_array_data_equal_to_fill_value=False))
    assert not read(open_source(path), "v").any()


def test_jax_and_orbax_are_not_needed(saved: Path) -> None:
    script = (
        "import sys\n"
        "from xckpt.formats.detect import open_source\n"
        f"print(len(open_source({str(saved)!r}).specs))\n"
        "assert not {'jax', 'orbax', 'torch'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(len(ARRAYS))
