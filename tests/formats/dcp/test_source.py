"""DCP folders as a source: torch writes them, alone and from several ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from tests.formats.arrays import check_source, read, same_bits
from tests.torch.dcp.folders import save_alone
from xckpt.formats.dcp import source as dcp_source
from xckpt.formats.dcp.metadata import parse
from xckpt.formats.dcp.sink import encode
from xckpt.formats.detect import open_source
from xckpt.torch.leaf import to_numpy

WEIGHTS = {
    "w.weight": torch.arange(60.0).reshape(5, 12),
    "b": torch.ones(3, dtype=torch.bfloat16),
}
STATE = {
    "model": {
        "w.weight": torch.arange(60.0).reshape(5, 12),
        "b": torch.ones(3, dtype=torch.bfloat16),
    },
    "list": [torch.arange(3), torch.tensor(4.5)],
    "step": 7,
    "name": "run",
    "empty": torch.zeros(0, 3),
}


def test_a_tree(tmp_path: Path) -> None:
    source = open_source(save_alone(STATE, tmp_path / "dcp"))
    check_source(
        source,
        {
            "model/w.weight": to_numpy(WEIGHTS["w.weight"]),
            "model/b": to_numpy(WEIGHTS["b"]),
            "list/0": np.arange(3),
            "list/1": np.array(4.5, np.float32),
            "empty": np.zeros((0, 3), np.float32),
        },
    )
    assert source.values == {"step": 7, "name": "run"}


@pytest.mark.parametrize("open_at_once", [1, 64])
def test_chunks_of_several_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_at_once: int
) -> None:
    """Exported in boxes of a few rows: many chunks in one file, boxes that cut them."""
    from xckpt.torch.dcp import export_checkpoint

    monkeypatch.setattr(dcp_source, "MOST_OPEN", open_at_once)
    array = np.arange(700, dtype=np.int32).reshape(35, 20)
    chunked = xckpt.SaveOptions(chunk_bytes=200)
    xckpt.save(tmp_path / "ours", {"w": array, "v": array.T.copy()}, options=chunked)
    export_checkpoint(
        tmp_path / "ours", tmp_path / "dcp", options=xckpt.LoadOptions(memory_bytes=1000)
    )
    source = open_source(tmp_path / "dcp")
    check_source(source, {"w": array, "v": array.T})
    for box in (((3, 4), (29, 11)), ((0, 19), (35, 1)), ((34, 0), (1, 20)), ((5, 5), (0, 3))):
        low, size = box
        part = array[low[0] : low[0] + size[0], low[1] : low[1] + size[1]]
        assert same_bits(read(source, "w", box), part)


def test_damage(tmp_path: Path) -> None:
    folder = save_alone(STATE, tmp_path / "dcp")
    [file] = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-2000])  # The last entry is that of the empty tensor.
    with pytest.raises(xckpt.CorruptCheckpointError, match="truncated"):
        open_source(folder)
    file.write_bytes(data)
    source = open_source(folder)
    file.write_bytes(b"")
    with pytest.raises(xckpt.CorruptCheckpointError, match="truncated"):
        read(source, "model/w.weight")
    file.unlink()
    with pytest.raises(xckpt.CorruptCheckpointError, match="is missing"):
        open_source(folder)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    """Neither for a DCP folder nor for a file of torch.save."""
    save_alone({"w": torch.arange(3)}, tmp_path / "dcp")
    torch.save({"w": torch.arange(3)}, tmp_path / "w.pt")
    script = (
        "import sys\n"
        "from xckpt.formats.detect import open_source\n"
        f"for name in ('dcp', 'w.pt'):\n"
        f"    print(open_source({str(tmp_path)!r} + '/' + name).specs)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("int64") == 2


@pytest.mark.parametrize(
    "path, words",
    [
        (("w", 1 << 40), r"w: a list with an entry at 1,099,511,627,776"),
        (("d",) * 65, "more than 64 containers deep"),
        (("v",), "another entry has its place v too"),
        (("v", 0), "v: a leaf and a container have this name"),
    ],
    ids=["far", "deep", "taken", "inside"],
)
def test_key_paths_that_make_no_tree(tmp_path: Path, path: tuple[Any, ...], words: str) -> None:
    folder = save_alone({"w": torch.ones(1), "v": torch.ones(1)}, tmp_path / "dcp")
    described = parse((folder / ".metadata").read_bytes())
    described = replace(described, paths={**described.paths, "w": path})
    (folder / ".metadata").write_bytes(encode(described))
    with pytest.raises(xckpt.ManifestError, match=words):
        open_source(folder)


def test_an_absent_entry_of_a_list_is_none(tmp_path: Path) -> None:
    folder = save_alone({"w": torch.ones(1)}, tmp_path / "dcp")
    described = parse((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(encode(replace(described, paths={"w": ("l", 2)})))
    source = open_source(folder)
    assert source.values == {"l/0": None, "l/1": None} and list(source.specs) == ["l/2"]


def test_absent_entries_share_the_memory(tmp_path: Path) -> None:
    """A few bytes name the last of a list; all before it become leaves."""
    names = [f"w{n}" for n in range(3)]
    folder = save_alone({name: torch.ones(1) for name in names}, tmp_path / "dcp")
    described = parse((folder / ".metadata").read_bytes())
    paths = {name: (name, 60_000) for name in names}
    (folder / ".metadata").write_bytes(encode(replace(described, paths=paths)))
    little = xckpt.LoadOptions(memory_bytes=1)
    words = r"w2: a list with an entry at 60,000: the absent ones before it, 512 bytes each, take"
    with pytest.raises(xckpt.ManifestError, match=words):
        open_source(folder, options=little)


@pytest.mark.parametrize("by", [0, 3])
def test_entries_of_bytes_that_share_some(tmp_path: Path, by: int) -> None:
    """A file of a kilobyte could become a thousand values."""
    folder = save_alone({"a": 1, "b": 2}, tmp_path / "dcp")
    described = parse((folder / ".metadata").read_bytes())
    at = described.objects["a"]
    objects = {"a": at, "b": replace(at, offset=at.offset + by)}
    (folder / ".metadata").write_bytes(encode(replace(described, objects=objects)))
    with pytest.raises(
        xckpt.ManifestError, match=f"b: stored where a is, at byte {at.offset + by}"
    ):
        open_source(folder)
