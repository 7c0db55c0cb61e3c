"""Files that something else has taken the place of: before they are read by range, and after a
checkpoint was opened. TensorStore would wait for a pipe, and take the memory that a file claims.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from xckpt.core.manifest.own_keys import DIGESTS, MANIFEST
from xckpt.core.manifest.packs import PLACES
from xckpt.storage.chunks import digests
from xckpt.storage.chunks.file_checks import file_content, manifest_in
from xckpt.storage.foreign import zarr_limits


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


EXCHANGED = {
    MANIFEST: "plain|bytes takes about",
    DIGESTS: "altered",
    PLACES: "altered",
}
"""A file of a checkpoint -> what an error says of it."""


@pytest.mark.parametrize("what", ["a pipe", "a folder", "1 TiB"])
@pytest.mark.parametrize("name", EXCHANGED)
def test_a_file_that_is_exchanged_once_it_was_looked_at(
    packed: Path, name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a path was a moment before says nothing of what is opened: each look finds a file."""
    usual = os.stat(__file__)
    (packed / name).unlink()
    ODD[what](packed / name)
    real = os.stat

    def before(path: object, *args: Any, **named: Any) -> os.stat_result:
        return usual if str(path).endswith(name) else real(path, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", before)
    error = xckpt.ManifestError if name == MANIFEST else xckpt.CorruptCheckpointError
    with pytest.raises(error, match=EXCHANGED[name]):
        xckpt.load(packed)
    if name == MANIFEST:
        assert manifest_in(packed) == b""


def test_of_a_manifest_that_grows_no_more_is_read_than_it_had(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows between the look at its descriptor and the read."""
    file = packed / MANIFEST
    size, real = file.stat().st_size, os.fstat

    def growing(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        giant(file)
        return status

    monkeypatch.setattr(os, "fstat", growing)
    content = file_content(str(file), 1 << 30)
    assert content is not None and len(content) == size + 1


def test_the_holes_of_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    """A file of zarr that becomes a pipe once its status was asked for."""
    giant(tmp_path / "file")
    status = os.stat(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert zarr_limits._bytes_there(tmp_path / "pipe", status) == 0
