"""safetensors in and out: the library, torch and transformers are the oracles."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import xckpt
from tests.formats.arrays import check_source, filled, read, same_bits
from tests.formats.sinks import specs_of, write
from tests.models.oracle import transformers
from tests.support.examples import examples
from tests.support.tilings import guillotine_tilings, region
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.formats.detect import open_source
from xckpt.formats.safetensors.header import NAMES
from xckpt.formats.safetensors.sink import SafetensorsSink
from xckpt.formats.safetensors.source import SafetensorsSource
from xckpt.formats.sink import Contents
from xckpt.mapping.spec import TensorSpec

EVERY = {f"layers.0/{name}": filled(name, (3, 4)) for name in sorted(NAMES.values())}
EVERY |= {"scalar": filled("float32", ()), "empty": filled("int8", (3, 0, 2))}


def flat(name: str) -> str:
    return name.replace("/", ".")


def deserialized(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = safetensors.deserialize(path.read_bytes())
    return {n: (NAMES[t["dtype"]], tuple(t["shape"]), bytes(t["data"])) for n, t in found}


def test_every_dtype_out_and_in_again(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    write(SafetensorsSink(path), EVERY, {"step": 7, "name": "run\u00e9"})
    expected = {flat(name): (a.dtype.name, a.shape, a.tobytes()) for name, a in EVERY.items()}
    assert deserialized(path) == expected
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["format"] == "pt"
    source = open_source(path)
    check_source(source, {flat(name): array for name, array in EVERY.items()})
    assert source.values == {"step": 7, "name": "run\u00e9"}
    assert source.metadata == {}
    assert os.listdir(tmp_path) == ["all.safetensors"]


def test_what_torch_writes(tmp_path: Path) -> None:
    tensors = {
        dtype: torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
        for dtype in sorted(NAMES.values())
        if dtype != "float8_e8m0fnu"
    }
    tensors["float32"] = tensors["float32"].T.contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "t.safetensors", {"format": "pt", "by": "me"})
    source = SafetensorsSource(tmp_path / "t.safetensors")
    check_source(source, {name: bits(tensor) for name, tensor in tensors.items()})
    assert source.metadata == {"by": "me"}


def bits(tensor: torch.Tensor) -> NDArray:
    """A torch tensor as NumPy has it, by its bytes."""
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    return np.frombuffer(raw, dtype).reshape(tuple(tensor.shape))


@pytest.mark.parametrize("most", [1, 100, 10**9])
def test_sharded_out_and_in_again(tmp_path: Path, most: int) -> None:
    folder = tmp_path / "model"
    write(SafetensorsSink(folder, max_shard_bytes=most), EVERY, {"step": 7})
    names = sorted(os.listdir(folder))
    if most == 10**9:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {flat(name) for name in EVERY}
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in EVERY.values())
        assert names == sorted({*index["weight_map"].values(), "model.safetensors.index.json"})
        for name, file in index["weight_map"].items():
            assert name in deserialized(folder / file)
            assert len(deserialized(folder / file)) == 1 or most == 100
    for path in (folder, folder / "model.safetensors.index.json")[: 1 + (most < 10**9)]:
        source = open_source(path)
        check_source(source, {flat(name): array for name, array in EVERY.items()})
        assert source.values == {"step": 7}


@given(st.data())
@examples(50, 1000)
def test_boxes_in_any_order_and_twice(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    array = filled("bfloat16", (5, 6, 3))
    tiling = data.draw(guillotine_tilings(array.shape))
    order = data.draw(st.permutations([*tiling, tiling[0]]))
    path = tmp_path_factory.mktemp("boxes") / "w.safetensors"
    sink = SafetensorsSink(path)
    sink.prepare(Contents(specs_of({"w": array, "v": array})))
    for name in ("w", "v"):
        for box in order:
            sink.write(name, ChunkStorageMetadata(*box), array[region(box)])
    sink.commit()
    check_source(SafetensorsSource(path), {"w": array, "v": array})


def test_other_files_are_kept(tmp_path: Path) -> None:
    """Others than safetensors in a folder, and a folder where a file is to be."""
    arrays = {"w": np.arange(3)}
    write(SafetensorsSink(tmp_path / "model"), arrays)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(xckpt.CheckpointExistsError, match=r"other files too: config\.json"):
        write(SafetensorsSink(tmp_path / "model", overwrite=True), arrays)
    (tmp_path / "folder.safetensors").mkdir()
    for overwrite in (False, True):
        with pytest.raises(xckpt.CheckpointExistsError, match="is a folder"):
            write(SafetensorsSink(tmp_path / "folder.safetensors", overwrite=overwrite), arrays)
    assert len(os.listdir(tmp_path)) == 2


def test_what_safetensors_cannot_carry(tmp_path: Path) -> None:
    specs = {
        "a": TensorSpec((2,), "int4"),
        "b": TensorSpec((2,), "complex128"),
        "c": TensorSpec((2,), "int8"),
    }
    sink = SafetensorsSink(tmp_path / "folder", max_shard_bytes=1)
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        sink.prepare(Contents(specs))
    assert [line.partition(":")[0] for line in caught.value.problems] == ["a", "b"]
    assert os.listdir(tmp_path) == []


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of three files with an index."""
    arrays = {"a": np.arange(4), "b": np.arange(5), "c": np.arange(6)}
    write(SafetensorsSink(tmp_path / "model", max_shard_bytes=1), arrays)
    return tmp_path / "model"


FIRST, SECOND = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
INDEX = "model.safetensors.index.json"


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def cut(folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-3])


FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a file is missing": (
        lambda f: (f / SECOND).unlink(),
        xckpt.CorruptCheckpointError,
        f"b: its file {SECOND} is missing",
    ),
    "the index names what no file can be called": (
        lambda f: edit(f, lambda names: names.update(a="x" * 100_000)),
        xckpt.CorruptCheckpointError,
        f"a: its file {'x' * 100} is missing",
    ),
    "the index leaves a file out": (
        lambda f: edit(f, lambda names: names.pop("b")),
        xckpt.CorruptCheckpointError,
        f"{SECOND} belongs to the series, but the index does not name it",
    ),
    "the index promises too much": (
        lambda f: edit(f, lambda names: names.update(d=FIRST)),
        xckpt.ManifestError,
        f"d: the index says that it is in {FIRST}, which does not hold it",
    ),
    "the index is wrong": (
        lambda f: edit(f, lambda names: names.update(a=SECOND, b=FIRST)),
        xckpt.ManifestError,
        f"a: the index says that it is in {SECOND}, which does not",
    ),
    "the index climbs": (
        lambda f: edit(f, lambda names: names.update(a="../../etc/passwd")),
        xckpt.ManifestError,
        "a: its file '../../etc/passwd' leads out of the folder",
    ),
    "the index is absolute": (
        lambda f: edit(f, lambda names: names.update(a="/etc/passwd")),
        xckpt.ManifestError,
        "a: its file '/etc/passwd' leads out",
    ),
    "the index names numbers": (
        lambda f: edit(f, lambda names: names.update(a=3)),
        xckpt.ManifestError,
        "a: its file '3' is not a name",
    ),
    "the index is damaged": (
        lambda f: (f / INDEX).write_text("{" * 9),
        xckpt.ManifestError,
        "the index is damaged",
    ),
    "the index is empty": (
        lambda f: (f / INDEX).write_text("[]"),
        xckpt.ManifestError,
        "no weight_map",
    ),
    "there are two": (
        lambda f: (f / f"other{INDEX[5:]}").write_text("{}"),
        xckpt.NotACheckpointError,
        "indexes found: model.safetensors.index.json, other",
    ),
    "a file is truncated": (cut, xckpt.ManifestError, f"{FIRST}: a: truncated"),
    "a file is a folder": (
        lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()),
        xckpt.CorruptCheckpointError,
        f"a: its file {FIRST} is missing",
    ),
    "a whole file that the index does not name": (
        lambda f: (f / "model.safetensors").write_bytes((f / FIRST).read_bytes()),
        xckpt.NotACheckpointError,
        "holds model.safetensors and model.safetensors.index.json, which does not name it",
    ),
    "no index, and one is missing": (
        lambda f: ((f / INDEX).unlink(), (f / SECOND).unlink()),
        xckpt.CorruptCheckpointError,
        f"files of 3 are missing: {SECOND}; restore it",
    ),
    "no index, and another file": (
        lambda f: ((f / INDEX).unlink(), (f / "x.safetensors").write_bytes(b"")),
        xckpt.NotACheckpointError,
        "4 .safetensors files and no index",
    ),
    "no index, a name twice": (
        lambda f: ((f / INDEX).unlink(), (f / SECOND).write_bytes((f / FIRST).read_bytes())),
        xckpt.ManifestError,
        f"a: in {FIRST} and in {SECOND}",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_folder(model: Path, fault: str) -> None:
    damage, error, words = FAULTS[fault]
    damage(model)
    with pytest.raises(error) as caught:
        open_source(model)
    assert words in str(caught.value)


def test_without_its_index_a_whole_series_is_read(model: Path) -> None:
    (model / INDEX).unlink()
    check_source(open_source(model), {"a": np.arange(4), "b": np.arange(5), "c": np.arange(6)})


def test_tensors_that_the_index_leaves_out(model: Path) -> None:
    """transformers reads files whole, and so what the index does not name counts too."""
    safetensors.numpy.save_file({"a": np.arange(4), "x": np.arange(2)}, model / FIRST)
    assert set(open_source(model).specs) == {"a", "b", "c", "x"}


def test_values_that_are_none(tmp_path: Path) -> None:
    for text in ("[", "[]", '{"a": 1}', '{"a": ["int", "zz"]}', '{"a": ["pickle", ""]}'):
        safetensors.numpy.save_file({}, tmp_path / "v.safetensors", {"xckpt.values": text})
        with pytest.raises(xckpt.ManifestError, match="the values under"):
            SafetensorsSource(tmp_path / "v.safetensors")


def test_a_file_of_one_ranks_parts_is_refused(tmp_path: Path) -> None:
    """It was read as whole tensors, of fewer rows."""
    for rank, name in enumerate(("shard-00001-model", "shard-00002-model")):
        about = json.dumps({"w": {"saved_offsets": [4 * rank, 0]}})
        path = tmp_path / f"{name}-00001-of-00001.safetensors"
        rows = {"w": np.full((4, 5), rank, np.float32)}
        safetensors.numpy.save_file(rows, path, {"DCP_SHARDING_INFO": about})
        if rank == 0:
            assert open_source(path).specs["w"].shape == (4, 5)  # as far as anyone can tell
    for path in tmp_path.iterdir():
        with pytest.raises(xckpt.errors.UnsupportedLeafError, match="one rank's parts of tensors"):
            open_source(path)


def test_a_name_with_a_slash_is_one_key(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a/b%": np.arange(3)}, tmp_path / "w.safetensors")
    source = SafetensorsSource(tmp_path / "w.safetensors")
    assert list(source.specs) == ["a%2Fb%25"]
    assert np.array_equal(read(source, "a%2Fb%25"), np.arange(3))


def test_another_file_has_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    seen: set[bytes] = set()
    for second, array in enumerate((np.arange(3), np.arange(4), np.arange(1, 5))):
        safetensors.numpy.save_file({"w": array}, path)
        os.utime(path, (second, second))  # else all may be of one tick of the clock
        identity = SafetensorsSource(path).identity()
        assert identity == SafetensorsSource(path).identity()
        seen.add(identity)
    assert len(seen) == 3


@pytest.mark.parametrize("most", ["1KB", "5GB"])
def test_transformers_both_ways(tmp_path: Path, most: str) -> None:
    """A model that transformers saved goes through source and sink, and is loaded again."""
    torch.manual_seed(0)
    config = transformers().BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = transformers().BertModel(config)
    model.save_pretrained(tmp_path / "in", max_shard_size=most)
    source = open_source(tmp_path / "in")
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    check_source(source, state)
    sink = SafetensorsSink(tmp_path / "out", max_shard_bytes=1000 if most == "1KB" else 10**9)
    sink.prepare(Contents(source.specs, source.values, source.metadata))
    for name, spec in source.specs.items():
        box = ChunkStorageMetadata((0,) * len(spec.shape), spec.shape)
        sink.write(name, box, read(source, name))
    sink.commit()
    config.save_pretrained(tmp_path / "out")
    loaded: Any = transformers().BertModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    again, differences = loaded
    assert not any(differences.values())
    assert (len(os.listdir(tmp_path / "out")) > 2) == (most == "1KB")
    for name, tensor in again.state_dict().items():
        assert same_bits(tensor.numpy(), state[name])
