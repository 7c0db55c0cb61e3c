"""Paths that are none, that change meanwhile, or that another release wrote."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import outcome
from tests.support.time_limit import ALLOWANCE

pytestmark = pytest.mark.thorough

STATE = {"w": np.arange(1000.0), "step": 1}
SECONDS = 5.0 * ALLOWANCE
"""Within which a call on an odd path ends."""

PATHS: dict[str, Any] = {
    "empty": "",
    "the root": "/",
    "NUL": "a\0b",
    "no UTF-8": "a\udcffb",
    "bytes": b"abc",
    "a number": 5,
    "None": None,
    "/dev/null": "/dev/null",
    "below a device": "/dev/full/x",
    "a pipe": "pipe",
    "below a pipe": "pipe/x",
    "a socket": "socket",
    "a loop of links": "loop",
    "below a loop": "loop/x",
    "below /proc": "/proc/1/x",
    "another scheme": "ftp://host/x",
    "a scheme in capitals": "S3://bucket/x",
    "no bucket": "s3://",
    "a relative file URL": "file://relative/x",
    "300 bytes": "a" * 300,
    "6000 bytes": "/".join(["b" * 200] * 30),
}


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("loop2", "loop")
    os.symlink("loop", "loop2")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    return tmp_path


CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda path: xckpt.save(path, STATE),
    "overwrite": lambda path: xckpt.save(path, STATE, overwrite=True),
    "save_async": lambda path: xckpt.save_async(path, STATE).result(),
    "load": lambda path: xckpt.load(path),
    "open": lambda path: xckpt.open(path).verify(),
    "delete": lambda path: xckpt.delete(path),
    "copy": lambda path: xckpt.copy(path, "copied"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", PATHS)
def test_what_is_no_path(odd: Path, what: str, call: str) -> None:
    before = sorted(os.listdir(odd))
    done = outcome(CALLS[call], PATHS[what])
    assert done.fair and done.kind != "done" and done.text, (done.kind, done.text)
    assert done.seconds < SECONDS
    assert sorted(os.listdir(odd)) == before


@pytest.mark.parametrize("what", PATHS)
def test_whether_a_checkpoint_is_where_no_path_is(odd: Path, what: str) -> None:
    done = outcome(xckpt.exists, PATHS[what])
    assert done.fair and not done.value, (done.kind, done.text)


@pytest.mark.parametrize(
    "name", [" ", "-rf", "*[a]?", "~x", "é", "\u202ea\x1b[2J", "a\nb", "x|zip:"]
)
def test_names_that_are_only_odd(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for step in (1, 2):
        xckpt.save(path, {**STATE, "step": step}, overwrite=True)
        assert xckpt.open(path).verify() == [] and xckpt.load(path)["step"] == step
    assert os.listdir(tmp_path) == [name]


def pausing(pause: Callable[[], object]) -> xckpt.SaveOptions:
    """Options of a save that does something once its data is under way."""
    done: list[int] = []

    def progress(seen: object) -> None:
        if not done:
            done.append(1)
            pause()

    return xckpt.SaveOptions(progress=progress, threads=1)


LARGE = {**{f"w{n}": np.full((128, 128), n) for n in range(4)}, "step": 2}


def staging(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if ".saving-" in path.name and path.is_dir()]
    return found


def delete(folder: Path) -> None:
    """Delete a folder that threads still write into; they may make it again."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
            return
    raise AssertionError(f"{folder} cannot be deleted")


def swap_link(folder: Path) -> None:
    (folder / "ckpt").unlink()
    (folder / "ckpt").symlink_to("b")


MEANWHILE: dict[str, Callable[[Path], object]] = {
    "the staging folder is deleted": lambda folder: delete(staging(folder)),
    "the staging folder is moved": lambda folder: staging(folder).rename(folder / "moved"),
    "the old checkpoint is deleted": lambda folder: shutil.rmtree(folder / "ckpt"),
    "the old one is renamed": lambda folder: (folder / "ckpt").rename(folder / "kept"),
    "a file takes the path": lambda folder: (
        shutil.rmtree(folder / "ckpt"),
        (folder / "ckpt").write_text("mine"),
    ),
    "a folder of the user takes the path": lambda folder: (
        shutil.rmtree(folder / "ckpt"),
        (folder / "ckpt").mkdir(),
        (folder / "ckpt" / "notes").write_text("mine"),
    ),
    "another save": lambda folder: xckpt.save(
        folder / "ckpt", {**STATE, "step": 3}, overwrite=True
    ),
    "gc": lambda folder: xckpt.gc(folder, older_than=0),
    "delete": lambda folder: xckpt.delete(folder / "ckpt"),
    "a copy of it": lambda folder: xckpt.copy(folder / "ckpt", folder / "copy"),
    "a load of it": lambda folder: xckpt.load(folder / "ckpt"),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_others_do_during_an_overwrite(tmp_path: Path, what: str) -> None:
    """It succeeds, or is an error by name; files of the user stay; what is there is whole."""
    folder = tmp_path / "folder"
    path = folder / "ckpt"
    xckpt.save(path, STATE)
    done = outcome(
        xckpt.save, path, LARGE, overwrite=True, options=pausing(lambda: MEANWHILE[what](folder))
    )
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)
    if "takes the path" in what:
        notes = path if what.startswith("a file") else path / "notes"
        assert notes.read_text() == "mine"
    elif path.exists():
        opened = xckpt.open(path)
        assert opened.verify() == [] and opened["step"] in (1, 2, 3)
        assert done.kind != "done" or opened["step"] in (2, 3)
    left = [name for name in os.listdir(folder) if ".saving-" in name]
    assert left == [], (done, left)


def test_a_link_is_turned_during_a_save(tmp_path: Path) -> None:
    """The checkpoint is whole wherever it went, and the other folder is as it was."""
    for name in "ab":
        xckpt.save(tmp_path / name, STATE)
    (tmp_path / "ckpt").symlink_to("a")
    options = pausing(lambda: swap_link(tmp_path))
    done = outcome(xckpt.save, tmp_path / "ckpt", LARGE, overwrite=True, options=options)
    assert done.kind == "done" or done.xckpt
    steps = [xckpt.load(tmp_path / name)["step"] for name in "ab"]
    assert all(xckpt.open(tmp_path / name).verify() == [] for name in "ab")
    assert sorted(steps) in ([1, 1], [1, 2])


@pytest.mark.parametrize("what", ["parent moved", "parent deleted"])
def test_the_parent_goes_during_a_save(tmp_path: Path, what: str) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    away: Callable[[], object] = (
        (lambda: parent.rename(tmp_path / "moved"))
        if what == "parent moved"
        else (lambda: delete(parent))
    )
    done = outcome(xckpt.save, parent / "ckpt", LARGE, options=pausing(away))
    assert done.kind == "done" or done.xckpt, (done.kind, done.text)


def newer(path: Path) -> None:
    """A checkpoint of a later release takes the place of one of ours."""
    xckpt.save(path, STATE)
    manifest = json.loads((path / "xckpt.json").read_bytes())
    manifest.update(version=99, more={"shards": 3})
    (path / "xckpt.json").write_text(json.dumps(manifest))
    (path / "later.bin").write_bytes(b"what only it knows")


@pytest.mark.parametrize("call", ["load", "open", "save", "copy", "exists", "gc"])
def test_a_checkpoint_of_a_later_release(tmp_path: Path, call: str) -> None:
    """It is named as such, and left as it is."""
    path = tmp_path / "ckpt"
    newer(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    calls: dict[str, Callable[[], Any]] = {
        **{name: (lambda name=name: CALLS[name](path)) for name in ("load", "open", "save")},
        "copy": lambda: xckpt.copy(path, tmp_path / "copied"),
        "exists": lambda: xckpt.exists(path),
        "gc": lambda: xckpt.gc(tmp_path, older_than=0),
    }
    done = outcome(calls[call])
    if call in ("load", "open", "copy"):
        assert done.kind == "VersionError" and "upgrade xckpt" in done.text, (done.kind, done.text)
    elif call == "save":
        assert done.kind == "CheckpointExistsError"
    else:
        assert done.kind == "done" and done.value in (True, [])
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_later_release_is_overwritten_only_where_that_is_asked(tmp_path: Path) -> None:
    """And what the manifest of the later one may name stays there: it is not known."""
    path = tmp_path / "ckpt"
    newer(path)
    done = outcome(xckpt.save, path, LARGE, overwrite=True)
    assert done.kind == "done" or done.xckpt
    assert (path / "later.bin").read_bytes() == b"what only it knows"
    if done.kind == "done":
        assert xckpt.open(path).verify() == []


CLAIMS: dict[str, bytes] = {
    "empty": b"",
    "noise": b"\xff" * 100,
    "deep": b"[" * 100_000,
    "a later release": b'{"version": 99, "what": {"is": "this"}}',
    "large": b"{" + b" " * (2 << 20) + b"}",
}


@pytest.mark.parametrize("what", [*CLAIMS, "a folder", "a pipe", "a loop", "a device"])
def test_claims_that_are_none(tmp_path: Path, what: str) -> None:
    """A save beside them and gc neither hang nor die."""
    name = ".ckpt.saving-0123456789abcdef"
    (tmp_path / name).mkdir()
    for claim in (tmp_path / f"{name}.claim", tmp_path / f"{name}.new"):
        if what in CLAIMS:
            claim.write_bytes(CLAIMS[what])
        elif what == "a folder":
            claim.mkdir()
        elif what == "a pipe":
            os.mkfifo(claim)
        elif what == "a loop":
            claim.symlink_to(claim.name)
        else:
            claim.symlink_to("/dev/zero")
    for _ in range(2):
        done = outcome(xckpt.save, tmp_path / "ckpt", STATE, overwrite=True)
        assert done.kind == "done" and done.seconds < SECONDS, (done.kind, done.text)
        listed = outcome(xckpt.gc, tmp_path, dry_run=True)
        assert listed.kind == "done" and listed.seconds < SECONDS, (listed.kind, listed.text)
    assert xckpt.open(tmp_path / "ckpt").verify() == []


@pytest.mark.parametrize("now", [0.0, 1e9, 4e9, 2e10])
def test_clocks_that_jump(tmp_path: Path, now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 1970, 2001, 2096 and 2603: saves, overwrites and gc; what is alive stays."""
    path = tmp_path / "ckpt"
    xckpt.save(path, STATE)

    def jump() -> None:
        monkeypatch.setattr(time, "time", lambda: now)
        for found in xckpt.gc(tmp_path, older_than=1):
            assert not found.removed, found

    xckpt.save(path, LARGE, overwrite=True, options=pausing(jump))
    assert xckpt.load(path)["step"] == 2 and os.listdir(tmp_path) == ["ckpt"]


def test_many_threads_save_to_one_path(tmp_path: Path) -> None:
    """Without overwrite one wins; with it all do, or say who came first."""
    path = tmp_path / "ckpt"
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(outcome, xckpt.save, path, {**STATE, "step": n}) for n in range(8)]
        kinds = [call.result().kind for call in calls]
        assert kinds.count("done") == 1 and kinds.count("CheckpointExistsError") == 7
        calls = [
            pool.submit(outcome, xckpt.save, path, {**STATE, "step": n}, overwrite=True)
            for n in range(8)
        ]
        assert {call.result().kind for call in calls} <= {"done", "CheckpointExistsError"}
    assert xckpt.open(path).verify() == [] and os.listdir(tmp_path) == ["ckpt"]


def test_loads_saves_and_deletes_at_once(tmp_path: Path) -> None:
    """A load gives a whole state or says that there is none, or that it was replaced."""
    path = tmp_path / "ckpt"
    xckpt.save(path, LARGE)
    ended = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        while not ended.is_set():
            seen.append(outcome(xckpt.load, path))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            xckpt.save(path, {**LARGE, "step": number}, overwrite=True)
            if number % 3 == 0:
                outcome(xckpt.delete, path)
    finally:
        ended.set()
        reader.join()
    kinds = {done.kind for done in seen}
    allowed = {"done", "NotACheckpointError", "CheckpointReplacedError"}
    assert kinds <= allowed, [(d.kind, d.text) for d in seen if d.kind not in allowed][:3]
