"""Any byte altered, any file cut off, missing or replaced: our errors or numbers, nothing else.

Most of these formats have no checksums, so altered elements can go unnoticed; what must not happen
is another exception, a crash, a hang, or memory taken on a file's word.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from tests.formats import orbax_writers
from tests.formats.arrays import read
from tests.support.examples import examples
from tests.torch.dcp.folders import save_alone
from xckpt.convert import convert
from xckpt.formats.detect import SOURCES, detect, open_source
from xckpt.formats.sink import Contents
from xckpt.storage.location import Location, open_store

ARRAYS = {"a": {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}, "b": np.arange(5)}
TENSORS = {"a": {"w": torch.arange(12.0).reshape(3, 4)}, "b": torch.arange(5)}


def safetensors_folder(path: Path) -> None:
    from xckpt.formats.safetensors.sink import SafetensorsSink
    from xckpt.mapping.spec import TensorSpec

    sink = SafetensorsSink(path, max_shard_bytes=1)
    sink.prepare(
        Contents({"w": TensorSpec((3,), "int8"), "b": TensorSpec((), "int64")}, {"step": 7})
    )
    sink.commit()


def torch_file(path: Path) -> None:
    path.mkdir()
    torch.save({**TENSORS, "step": 7}, path / "w.pt")


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": safetensors_folder,
    "torch": torch_file,
    "dcp": lambda path: save_alone({**TENSORS, "step": 7}, path),
    "orbax": lambda path: orbax_writers.save(path, {**ARRAYS, "step": 7, "name": "run"}),
    "orbax files": lambda path: orbax_writers.save(path, {**ARRAYS, "step": 7}, "v1", False, False),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    for name, write in WRITERS.items():
        write(root / name)
    return root


def read_all(path: str | Path, format: str) -> None:
    source = open_source(path, format)
    try:
        for name in source.specs:
            read(source, name)
    finally:
        source.close()


@pytest.mark.parametrize("kind", WRITERS)
def test_any_damage(originals: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    original = originals / kind
    files = sorted(each.relative_to(original) for each in original.rglob("*") if each.is_file())
    work = tmp_path_factory.mktemp("damaged") / "ckpt"

    @examples(30)
    @given(
        st.sampled_from(files),
        st.sampled_from(["alter", "cut", "remove", "empty", "swap", "folder", "append"]),
        st.integers(0, 1 << 30),
        st.integers(1, 255),
        st.sampled_from(files),
    )
    def damaged(file: Path, how: str, at: int, change: int, other: Path) -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(original, work)
        path = work / file
        data = bytearray(path.read_bytes())
        if how == "alter" and data:
            data[at % len(data)] ^= change
            path.write_bytes(data)
        elif how == "swap":
            path.write_bytes((original / other).read_bytes())
        else:
            path.unlink()
            if how == "folder":
                path.mkdir()
            elif how != "remove":
                kept = {"cut": data[: at % (len(data) + 1)], "append": data + b"\1"}.get(how, b"")
                path.write_bytes(kept)
        for place in (work, copied(work)):
            with contextlib.suppress(xckpt.XckptError):
                detect(place)
            with contextlib.suppress(xckpt.XckptError), warnings.catch_warnings():
                # What looks like another library's own items does not come along.
                warnings.simplefilter("ignore", UserWarning)
                read_all(place, kind.split()[0])

    damaged()


def copied(folder: Path) -> str:
    """The files of a folder in a store of objects, and nothing else."""
    store = open_store(Location.parse("memory://damaged"))
    store.delete_range(ts.KvStore.KeyRange()).result()
    for file in folder.rglob("*"):
        if file.is_file():
            store.write(str(file.relative_to(folder)), file.read_bytes()).result()
    return "memory://damaged"


@pytest.mark.parametrize("kind", WRITERS)
def test_undamaged_they_are_read(originals: Path, kind: str) -> None:
    assert detect(originals / kind) == kind.split()[0]
    read_all(originals / kind, kind.split()[0])


@pytest.mark.parametrize("format", SOURCES)
def test_what_is_no_checkpoint_of_the_format(tmp_path: Path, format: str) -> None:
    """A pipe would make a reader wait for ever; others are empty, or nothing of the kind."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"hello world, this is a note")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "pipes").mkdir()
    for name in ("model.safetensors", "w.pt", ".metadata", "_METADATA", "xckpt.json"):
        os.mkfifo(tmp_path / "pipes" / name)
    for name in ("pipe", "empty", "file", "loop", "nothing", "pipes"):
        with pytest.raises(xckpt.XckptError):
            open_source(tmp_path / name, format)
        with pytest.raises(xckpt.XckptError):
            open_source(tmp_path / name)
        with pytest.raises(xckpt.XckptError):
            convert(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
