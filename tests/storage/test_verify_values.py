"""What `verify` finds is there as values: leaf, box and kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import xckpt


def test_a_damaged_chunk_and_document_are_named_as_values(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    state = {"model": {"w": np.arange(64.0).reshape(8, 8)}}
    xckpt.save(path, state, options=xckpt.SaveOptions(chunk_bytes=256))
    chunk = next(file for file in sorted((path / "model" / "w" / "c").rglob("*")) if file.is_file())
    chunk.write_bytes(bytes(256))
    (path / "model" / "w" / "zarr.json").write_text("{}")
    document, damaged = xckpt.open(path).verify()
    assert (document.leaf, document.kind) == ("model/w", "document")
    assert (damaged.leaf, damaged.kind) == ("model/w", "chunk")
    assert damaged.box is not None
    assert (damaged.box.offsets, damaged.box.sizes) == ((0, 0), (4, 8))
    assert str(damaged).startswith("model/w: [0, 4) x [0, 8) in ")
