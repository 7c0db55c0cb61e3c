"""Bad paths, hostile manifests, disks that are full or read-only: a clear error, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import xckpt
from conformance.twins.pieces import cut_of
from xckpt.storage.array import digest_bytes

STATE = {"w": np.arange(1000), "long": "x" * 9000, "step": 3}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "ckpt", STATE, options=xckpt.SaveOptions(chunk_bytes=800))
    return tmp_path / "ckpt"


READS = {
    "load": xckpt.load,
    "open": xckpt.open,
    "load_into": lambda path: xckpt.load_into(path, {"w": np.zeros(1)}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_where_no_checkpoint_is(tmp_path: Path, read: Callable[[object], object]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("nothing", "empty", "other", "dangling", "file/below"):
        with pytest.raises(xckpt.NotACheckpointError, match=f"{name} holds no committed checkpo"):
            read(tmp_path / name)
    with pytest.raises(xckpt.NotACheckpointError, match="is a file"):
        read(tmp_path / "file")
    with pytest.raises(xckpt.NotACheckpointError, match="memory://nothing-here holds no"):
        read("memory://nothing-here")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")
    assert names(tmp_path) == ["dangling", "empty", "file", "other"]


def test_gc_of_a_file_says_that_it_is_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(xckpt.StorageError, match=f"^{path} is a file; gc takes a folder or a buck"):
        xckpt.gc(path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("hello")
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "notes.txt").write_text("mine")
    with pytest.raises(xckpt.CheckpointExistsError, match="is a file and holds no checkpoint"):
        xckpt.save(tmp_path / "file", STATE, overwrite=overwrite)
    with contextlib.nullcontext() if overwrite else pytest.raises(xckpt.CheckpointExistsError):
        xckpt.save(other, STATE, overwrite=overwrite)
    with pytest.raises(xckpt.StorageError, match="file"):
        xckpt.save(tmp_path / "file" / "below", STATE, overwrite=overwrite)
    assert names(tmp_path) == ["file", "other"]
    assert (other / "xckpt.json").exists() is overwrite
    assert (tmp_path / "file").read_text() == "hello"
    assert (other / "deep" / "notes.txt").read_text() == "mine"


def test_a_file_of_another_library_in_the_way_is_named(tmp_path: Path) -> None:
    saved, old, tensors = tmp_path / "a.pt", tmp_path / "old", tmp_path / "tensors"
    torch.save({"w": torch.ones(3)}, saved)
    torch.save({"w": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    save_file({"w": np.ones(3)}, tensors)
    os.mkfifo(tmp_path / "pipe")
    for name, is_a in [
        ("a.pt", "is a file of torch.save, which xckpt.load reads"),
        ("old", "is a file of torch.save, which xckpt.load reads"),
        ("tensors", "is a file of safetensors, which xckpt.load reads"),
        ("pipe", "is a file and holds no checkpoint"),
    ]:
        before = [] if name == "pipe" else (tmp_path / name).read_bytes()
        with pytest.raises(xckpt.CheckpointExistsError, match=f"{name} {is_a}"):
            xckpt.save(tmp_path / name, STATE, overwrite=True)
        assert before == [] or (tmp_path / name).read_bytes() == before


def test_an_existing_checkpoint_is_kept(saved: Path) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="holds a checkpoint already; pass overwrite=True"):
        xckpt.save(saved, {"other": 1})
    assert {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()} == before
    assert names(saved.parent) == ["ckpt"]


def alter(checkpoint: Path, edit: Callable[[dict, dict], object]) -> None:
    """Edit a manifest as an attacker would: with a digest that fits."""
    file = checkpoint / "xckpt.json"
    body = json.loads(file.read_bytes())["checkpoint"]
    edit(body, next(leaf for leaf in body["leaves"] if leaf["name"] == "w"))
    text = json.dumps(body)
    digest = digest_bytes(text.encode()).hex()
    file.write_text(
        f'{{"format": "xckpt", "version": 1, "digest": "{digest}", "checkpoint": {text}}}'
    )


def value(kind: str, text: str) -> dict[str, str]:
    return {"kind": "value", "name": "v", "type": kind, "value": text}


HOSTILE: dict[str, Callable[[dict, dict], object]] = {
    "2^60 elements": lambda body, w: w.update(shape=[1 << 60], chunk=[100]),
    "a product that overflows": lambda body, w: w.update(shape=[1 << 40] * 3, chunk=[1] * 3),
    "2^50 chunks": lambda body, w: w.update(shape=[1 << 50], chunk=[1]),
    "2^32 chunks": lambda body, w: (
        body.update(leaves=[w]),
        w.update(shape=[1 << 41], chunk=[512]),
    ),
    "a giant chunk": lambda body, w: w.update(shape=[1 << 50], chunk=[1 << 50]),
    "a giant tensor": lambda body, w: w.update(shape=[1 << 44], chunk=[1 << 26]),
    "a negative size": lambda body, w: w.update(shape=[-1]),
    "an int beyond 64 bits": lambda body, w: w.update(shape=[10**30]),
    "33 dimensions": lambda body, w: w.update(shape=[1] * 33, chunk=[1] * 33),
    "a chunk of nothing": lambda body, w: w.update(chunk=[0]),
    "more chunks than there are": lambda body, w: w.update(shape=[2000]),
    "another chunk shape": lambda body, w: w.update(chunk=[50]),
    "another dtype": lambda body, w: w.update(dtype="float64"),
    "a dtype that kills TensorStore": lambda body, w: w.update(dtype="r16"),
    "a codec of its own": lambda body, w: body.update(codecs=["gzip"]),
    "an unknown field": lambda body, w: body.update(hello=1),
    "an unknown field of a leaf": lambda body, w: w.update(spec={"driver": "file", "path": "/"}),
    "a root outside": lambda body, w: body.update(root="../ckpt"),
    "another root": lambda body, w: body.update(root="elsewhere"),
    "a name that leads outside": lambda body, w: w.update(name="../../etc/w"),
    "a name twice": lambda body, w: w.update(name="long"),
    "a leaf in a leaf": lambda body, w: w.update(name="long/w"),
    "a deep name": lambda body, w: w.update(name="a/" * 5000 + "w"),
    "a pickled value": lambda body, w: body["leaves"].append(value("pickle", "gASVAAA=")),
    "a value that is none": lambda body, w: body["leaves"].append(value("int", "0xzz")),
    "an imported class": lambda body, w: body.update(containers={"": "namedtuple:os.system:w"}),
    "digests that are none": lambda body, w: body.update(digests="zz"),
    "pieces that overlap": lambda body, w: (
        w.update(chunk=None, pieces=0),
        body.update(cuts=[cut_of([{"offset": [0], "shape": [600], "chunk": [100]}] * 2, 1)]),
    ),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_hostile_manifests(saved: Path, attack: str) -> None:
    """Refused, and before memory for it is taken: this process would die of a tensor of 2^44."""
    alter(saved, HOSTILE[attack])
    with pytest.raises((xckpt.ManifestError, xckpt.CorruptCheckpointError)):
        xckpt.load(saved)
    with contextlib.suppress(xckpt.ManifestError):
        assert xckpt.open(saved).verify()


@pytest.mark.parametrize(
    "content, error, message",
    [
        (b"", xckpt.ManifestError, "it is not a manifest.*; restore it from a copy"),
        (b"{}", xckpt.ManifestError, "it is not a manifest.*; restore it from a copy"),
        (b"\xff" * 100, xckpt.ManifestError, "it is not a manifest.*; restore it from a copy"),
        (b"[" * 100_000, xckpt.ManifestError, "it is not a manifest.*; restore it from a copy"),
        (b'{"format": "zip", "version": 1, "digest": "", "checkpoint": 1}', None, "'zip', not"),
        (
            b'{"format": "xckpt", "version": 2, "digest": "", "checkpoint": {"new": 1}, "x": 1}',
            xckpt.VersionError,
            "version 2 .* upgrade xckpt",
        ),
        (b'{"format": "xckpt", "version": 1, "digest": "", "checkpoint": {}}', None, "altered"),
    ],
)
def test_what_is_no_manifest(saved: Path, content: bytes, error, message: str) -> None:
    (saved / "xckpt.json").write_bytes(content)
    with pytest.raises(error or xckpt.ManifestError, match=message) as caught:
        xckpt.load(saved)
    assert str(caught.value).startswith(f"{saved}: ")


CONFINED = """
import json, os, resource, signal, subprocess, sys
import numpy as np
import xckpt

def names(folder):
    return sorted(os.listdir(folder))

def attempt(*arguments, **named):
    try:
        xckpt.save(*arguments, **named)
    except xckpt.XckptError as error:
        return [type(error).__name__, str(error)]
    return ["saved", ""]

def step_at(path):
    checkpoint = xckpt.open(path)
    assert checkpoint.verify() == []
    return checkpoint["step"]

def tell(*values):
    print(json.dumps(values))

folder = sys.argv[1]
path = os.path.join(folder, "ckpt")
small = {"w": np.arange(1000), "step": 1}
large = {"w": np.random.default_rng(0).bytes(8 << 20), "step": 2}
large["w"] = np.frombuffer(large["w"], np.uint8)
"""

MOUNTED = """
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
"""

FULL_DISK = """
mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
fresh = attempt(path, large), names(folder)
xckpt.save(path, small)
again = attempt(path, large, overwrite=True), names(folder), step_at(path)
many = {str(n): np.random.default_rng(n).random(1000) for n in range(1000)}
third = attempt(path, many, overwrite=True), names(folder), step_at(path)
xckpt.save(path, {"step": 3}, overwrite=True)
tell(*fresh, *again, *third, step_at(path))
"""

READ_ONLY_FOLDER = """
xckpt.save(path, small)
mount("--bind", folder, folder)
mount("-o", "remount,ro,bind", folder)
tell(
    attempt(path, large, overwrite=True),
    attempt(os.path.join(folder, "new"), small),
    attempt(os.path.join(folder, "new", "below"), small),
    names(folder),
    step_at(path),
)
"""

MOUNT_POINT = """
mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
steps = []
for state in (small, {"step": 5}, small):
    xckpt.save(folder, state, overwrite=True)
    steps.append(step_at(folder))
failed = attempt(folder, large, overwrite=True)
tell(steps, failed, step_at(folder), os.path.ismount(folder))
"""

FILE_SIZE_LIMIT = """
xckpt.save(path, small)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
fresh = attempt(os.path.join(folder, "other"), large)
again = attempt(path, large, overwrite=True)
tell(fresh, again, names(folder), step_at(path))
"""

NO_MORE_FILES = """
xckpt.save(path, small)
before = resource.getrlimit(resource.RLIMIT_NOFILE)
again = []
for more in (1, 2):
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(names("/proc/self/fd")) + more, before[1]))
    many = {str(n): np.random.default_rng(n).random(1 << 16) for n in range(20)}
    again.append(attempt(path, many, overwrite=True))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
tell(again, names(folder), step_at(path))
"""


def unshared() -> list[str] | None:
    """How to get a mount namespace of one's own here, if the system allows it."""
    for command in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        with_mount = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        try:
            if subprocess.run(with_mount, capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            return None
    return None


def confined(script: str, folder: Path, *, mounts: bool) -> list:
    folder.mkdir()
    command = [sys.executable, "-c", CONFINED + MOUNTED + script, str(folder)]
    if mounts:
        prefix = unshared()
        if prefix is None:
            pytest.skip("the system lets this user mount nothing, not even in a namespace")
        command = [*prefix, *command]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_a_full_disk(tmp_path: Path) -> None:
    fresh, left, again, kept, step, third, still, old, new = confined(
        FULL_DISK, tmp_path / "disk", mounts=True
    )
    for kind, message in (fresh, again, third):
        assert kind == "StorageError"
        assert "the disk is full: free space or save elsewhere" in message
        assert str(tmp_path / "disk" / "ckpt") in message
    assert (left, kept, still) == ([], ["ckpt"], ["ckpt"])
    assert (step, old, new) == (1, 1, 3)


def test_a_read_only_folder(tmp_path: Path) -> None:
    overwriting, fresh, below, left, step = confined(
        READ_ONLY_FOLDER, tmp_path / "disk", mounts=True
    )
    for kind, message in (overwriting, fresh, below):
        assert kind == "StorageError"
        assert "Read-only file system" in message and "check its permissions" in message
    assert (left, step) == (["ckpt"], 1)


def test_a_mount_point_is_filled_in_place(tmp_path: Path) -> None:
    steps, (kind, message), left, still = confined(MOUNT_POINT, tmp_path / "disk", mounts=True)
    assert steps == [1, 5, 1]
    assert kind == "StorageError" and "the disk is full" in message
    assert left == 1 and still


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    fresh, again, left, step = confined(FILE_SIZE_LIMIT, tmp_path / "disk", mounts=False)
    for kind, message in (fresh, again):
        assert kind == "StorageError" and "File too large" in message
    assert (left, step) == (["ckpt"], 1)


def test_no_more_open_files(tmp_path: Path) -> None:
    outcomes, left, step = confined(NO_MORE_FILES, tmp_path / "disk", mounts=False)
    for kind, message in outcomes:
        assert kind == "StorageError" and "Too many open files" in message
    assert (left, step) == (["ckpt"], 1)


def test_a_folder_that_the_kernel_refuses() -> None:
    """Below /proc nothing can be made, not even by root."""
    for path in ("/proc/ckpt", "/proc/self/ckpt", "/dev/null/ckpt"):
        if os.path.exists(os.path.dirname(path)):
            with pytest.raises(xckpt.StorageError, match=path):
                xckpt.save(path, STATE)
