"""What ranks write: each chunk once, and the zarr.json of an array with its first chunk."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import xckpt
from tests.support.ranks import Ranks
from xckpt.core.geometry.box import Boxes
from xckpt.core.leaf import HostSource
from xckpt.options import SaveOptions

HEIGHTS = (7, 13, 81)
"""Rows of each rank: no regular grid of chunks suits them."""


def documents_written(rank: int, path: str) -> list[str]:
    """Save a state of rows; each zarr.json that Python has opened to write on this rank."""
    opened: dict[str, None] = {}  # a file is opened again once its folder is there

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and str(args[0]).endswith("/zarr.json.__lock"):
            opened[str(args[0]).removesuffix(".__lock")] = None

    sys.addaudithook(note)
    held = Boxes.of([((sum(HEIGHTS[:rank]), 0), (HEIGHTS[rank], 8))])
    data = np.full((HEIGHTS[rank], 8), rank, np.float32)
    rows = HostSource((sum(HEIGHTS), 8), "float32", held, (data,), True)
    more = {"whole": np.arange(4), "empty": np.zeros((0, 3)), "long": "text" * 2000}
    xckpt.save(path, {"model": {"rows": rows}, **more}, options=SaveOptions(pack_bytes=0))
    return [name.split("/", path.count("/") + 1)[-1] for name in opened]


def test_the_rank_of_an_arrays_first_chunk_writes_its_document(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with Ranks(3) as ranks:
        written = ranks.run(documents_written, str(path))
    assert xckpt.open(path).verify() == []
    pieces = [f"model/rows/{number}/zarr.json" for number in range(3)]
    assert [pieces[rank] in written[rank] for rank in range(3)] == [True] * 3
    everything = sorted(name for each in written for name in each)
    values = {"long/zarr.json", "zarr.json"}  # by TensorStore, which Python does not see
    lying = {str(file.relative_to(path)) for file in path.rglob("zarr.json")} - values
    assert everything == sorted(lying)
    above = {"model/zarr.json", "model/rows/zarr.json", "empty/zarr.json"}
    assert above <= set(written[0])
