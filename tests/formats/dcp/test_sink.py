"""DCP folders that torch itself loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import xckpt
from tests.formats.arrays import check_source, filled, same_bits
from tests.formats.sinks import boxes_of, specs_of, write, write_box
from tests.torch.dcp.folders import alone, load_alone, save_alone
from xckpt.formats.dcp import sink as dcp_sink
from xckpt.formats.dcp.sink import DCPSink
from xckpt.formats.detect import open_source
from xckpt.formats.sink import Contents
from xckpt.formats.torch_save.write import SAVED_DTYPES
from xckpt.mapping.spec import TensorSpec
from xckpt.torch.leaf import to_numpy, torch_dtype

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
    folder = tmp_path / "dcp"
    write(DCPSink(folder), ARRAYS, VALUES)
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
    arrays = {name: filled(name, (3, 4)) for name in sorted(SAVED_DTYPES)}
    write(DCPSink(tmp_path / "dcp"), arrays)
    state = {name: torch.zeros(3, 4).to(torch_dtype(name)) for name in arrays}
    load_alone(state, tmp_path / "dcp")
    for name, array in arrays.items():
        assert same_bits(to_numpy(state[name]), array), name


def test_files_that_were_not_written_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink goes on from there."""
    monkeypatch.setattr(dcp_sink, "CHUNK_BYTES", 100)
    array = ARRAYS["model/a.weight"]
    sink = DCPSink(tmp_path / "dcp")
    sink.prepare(Contents(specs_of({"w": array}), {"step": 7}))
    first, *others = boxes_of(sink, {"w": array}, chunks_each=1)
    write_box(sink, *first, array)
    with pytest.raises(xckpt.CorruptCheckpointError, match="files were not written") as caught:
        sink.commit()
    assert len(caught.value.problems) == len(others) > 1
    for box in others:
        write_box(sink, *box, array)
    sink.commit()
    check_source(open_source(tmp_path / "dcp"), {"w": array})
    assert {each.suffix for each in (tmp_path / "dcp").iterdir()} == {"", ".distcp"}


def test_what_torch_cannot_save(tmp_path: Path) -> None:
    specs = {"a": TensorSpec((2,), "int4"), "b": TensorSpec((2,), "float8_e3m4")}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        DCPSink(tmp_path / "dcp").prepare(Contents(specs, {"c": {1}}))
    assert [line[:1] for line in caught.value.problems] == ["a", "b", "c"]


WORKER = """
import sys
import numpy as np
from xckpt.core.geometry.box import Box
from xckpt.formats.dcp.sink import DCPSink
from xckpt.formats.sink import Contents
from xckpt.mapping.spec import TensorSpec
attach = sys.argv[2]
sink = DCPSink(sys.argv[1])
sink.prepare(Contents({"w": TensorSpec((5,), "float32")}, {"step": 7}), attach=attach)
sink.write("w", Box((0,), (5,)), np.arange(5, dtype=np.float32))
sink.close() if attach else sink.commit()
print([name for name in sys.modules if name.partition(".")[0] == "torch"])
"""


@pytest.mark.parametrize("alone", [True, False])
def test_it_is_written_without_torch(tmp_path: Path, alone: bool) -> None:
    """The whole folder by one process, or a chunk by a worker."""
    sink = DCPSink(tmp_path / "dcp")
    token = "" if alone else sink.prepare(Contents({"w": TensorSpec((5,), "float32")}, {"step": 7}))
    command = [sys.executable, "-c", WORKER, str(tmp_path / "dcp"), token]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    if not alone:
        sink.commit()
    check_source(open_source(tmp_path / "dcp"), {"w": np.arange(5, dtype=np.float32)})
    assert load_alone({"w": torch.zeros(5), "step": 0}, tmp_path / "dcp")["step"] == 7


def test_a_folder_of_torch_itself_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    for name in ("theirs", "both"):
        save_alone({"w": torch.arange(3)}, tmp_path / name)
    (tmp_path / "both" / "notes.txt").write_text("mine")
    with pytest.raises(xckpt.CheckpointExistsError, match=r"other files too: notes\.txt"):
        write(DCPSink(tmp_path / "both", overwrite=True), {"w": np.arange(5)})
    write(DCPSink(tmp_path / "theirs", overwrite=True), {"w": np.arange(5)})
    check_source(open_source(tmp_path / "theirs"), {"w": np.arange(5)})
