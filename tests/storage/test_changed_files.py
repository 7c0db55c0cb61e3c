"""Files that something else has taken the place of: before they are read by range, and after a
checkpoint was opened. TensorStore would wait for a pipe, and take the memory that a file claims.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.core.manifest.own_keys import DIGESTS, MANIFEST
from xckpt.core.manifest.packs import PLACES
from xckpt.storage.chunks import digests


def giant(file: Path) -> None:
    """A file of 1 TiB, of which nothing is there."""
    file.touch()
    os.truncate(file, 1 << 40)


ODD: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "1 TiB": giant,
    "nothing": lambda file: None,
}
"""What stands in for a file."""


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a file of digests and a file of places."""
    monkeypatch.setattr("xckpt.storage.packs.write_packs.INLINE_BYTES", 0)
    path = tmp_path / "ckpt"
    options = xckpt.SaveOptions(chunk_bytes=8, pack_bytes=1 << 20)
    xckpt.save(path, {"w": np.arange(400.0)}, options=options)
    return path


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", [DIGESTS, PLACES])
def test_a_long_side_file(
    packed: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are read of it."""
    monkeypatch.setattr(digests, "FEW_BYTES", 0)
    (packed / name).unlink()
    ODD[what](packed / name)
    for call in (
        lambda: xckpt.load(packed),
        lambda: xckpt.open(packed).array("w")[3:5],
    ):
        with pytest.raises(xckpt.CorruptCheckpointError, match=f"{packed}.*: {name} is "):
            call()
    xckpt.save(packed.with_name("next"), {"w": np.ones(400)}, base=packed)
    assert xckpt.open(packed.with_name("next")).verify() == []
    assert [str(problem).partition(":")[0] for problem in xckpt.open(packed).verify()] == [name]


@pytest.mark.parametrize("what", ODD)
def test_a_manifest_that_changes_beside_a_damaged_chunk(tmp_path: Path, what: str) -> None:
    """Whether the checkpoint was replaced is asked of what stands in the manifest's place."""
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.arange(100.0)})
    stored = xckpt.open(path).array("w")
    (path / "w" / "c" / "0").write_bytes(b"")
    (path / MANIFEST).unlink()
    ODD[what](path / MANIFEST)
    replaced = what in ("1 TiB", "nothing")
    with pytest.raises(
        xckpt.CheckpointReplacedError if replaced else xckpt.CorruptCheckpointError,
        match="open it again" if replaced else "w: .*truncated",
    ):
        stored[:]
