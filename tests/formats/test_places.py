"""Each format from each kind of place: found out, loaded and converted, bit for bit."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import xckpt
from conformance.implementations.threads import run_ranks
from tests.formats import orbax_writers
from tests.formats.arrays import check_source, filled, read, same_bits
from tests.support import gcs_server
from tests.support.servers import environment, gcs, s3
from tests.torch.dcp.folders import save_alone
from xckpt.convert import Mapping, Rule, convert
from xckpt.formats.detect import detect, open_source
from xckpt.formats.sink import Contents
from xckpt.mapping.operations import Transpose
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "gcs", "s3"]

ARRAYS = {
    "layers.0.weight": filled("float32", (50, 80)),
    "layers.0.bias": filled("float16", (3,)),
    "layers.1.weight": filled("bfloat16", (80, 7)),
    "mask": np.array([True, False, True]),
    "count": np.array(3),
}
VALUES = {"step": 7, "rate": 0.5}
TREE = {**ARRAYS, **VALUES}


def safetensors_file(path: Path) -> Path:
    convert("memory://the-state", path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def safetensors_folder(path: Path) -> Path:
    from xckpt.formats.safetensors.sink import SafetensorsSink
    from xckpt.mapping.spec import TensorSpec

    sink = SafetensorsSink(path, max_shard_bytes=1000)
    specs = {name: TensorSpec(array.shape, array.dtype.name) for name, array in ARRAYS.items()}
    sink.prepare(Contents(specs, VALUES))
    for name, array in ARRAYS.items():
        box = xckpt.ChunkStorageMetadata((0,) * array.ndim, array.shape)
        sink.write(name, box, array)
    sink.commit()
    assert (path / "model.safetensors.index.json").exists()
    return path


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor_of(array) for name, array in ARRAYS.items()}


def tensor_of(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def torch_file(path: Path) -> Path:
    # One tensor is stored with other strides than it is read with.
    state = tensors()
    state["layers.0.weight"] = state["layers.0.weight"].T.contiguous().T
    torch.save({**state, **VALUES}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def torch_folder(path: Path) -> Path:
    path.mkdir()
    names = list(TREE)
    state = {**tensors(), **VALUES}
    for number in (1, 2):
        part = {name: state[name] for name in names[number - 1 :: 2]}
        torch.save(part, path / f"pytorch_model-{number:05d}-of-00002.bin")
    weight_map = {
        name: f"pytorch_model-{at % 2 + 1:05d}-of-00002.bin" for at, name in enumerate(names)
    }
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "safetensors file": safetensors_file,
    "safetensors folder": safetensors_folder,
    "torch file": torch_file,
    "torch folder": torch_folder,
    "dcp": lambda path: save_alone({**tensors(), **VALUES}, path),
    "orbax": lambda path: orbax_writers.save(path, {**TREE}),
    "orbax files": lambda path: orbax_writers.save(path, {**TREE}, "v1", False, False),
    "orbax zarr3": lambda path: orbax_writers.save(path, {**TREE}, "v0", False, True),
    "orbax steps": lambda path: orbax_writers.save_steps(path, 3, default={**TREE}),
}

PLACES = ("path", "file", "memory", "s3", "gcs")
TURNS = (("path",), ("s3", "memory", "gcs", "file"))
"""The default tier tries every format from a path, and from one other place in turn."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The state in every format, on the local file system; not to be changed."""
    xckpt.save("memory://the-state", TREE, overwrite=True)
    root = tmp_path_factory.mktemp("originals")
    return {name: write(root / name.replace(" ", "-")) for name, write in WRITERS.items()}


@pytest.fixture(params=PLACES)
def put(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """Copies a file or folder to a place of its own, and says where that is."""
    kind = request.param
    if kind in ("s3", "gcs"):
        root = request.getfixturevalue(kind)
    else:
        root = {"path": str(tmp_path), "file": f"file://{tmp_path}", "memory": "memory:/"}[kind]

    def copied(original: Path) -> str:
        url = f"{root}/{next(_numbers)} of +%20ü/{original.name}"
        if "%" in url and kind == "file":
            url = url.replace("%20", "%2520")
        folder = Location.parse(url).folder
        if folder is not None:
            folder.parent.mkdir()
            (shutil.copytree if original.is_dir() else shutil.copy)(original, folder)
            return url
        return upload(original, url)

    return copied


def tried() -> Iterator[Any]:
    """Each format with each place; what the default tier leaves out is thorough."""
    for number, name in enumerate(WRITERS):
        often = {places[number % len(places)] for places in TURNS}
        for place in PLACES:
            marks = () if place in often else pytest.mark.thorough
            yield pytest.param(place, name, marks=marks, id=f"{place}-{name}")


@pytest.mark.parametrize("put, name", list(tried()), indirect=["put"])
def test_each_format_from_each_place(
    originals: dict[str, Path], put: Callable[[Path], str], name: str, tmp_path: Path
) -> None:
    url = put(originals[name])
    assert detect(url) == name.split()[0]
    source = open_source(url)
    check_source(source, ARRAYS)
    assert source.values == VALUES
    assert source.identity() == open_source(url).identity()
    opened = xckpt.open(url)
    assert opened.format == name.split()[0] and opened.verify() == []
    rows = opened.array("layers.0.weight")[3:5]
    assert same_bits(rows, ARRAYS["layers.0.weight"][3:5])
    loaded = xckpt.load(url)
    assert all(same_bits(loaded[leaf], array) for leaf, array in ARRAYS.items())
    assert {leaf: loaded[leaf] for leaf in VALUES} == VALUES
    like = {"layers.0.weight": np.zeros((50, 80), np.float32)}
    assert same_bits(
        xckpt.load(url, like, strict=False)["layers.0.weight"], ARRAYS["layers.0.weight"]
    )
    done = convert(url, tmp_path / "out", options=xckpt.SaveOptions(memory_bytes=5000))
    assert done.tensors == len(ARRAYS)
    check_source(open_source(tmp_path / "out"), ARRAYS)
    assert xckpt.open(tmp_path / "out").verify() == []


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each request that the server of `gcs` gets from now on: its path, and the bytes sent back."""
    lines: list[str] = []
    answer = gcs_server._Handler._answer

    def noted(self: Any, status: int, content: bytes = b"", headers: Any = None) -> None:
        lines.append(f"{self.path} -> {len(content)}")
        answer(self, status, content, headers)

    monkeypatch.setattr(gcs_server._Handler, "_answer", noted)
    return lines


def upload(original: Path, url: str) -> str:
    """Copy a file or folder to a URL."""
    store = open_store(Location.parse(url.rpartition("/")[0]))
    for file in [each for each in original.rglob("*") if each.is_file()] or [original]:
        key = f"{url.rpartition('/')[2]}/{file.relative_to(original)}".removesuffix("/.")
        store.write(key, file.read_bytes()).result()
    return url


MANY = {f"layer_{n}": np.full(900, n, np.float32) for n in range(60)}
OPENED: dict[str, tuple[Callable[[Path], object], int]] = {
    "safetensors": (lambda path: safetensors.numpy.save_file(MANY, path), 8),
    "torch": (lambda path: torch.save({n: torch.from_numpy(a) for n, a in MANY.items()}, path), 16),
    "dcp": (lambda p: save_alone({n: torch.from_numpy(a) for n, a in MANY.items()}, p), 75),
    "orbax": (lambda path: orbax_writers.save(path, {**MANY}), 20),
}


@pytest.mark.parametrize("name", OPENED)
def test_how_often_a_bucket_is_asked(tmp_path: Path, gcs: str, asked: list[str], name: str) -> None:
    """Opening takes a few requests, or one a chunk that has to be looked at; none brings much."""
    write, most = OPENED[name]
    write(tmp_path / name)
    url = upload(tmp_path / name, f"{gcs}/asked/{name}")
    asked.clear()
    source = open_source(url)
    assert len(asked) <= most
    check_source(source, MANY)


def test_our_own_are_looked_for_first(gcs: str, asked: list[str]) -> None:
    """No listing, and the manifest once."""
    xckpt.save(f"{gcs}/ours", TREE)
    asked.clear()
    xckpt.load(f"{gcs}/ours")
    assert not [line for line in asked if "startOffset" in line or "prefix" in line]
    assert len([line for line in asked if "xckpt.json" in line]) == 1


def test_columns_take_few_requests(tmp_path: Path, gcs: str, asked: list[str]) -> None:
    """Near runs are read with what is between them, and a transposed file is read once."""
    matrix = filled("float32", (4096, 1024))
    safetensors.numpy.save_file({"w": matrix}, tmp_path / "w.safetensors")
    url = upload(tmp_path / "w.safetensors", f"{gcs}/w.safetensors")
    source = open_source(url)
    asked.clear()
    box = ((200, 100), (512, 3))
    assert same_bits(read(source, "w", box), matrix[200:712, 100:103])
    assert len(asked) == 1
    asked.clear()
    mapping = Mapping([Rule("w", "kernel", [Transpose((1, 0))])])
    options = xckpt.SaveOptions(memory_bytes=1 << 26)
    convert(url, tmp_path / "out", mapping=mapping, options=options)
    assert same_bits(xckpt.load(tmp_path / "out")["kernel"], np.ascontiguousarray(matrix.T))
    assert sum(int(line.rpartition(" ")[2]) for line in asked) < 1.1 * matrix.nbytes


@pytest.mark.parametrize("name", ["safetensors folder", "torch file", "dcp", "orbax"])
def test_ranks_load_from_a_bucket(originals: dict[str, Path], gcs: str, name: str) -> None:
    """The coordinator finds out what is there, and tells the others."""
    url = upload(originals[name], f"{gcs}/ranks/{originals[name].name}")
    for outcome in run_ranks(2, lambda group: xckpt.load(url, group=group)):
        loaded = outcome.result
        assert all(same_bits(loaded[leaf], array) for leaf, array in ARRAYS.items())


def test_one_of_ours_at_each_place(put: Callable[[Path], str], tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ours", TREE)
    url = put(tmp_path / "ours")
    assert detect(url) == "xckpt"
    check_source(open_source(url), ARRAYS)
    assert same_bits(xckpt.load(url)["layers.0.weight"], ARRAYS["layers.0.weight"])


def test_nothing_that_is_known(put: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    url = put(tmp_path / "notes")
    shown = str(Location.parse(url))
    for call in (xckpt.load, detect):
        with pytest.raises(xckpt.NotACheckpointError) as caught:
            call(url)
        assert shown in str(caught.value)
    with pytest.raises(xckpt.NotACheckpointError, match=r"Found: a\.txt"):
        open_source(url)
    with pytest.raises(xckpt.NotACheckpointError, match="a file of 4 bytes that begins with b'mi"):
        open_source(f"{url}/a.txt")
    with pytest.raises(xckpt.NotACheckpointError, match=r"nothing is there|does not exist"):
        open_source(f"{url}/elsewhere")


@pytest.mark.parametrize("change", ["cut", "append", "shorter header"])
def test_a_file_that_does_not_end_where_it_says(
    originals: dict[str, Path], put: Callable[[Path], str], tmp_path: Path, change: str
) -> None:
    """The error has a local file's true size; for an object, that it ends elsewhere."""
    data = originals["safetensors file"].read_bytes()
    changed = tmp_path / "changed.safetensors"
    cut = {"cut": data[:-10], "append": data + bytes(1000), "shorter header": data[:20]}[change]
    changed.write_bytes(cut)
    url = put(changed)
    left = len(cut) - 8 - int.from_bytes(data[:8], "little")
    words = {"cut": f"beyond the file's {left:,}", "append": f", {left:,}\\) at the end"}
    if Location.parse(url).folder is None:
        words = {
            "cut": f"truncated: it ends before byte {len(data):,}",
            "append": f"goes on after byte {len(data):,}",
        }
    with pytest.raises(xckpt.XckptError, match=words.get(change, "truncated")) as caught:
        open_source(url)
    assert str(Location.parse(url)) in str(caught.value)


def test_an_index_whose_file_is_missing(
    originals: dict[str, Path], put: Callable[[Path], str], tmp_path: Path
) -> None:
    folder = shutil.copytree(originals["safetensors folder"], tmp_path / "folder")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    missing = index["weight_map"]["mask"]
    (folder / missing).unlink()
    with pytest.raises(xckpt.CorruptCheckpointError, match=f"its file {missing} is missing"):
        open_source(put(folder))


def test_what_is_replaced_while_it_is_read(originals: dict[str, Path], gcs: str) -> None:
    """An object of another generation is never mixed with what was read before."""
    data = originals["safetensors file"].read_bytes()
    store = open_store(Location.parse(f"{gcs}/replaced"))
    store.write("w.safetensors", data).result()
    source = open_source(f"{gcs}/replaced/w.safetensors")
    before = source.identity()
    read(source, "mask")
    store.write("w.safetensors", data).result()
    with pytest.raises(xckpt.StorageError, match=r"gs://.*w\.safetensors was replaced while"):
        read(source, "mask")
    assert open_source(f"{gcs}/replaced/w.safetensors").identity() != before
