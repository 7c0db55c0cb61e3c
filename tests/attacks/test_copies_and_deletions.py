"""Copies of hostile folders, and deletions of what is partly another user's."""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import outcome
from tests.support.hostile_claims import write_manifest
from tests.support.time_limit import ALLOWANCE
from tests.support.unprivileged import permissions_hold
from xckpt.convert import convert
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.file_checks import file_problem
from xckpt.storage.location import Location

STATE = {"w": np.arange(300.0), "step": 1}
OTHER = 12345
"""A user that is not this one."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    xckpt.save(path, STATE, options=xckpt.SaveOptions(pack_bytes=0, chunk_bytes=800))
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def sparse(file: Path) -> None:
    with open(file, "wb") as opened:
        opened.truncate(1 << 40)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a folder": lambda file: file.mkdir(),
    "a long file": sparse,
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("key", ["zarr.json", "w/zarr.json", "w/c/1", "xckpt.digests"])
@pytest.mark.parametrize("to", ["folder", "memory"])
def test_a_copy_reads_no_device_and_nothing_without_end(
    saved: Path, key: str, what: str, to: str
) -> None:
    """It filled the memory, or the disk, or waited for ever."""
    (saved / key).unlink()
    HOSTILE[what](saved / key)
    target = str(saved.with_name("copied"))
    if to == "memory":
        target = f"memory://copied-{what}-{key}".replace(" ", "-")
    with pytest.raises(xckpt.CorruptCheckpointError, match=f"{key}: it is .*nothing was copied: "):
        xckpt.copy(saved, target)
    assert not xckpt.exists(target) and os.listdir(saved.parent) == ["ckpt"]


def test_a_copy_of_an_endless_file_of_proc_ends(saved: Path) -> None:
    """Its length is said to be 0; that it is damaged is found when it is read."""
    (saved / "w/c/1").unlink()
    (saved / "w/c/1").symlink_to("/proc/kmsg")
    xckpt.copy(saved, saved.with_name("copied"))
    with pytest.raises(xckpt.CorruptCheckpointError, match="w"):
        xckpt.load(saved.with_name("copied"))


@pytest.mark.parametrize("what", ["a device", "a pipe"])
def test_a_copy_of_another_format_reads_no_device(saved: Path, what: str) -> None:
    dcp = saved.with_name("dcp")
    convert(saved, dcp, format="dcp")
    data = next(dcp.glob("*.distcp"))
    data.unlink()
    HOSTILE[what](data)
    with pytest.raises(xckpt.CorruptCheckpointError, match=f"{data.name}: it is not a plain file"):
        xckpt.copy(dcp, saved.with_name("copied"))
    assert sorted(os.listdir(saved.parent)) == ["ckpt", "dcp"]


def claim_chunks(path: Path, count: int, length: int) -> None:
    """A manifest of so many chunks that are not there, and a digest file of some length."""
    path.mkdir()
    leaf = {"kind": "tensor", "name": "w", "dtype": "int8", "shape": [count], "chunk": [1]}
    body = json.dumps(
        {"leaves": [leaf], "digests": "0" * 32, "zarr_json": 2}, separators=(",", ":")
    )
    digest = digest_bytes(body.encode()).hex()
    text = f'{{"format":"xckpt","version":1,"digest":"{digest}","checkpoint":{body}}}'
    (path / "xckpt.json").write_text(text)
    for name in ("zarr.json", "w/zarr.json"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}")
    with open(path / "xckpt.digests", "wb") as file:
        file.truncate(length)


@pytest.mark.parametrize(
    ("to", "length", "kind", "words"),
    [
        ("folder", 0, "CorruptCheckpointError", "too short for 2,147,483,648 chunks"),
        ("folder", 16 << 31, "CorruptCheckpointError", "w/c/0: it is missing"),
        ("memory", 16 << 31, "MemoryLimitError", "xckpt.digests, of 34,359,738,368 bytes, takes"),
    ],
)
def test_a_copy_counts_out_no_chunks_that_are_not_there(
    tmp_path: Path, to: str, length: int, kind: str, words: str
) -> None:
    """It listed two billion chunks, before it looked at one; the digests ended the process."""
    path = tmp_path / "ckpt"
    claim_chunks(path, 1 << 31, length)
    target = "memory://counted-out" if to == "memory" else str(tmp_path / "copied")
    done = outcome(xckpt.copy, path, target)
    assert done.kind == kind and done.seconds < 5 * ALLOWANCE, done.text
    assert words in done.text and not xckpt.exists(target)


def test_a_copy_ends_at_the_first_object_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on to look at each of a million files."""
    path, looked = tmp_path / "ckpt", list[str]()
    claim_chunks(path, 1 << 20, 16 << 20)

    def look(source: Location, key: str, most: int) -> str:
        looked.append(key)
        return file_problem(source, key, most)

    monkeypatch.setattr("xckpt.storage.copy_checkpoint.file_problem", look)
    with pytest.raises(xckpt.CorruptCheckpointError, match=r"w/c/.*: it is missing"):
        xckpt.copy(path, "memory://first-missing")
    assert len(looked) < 1 << 16


def test_a_copy_through_memory_takes_no_pack_that_is_longer_than_any_chunk(tmp_path: Path) -> None:
    """Its chunks may claim to fill it, so that only memory bounds it."""
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.arange(9)}, options=xckpt.SaveOptions(pack_bytes=1 << 18))
    text = (path / "xckpt.json").read_text()
    body = json.loads(text)["checkpoint"]
    places = base64.b64decode(body["inline_places"])
    body["leaves"][0] |= {"dtype": "int8", "shape": [1 << 39], "chunk": [1 << 29]}
    body["inline_places"] = base64.b64encode(places + places[16:] * 1023).decode()
    body["pack_bytes"] = 1 << 29
    digests = (path / "xckpt.digests").read_bytes() * 1024
    (path / "xckpt.digests").write_bytes(digests)
    write_manifest(path, json.dumps(body, separators=(",", ":")).encode())
    os.truncate(next((path / "xckpt.packs").iterdir()), 1 << 38)
    with pytest.raises(xckpt.MemoryLimitError, match=r"xckpt.packs/\w+, of 274,877,906,944 bytes"):
        xckpt.copy(path, "memory://long-pack")
    assert not xckpt.exists("memory://long-pack")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
@pytest.mark.parametrize("closed", ["w", "w/c", "."])
def test_a_deletion_that_cannot_end_does_not_begin(saved: Path, closed: str) -> None:
    """The manifest went, and the chunks of another user's folder stayed behind."""
    os.chown(saved / closed, OTHER, OTHER)
    before = contents(saved)
    with permissions_hold(), pytest.raises(xckpt.StorageError, match=r"Permission denied.*check"):
        xckpt.delete(saved)
    assert contents(saved) == before and xckpt.open(saved).verify() == []


def test_what_is_not_permitted_says_what_to_do(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overwrite of another user's folder in a sticky one."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("xckpt.storage.commit.staging.take_name", refuse)
    with pytest.raises(xckpt.StorageError, match=r"not permitted.*; it is another user's.*path"):
        xckpt.save(saved, {"w": np.zeros(2)}, overwrite=True)
    assert xckpt.load(saved)["step"] == 1
