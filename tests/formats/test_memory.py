"""What describes another library's checkpoint takes no more memory than the caller allows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import xckpt
from xckpt.convert import convert
from xckpt.errors import LeafTooLargeError, ManifestError, MemoryLimitError
from xckpt.formats.torch_save.pickle_machine import load
from xckpt.storage.foreign.documents import Allowance

RAISE = r"raise LoadOptions\(memory_bytes=\), to convert SaveOptions\(memory_bytes=\)"
LITTLE = xckpt.LoadOptions(memory_bytes=2000)
ENOUGH = xckpt.LoadOptions(memory_bytes=1 << 20)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that documents need not be long."""
    for module in (
        "core.manifest.memory",
        "storage.foreign.documents",
        "storage.foreign.zarr_limits",
    ):
        monkeypatch.setattr(f"xckpt.{module}.LEAST_LIMIT", 1)


def _torch(path: Path) -> None:
    import torch

    torch.save({f"w{n}": torch.zeros(1) for n in range(30)}, path / "w.pt")


def _safetensors(path: Path) -> None:
    save_file({f"w{n}": np.zeros(1) for n in range(30)}, path / "w.safetensors")


def _index(path: Path) -> None:
    save_file({f"w{n}": np.zeros(1) for n in range(3)}, path / "w.safetensors")
    index = {"weight_map": {f"w{n}": "w.safetensors" for n in range(3)}, "metadata": [0] * 200}
    (path / "w.safetensors.index.json").write_text(json.dumps(index))


def _converted(path: Path) -> None:
    state = {f"w{n}": np.zeros(1) for n in range(30)}
    xckpt.save(path.parent / "original", state)
    convert(path.parent / "original", path, format=path.name)


WRITERS = {
    "torch": _torch,
    "safetensors": _safetensors,
    "index": _index,
    "orbax": _converted,
    "dcp": _converted,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_description_above_the_budget_is_refused(tmp_path: Path, name: str, little: None) -> None:
    path = tmp_path / name
    path.mkdir()
    WRITERS[name](path)
    with pytest.raises(ManifestError, match=RAISE):
        xckpt.load(path, options=LITTLE)
    with pytest.raises(ManifestError, match=RAISE):
        xckpt.open(path, options=LITTLE)
    with pytest.raises(ManifestError, match=RAISE):
        convert(path, tmp_path / "to", options=xckpt.SaveOptions(memory_bytes=2000))
    assert len(xckpt.load(path, options=ENOUGH)) in (3, 30)


def test_an_orbax_chunk_above_the_budget_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "orbax"
    xckpt.save(tmp_path / "original", {"a": {"w": np.zeros(4)}})
    convert(tmp_path / "original", path, format="orbax")
    [file] = path.rglob("zarr.json")
    document = json.loads(file.read_text())
    document["shape"] = document["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 40]
    file.write_text(json.dumps(document))
    words = rf"a.w: a chunk of .* is decoded as one and takes 8.0 TiB, more than .*; {RAISE}"
    for use in (xckpt.load, xckpt.open):
        with pytest.raises(LeafTooLargeError, match=words):
            use(path)


def test_a_chunk_of_orbax_is_verified_by_one_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is decoded for that; damage is found, and memory for it is not needed twice."""
    path = tmp_path / "orbax"
    xckpt.save(tmp_path / "original", {"w": np.arange(1000.0)})
    convert(tmp_path / "original", path, format="orbax")
    checkpoint = xckpt.open(path)
    sizes: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        "xckpt.formats.source.np.empty",
        lambda shape, dtype: sizes.append(shape) or np.zeros(shape, dtype),
    )
    assert not checkpoint.verify() and sizes == [(1,)]
    [chunk] = (path / "w" / "c").iterdir()
    content = bytearray(chunk.read_bytes())
    content[4000] ^= 1
    chunk.write_bytes(content)
    assert [problem.leaf for problem in xckpt.open(path).verify()] == ["w"]


@pytest.mark.parametrize(
    "body",
    [b"}" * 6000, b"]" * 11_000, b"(t" * 7000, b"K\x07" * 20_000, b"N\x85" * 9000, b"(" * 20_000],
    ids=["dicts", "lists", "empty tuples", "ints", "tuples", "brackets"],
)
def test_a_pickle_of_many_objects_is_refused(body: bytes, little: None) -> None:
    """One byte can make a dict of 64 bytes and a place for it."""
    load(b"\x80\x02(" + body[: len(body) // 2] + b"t.", {}, memory=Allowance(600_000))
    with pytest.raises(ManifestError, match=rf"of the pickle takes about .*; {RAISE}"):
        load(b"\x80\x02(" + body + b"t.", {}, memory=Allowance(600_000))


def test_a_value_of_many_parts_is_refused(tmp_path: Path) -> None:
    """Each is a leaf, which takes more than the opcode of two bytes that made it."""
    import torch

    torch.save(list(range(140_000)), tmp_path / "w.pt")
    with pytest.raises(xckpt.UnsupportedLeafError, match=rf"more than 131,072 parts; .*; {RAISE}"):
        xckpt.open(tmp_path / "w.pt", options=LITTLE)


def test_an_honest_pickle_is_not_overestimated() -> None:
    """As Python has them they take 25 MiB."""
    value = {f"key {n}": list(range(n, n + 20)) for n in range(20_000)}
    assert load(pickle.dumps(value, 2), {}, memory=Allowance(1)) == value


FILES = 4
LONG = "x" * (9 << 20)
"""A text that fits the limit, where four of it do not."""


def _many_headers(path: Path) -> Path:
    for n in range(1, FILES + 1):
        file = path / f"w-{n:05}-of-{FILES:05}.safetensors"
        save_file({f"w{n}": np.zeros(1)}, file, {f"text {n}": LONG})
    return path


def _many_pickles(path: Path) -> Path:
    import torch

    names = {f"w{n}": f"w-{n:05}-of-{FILES:05}.bin" for n in range(1, FILES + 1)}
    for n, file in names.items():
        torch.save({n: torch.zeros(1), f"text {n}": LONG}, path / file)
    (path / "w.bin.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def _many_items(path: Path) -> Path:
    xckpt.save(path / "original", {"w": np.zeros(1)})
    convert(path / "original", path / "1" / "state", format="orbax")
    (path / "1" / "_CHECKPOINT_METADATA").write_text("{}")
    for n in range(FILES):
        (path / "1" / f"item{n}").mkdir()
        (path / "1" / f"item{n}" / "metadata").write_text(json.dumps(LONG))
    return path / "1"


def _many_objects(path: Path) -> Path:
    state = {f"text {n}": LONG for n in range(FILES)}
    xckpt.save(path / "original", state)
    convert(path / "original", path / "dcp", format="dcp")
    return path / "dcp"


def _many_documents(path: Path) -> Path:
    xckpt.save(path / "original", {f"w{n}": np.zeros(1) for n in range(12)})
    convert(path / "original", path / "orbax", format="orbax")
    for file in path.glob("orbax/w*/zarr.json"):
        document = json.loads(file.read_text())
        document["attributes"] = {"text": "x" * 900_000}
        file.write_text(json.dumps(document))
    return path / "orbax"


@pytest.mark.parametrize(
    "make", [_many_headers, _many_pickles, _many_items, _many_objects, _many_documents]
)
def test_the_files_of_a_checkpoint_share_the_budget(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone fits it."""
    path = make(tmp_path)
    monkeypatch.setattr("xckpt.storage.foreign.documents.LEAST_LIMIT", 1)
    monkeypatch.setattr("xckpt.core.manifest.memory.LEAST_LIMIT", 1)
    monkeypatch.setattr("xckpt.storage.foreign.zarr_limits.LEAST_LIMIT", 1)
    words = rf"with the .* of what was read before, takes about .*; {RAISE}"
    tight = 30 << 20
    for use in (xckpt.load, xckpt.open):
        with pytest.raises(ManifestError, match=words):
            use(path, options=xckpt.LoadOptions(memory_bytes=tight))
    with pytest.raises(ManifestError, match=words):
        convert(path, tmp_path / "to", options=xckpt.SaveOptions(memory_bytes=tight))
    assert xckpt.open(path)


def test_an_allowance_is_given_back() -> None:
    """What is needed for a time only does not count any more; also where it is refused."""
    memory = Allowance(100 << 20)
    for _ in range(3):
        with memory.passing() as needed, needed.passing() as inner:
            needed.take(40 << 20, "one")
            inner.take(50 << 20, "another")
            with pytest.raises(MemoryLimitError, match=r"with the 90.0 MiB of what was read"):
                inner.take(20 << 20, "a third")
    memory.take(100 << 20, "all")
