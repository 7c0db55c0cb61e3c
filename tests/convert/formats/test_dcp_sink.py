"""DCP folders that torch itself loads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import xckpt
from tests.convert.formats.arrays import check_source, filled, same_bits
from tests.torch.dcp.folders import alone, load_alone, save_alone
from xckpt.convert.detection import open_sink, open_source
from xckpt.convert.formats import dcp_sink
from xckpt.convert.formats.dcp_sink import DCPSink
from xckpt.convert.source_reader import parts
from xckpt.convert.tensors import TensorSpec
from xckpt.core.dtypes import DTYPES
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.torch.buffers import to_numpy, torch_dtype

CARRIED = [name for name in DTYPES if torch_dtype(name) and name not in ("int2", "int4")]


def specs_of(arrays: Mapping[str, NDArray]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(a.shape, a.dtype.name) for name, a in arrays.items()}


def write(
    path: Path, arrays: Mapping[str, NDArray], overwrite: bool = False, **values: Any
) -> Path:
    """All of a sink's steps, in boxes of about three chunks each."""
    sink = open_sink(path, "dcp", overwrite=overwrite)
    assert sink is not None
    sink.prepare(specs_of(arrays), values, {})
    for name, array in arrays.items():
        chunk = sink.chunks(name)
        most = 3 * int(np.prod(chunk))
        for box in parts((0,) * array.ndim, array.shape, chunk, most):
            ends = zip(box.offsets, box.sizes, strict=True)
            sink.write(name, box, np.asarray(array[tuple(slice(o, o + n) for o, n in ends)]))
    sink.commit()
    return path


ARRAYS = {
    "model/a.weight": np.arange(120, dtype=np.float32).reshape(12, 10),
    "model/b": filled("bfloat16", (3,)),
    "scalar": np.array(3, np.int32),
    "zeros": np.zeros((5, 4, 3)),
    "empty": np.zeros((0, 3)),
}
VALUES: dict[str, Any] = {"step": 7, "rate": 0.5, "on": True, "name": "h\u00e9", "none": None}


@pytest.mark.parametrize("chunk_bytes", [40, 1 << 25])
def test_torch_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Into tensors of its own, as a whole tree, and through the source again."""
    monkeypatch.setattr(dcp_sink, "CHUNK_BYTES", chunk_bytes)
    folder = write(tmp_path / "dcp", ARRAYS, **VALUES)
    state: Any = {
        "model": {
            "a.weight": torch.zeros(12, 10),
            "b": torch.zeros(3, dtype=torch.bfloat16),
        },
        "scalar": torch.tensor(0, dtype=torch.int32),
        "zeros": torch.ones(5, 4, 3, dtype=torch.float64),
        "empty": torch.zeros(0, 3, dtype=torch.float64),
        "step": 0,
        "name": "",
    }
    load_alone(state, folder)
    assert state["step"] == 7 and state["name"] == VALUES["name"]
    assert same_bits(to_numpy(state["model"]["a.weight"]), ARRAYS["model/a.weight"])
    assert same_bits(to_numpy(state["model"]["b"]), ARRAYS["model/b"])
    assert not state["zeros"].any() and state["scalar"].item() == 3
    with alone():
        dcp_to_torch_save(folder, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt")
    assert {name: whole[name] for name in VALUES} == VALUES
    assert same_bits(to_numpy(whole["model"]["a.weight"]), ARRAYS["model/a.weight"])
    source = open_source(folder)
    check_source(source, ARRAYS)
    assert source.values == VALUES
    assert len(list(folder.glob("*.distcp"))) == (9 if chunk_bytes > 40 else 39)


def test_every_dtype(tmp_path: Path) -> None:
    arrays = {name: filled(name, (3, 4)) for name in CARRIED}
    folder = write(tmp_path / "dcp", arrays)
    state = {name: torch.zeros(3, 4).to(torch_dtype(name)) for name in arrays}
    load_alone(state, folder)
    for name, array in arrays.items():
        assert same_bits(to_numpy(state[name]), array), name


def test_others_attach_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_sink, "CHUNK_BYTES", 100)
    array = ARRAYS["model/a.weight"]
    specs = specs_of({"w": array})
    first = DCPSink(tmp_path / "dcp")
    token = first.prepare(specs, {"step": 7}, {})
    rows = first.chunks("w")[0]
    for _ in range(2):
        first.write("w", ChunkStorageMetadata((0, 0), (rows, 10)), array[:rows])
    second = DCPSink(tmp_path / "dcp")
    assert second.prepare(specs, {"step": 7}, {}, attach=token) == token
    for other, told in [(specs_of({"v": array}), token), (specs, "0" * 12)]:
        with pytest.raises(xckpt.NotACheckpointError):
            DCPSink(tmp_path / "dcp").prepare(other, {"step": 7}, {}, attach=told)
    with pytest.raises(xckpt.CorruptCheckpointError, match="files were not written") as caught:
        second.commit()
    assert len(caught.value.problems) == 12 // rows - 1
    second.write("w", ChunkStorageMetadata((rows, 0), (12 - rows, 10)), array[rows:])
    assert not (tmp_path / "dcp").exists()
    second.commit()
    check_source(open_source(tmp_path / "dcp"), {"w": array})
    assert os.listdir(tmp_path) == ["dcp"]
    assert {each.suffix for each in (tmp_path / "dcp").iterdir()} == {"", ".distcp"}


def test_what_is_refused(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((2,), "int4"), "b": TensorSpec((2,), "float8_e3m4")}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        DCPSink(tmp_path / "dcp").prepare(specs, {"c": {1}}, {})
    assert [line[:1] for line in caught.value.problems] == ["a", "b", "c"]
    with pytest.raises(xckpt.UnsupportedLeafError, match="joined with dots"):
        DCPSink(tmp_path / "dcp").prepare({}, {"a/b": 1, "a.b": 2}, {})
    assert os.listdir(tmp_path) == []


def test_what_may_be_replaced(tmp_path: Path) -> None:
    save_alone({"w": torch.arange(3)}, tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    save_alone({"w": torch.arange(3)}, tmp_path / "both")
    (tmp_path / "both" / "notes.txt").write_text("mine")
    for overwrite, name in [(False, "theirs"), (True, "mine"), (True, "both")]:
        with pytest.raises(xckpt.CheckpointExistsError):
            write(tmp_path / name, {"w": np.arange(5)}, overwrite)
    write(tmp_path / "theirs", {"w": np.arange(5)}, overwrite=True)
    check_source(open_source(tmp_path / "theirs"), {"w": np.arange(5)})
    assert sorted(os.listdir(tmp_path)) == ["both", "mine", "theirs"]
