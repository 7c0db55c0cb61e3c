"""Checkpoints and files that mean harm, where no test of the formats holds it yet."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.attacks.victim import attempt, outcome
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import Mapping
from xckpt.core.manifest.codec import parse
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.file_checks import manifest_in
from xckpt.storage.commit.conditional import is_written
from xckpt.storage.location import Location

pytestmark = pytest.mark.thorough


def shrinks(path: str) -> list[str]:
    """Loads while another process cuts a chunk's file off again and again, and mends it."""
    kinds: list[str] = []
    stop = time.monotonic() + 6
    while time.monotonic() < stop:
        for call in (
            lambda: xckpt.load(path),
            lambda: xckpt.load_into(path, {"w": np.zeros((1024, 1024), np.float32)}),
            lambda: xckpt.open(path).verify(),
            lambda: xckpt.open(path).array("w")[7:900, 5:],
        ):
            kinds.append(outcome(call).kind)
    return sorted(set(kinds))


def test_files_shrink(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.ones((1024, 1024), np.float32)})
    chunk = path / "w" / "c" / "0" / "0"
    content = chunk.read_bytes()
    done = threading.Event()

    def cut() -> None:
        while not done.is_set():
            os.truncate(chunk, 4096)
            time.sleep(0.001)
            with chunk.open("r+b") as stream:
                stream.write(content)
            time.sleep(0.005)

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        seen = attempt(shrinks, str(path))
    finally:
        done.set()
        cutting.join()
    assert seen.kind == "done", (seen.kind, seen.code, seen.text)
    assert set(seen.value) <= {"done", "CorruptCheckpointError", "StorageError"}


def stands_in(what: str, file: Path) -> None:
    """Something else takes the place of a file."""
    file.unlink()
    if what == "/dev/zero":
        file.symlink_to("/dev/zero")
    elif what == "/etc/passwd":
        file.symlink_to("/etc/passwd")
    elif what == "a loop":
        file.symlink_to(file.name)
    elif what == "a pipe":
        os.mkfifo(file)
    elif what == "a folder":
        file.mkdir()
    else:
        file.touch()
        os.truncate(file, 1 << 40)


@pytest.mark.parametrize(
    "what", ["/dev/zero", "/etc/passwd", "a loop", "a pipe", "a folder", "1 TiB"]
)
@pytest.mark.parametrize("name", ["xckpt.json", "xckpt.digests", "w/zarr.json", "w/c/0"])
def test_special_files(tmp_path: Path, name: str, what: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.arange(1000.0)})
    stands_in(what, path / name)
    for call in (xckpt.load, lambda path: xckpt.open(path).verify(), xckpt.exists):
        done = outcome(call, path)
        assert done.kind == "done" or done.xckpt, (done.kind, done.text)
        assert done.seconds < 5 * ALLOWANCE
    loaded = outcome(xckpt.load, path)
    assert loaded.kind != "done"
    saved = outcome(xckpt.save, path, {"w": np.arange(3.0)}, overwrite=True)
    assert saved.kind == "done" or saved.xckpt, (saved.kind, saved.text)


@pytest.mark.parametrize("what", ["a pipe", "1 TiB"])
def test_a_manifest_that_is_none_is_neither_waited_for_nor_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.arange(1000.0)})
    stands_in(what, path / "xckpt.json")
    assert attempt(manifest_bytes, str(path), seconds=10 * ALLOWANCE).value < 100 << 20
    assert attempt(is_written_there, str(path), seconds=10 * ALLOWANCE).value is False
    deleted = attempt(xckpt.delete, str(path), seconds=10 * ALLOWANCE)
    assert deleted.kind == "StorageError" and "so nothing was deleted" in deleted.text, deleted
    assert (path / "w" / "c" / "0").is_file()


def manifest_bytes(path: str) -> int:
    """How much memory looking at a manifest takes."""
    before = peak()
    assert manifest_in(Path(path)) == b""
    return peak() - before


def peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def is_written_there(path: str) -> bool:
    return is_written(Location.parse(path), b"a manifest")


def test_very_many_values() -> None:
    """Half a million: refused by the number, or read in seconds."""
    leaves = ",".join(
        f'{{"kind":"value","name":"v{n:06}","type":"int","value":"1"}}' for n in range(500_000)
    )
    body = f'{{"leaves":[{leaves}]}}'
    digest = digest_bytes(body.encode()).hex()
    text = f'{{"format":"xckpt","version":1,"digest":"{digest}","checkpoint":{body}}}'
    done = outcome(parse, text.encode(), digest_bytes)
    assert (done.kind == "done" or done.xckpt) and done.seconds < 60 * ALLOWANCE, (
        done.kind,
        done.text[:300],
    )


def test_markup_is_text(tmp_path: Path) -> None:
    """What rich would take for a colour or a link is printed as it is."""
    name = "[bold red]w[/] [link=http://x]y[/link] :skull:"
    xckpt.save(tmp_path / "ckpt", {name: np.ones(3)})
    command = [sys.executable, "-m", "xckpt", "ls", str(tmp_path / "ckpt")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0 and "[bold red]w" in ended.stdout, ended.stderr


def orbax_folder(path: Path, shape: list[int], chunk: list[int], *, compressor: Any) -> Path:
    """A zarr v2 array in the layout of an old Orbax checkpoint."""
    array = path / "w"
    array.mkdir(parents=True)
    document = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunk,
        "dtype": "<f4",
        "compressor": compressor,
        "fill_value": 0,
        "order": "C",
        "filters": None,
        "dimension_separator": ".",
    }
    (array / ".zarray").write_text(json.dumps(document))
    names = {"key_type": 2, "key": "w"}
    tree = {"('w',)": {"key_metadata": [names], "value_metadata": {"value_type": "jax.Array"}}}
    metadata = {"tree_metadata": tree, "use_zarr3": False}
    (path / "_METADATA").write_text(json.dumps(metadata))
    (path / "_CHECKPOINT_METADATA").write_text("{}")
    return array


def test_compressed_bombs(tmp_path: Path) -> None:
    """A chunk of 16 bytes that would unpack to a gibibyte."""
    array = orbax_folder(tmp_path / "ckpt", [4], [4], compressor={"id": "zlib", "level": 1})
    packed = zlib.compressobj(9)
    content = b"".join(packed.compress(bytes(1 << 24)) for _ in range(64)) + packed.flush()
    (array / "0").write_bytes(content)
    done = attempt(loaded_within, str(tmp_path / "ckpt"), 400)
    assert done.xckpt, (done.kind, done.code, done.text)


def loaded_within(path: str, mebibytes: int) -> list[int]:
    """Load with so much memory above what is there, and no more."""
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        xckpt.load(path)
    finally:
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        assert grown < mebibytes, grown
    return [grown]


@pytest.mark.parametrize("bits", [36, 40, 50])
def test_orbax_without_chunks(tmp_path: Path, bits: int) -> None:
    """An absurd shape of which nothing is stored: refused in seconds, before memory is taken."""
    path = tmp_path / "ckpt"
    orbax_folder(path, [1 << bits], [1 << 20], compressor=None)
    done = attempt(loaded_within, str(path), 400, seconds=30)
    assert done.xckpt, (done.kind, done.code, done.text)
    made = outcome(xckpt.convert, path, tmp_path / "out") if callable(xckpt.convert) else None
    assert made is None or made.xckpt


def test_patterns_in_linear_time() -> None:
    """Many wildcards against a name that fits none of them."""
    from xckpt.mapping.pattern import Pattern

    text = "".join(f"{{x{n}...}}a" for n in range(12)) + "z"
    began = time.monotonic()
    done = outcome(lambda: Pattern.parse(text).match("a" * 5000, {}))
    assert done.fair and time.monotonic() - began < 5 * ALLOWANCE, (done.kind, done.text)


ABSURD_RULES = {
    "indices": '[[rule]]\nsource = "w{i}"\ntarget = "v{i}"\nindices = { i = [0, 1000000000000] }\n',
    "pad": (
        '[[rule]]\nsource = "w"\ntarget = "v"\noperations = [{ pad = [[0, 1000000000000000]] }]\n'
    ),
    "a coefficient": f'[[rule]]\nsource = "w{{{"9" * 300}*i}}"\ntarget = "v{{i}}"\n',
}


@pytest.mark.parametrize("what", ABSURD_RULES)
def test_mappings_with_absurd_numbers(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.ones(3)})
    (tmp_path / "m.toml").write_text(ABSURD_RULES[what])

    def call() -> object:
        mapping = Mapping.from_file(tmp_path / "m.toml")
        return xckpt.load(path, {"v": np.zeros(3)}, mapping=mapping)

    done = outcome(call)
    assert done.fair and done.kind != "done" and done.seconds < 10 * ALLOWANCE, (
        done.kind,
        done.text,
    )


@pytest.mark.parametrize("mask", [0o077, 0o002, 0o022])
def test_the_umask_is_kept(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for _ in range(2):
            xckpt.save(tmp_path / "ckpt", {"w": np.ones(300), "step": 1}, overwrite=True)
    finally:
        os.umask(before)
    for folder, _, files in os.walk(tmp_path / "ckpt"):
        assert os.stat(folder).st_mode & 0o777 == 0o777 & ~mask, folder
        for name in files:
            file = os.path.join(folder, name)
            assert os.stat(file).st_mode & 0o777 == 0o666 & ~mask, file


def test_a_conversion_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C says what is kept, and the same command goes on."""
    path, target = tmp_path / "ckpt", tmp_path / "out.safetensors"
    xckpt.save(path, {f"w{n}": np.ones((1024, 1024), np.float32) for n in range(96)})
    command = [sys.executable, "-m", "xckpt", "convert", str(path), str(target)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stop = time.monotonic() + 60
    while time.monotonic() < stop and run.poll() is None:
        if any(".converting-" in name or ".saving-" in name for name in os.listdir(tmp_path)):
            run.send_signal(signal.SIGINT)
            break
        time.sleep(0.002)
    _, text = run.communicate(timeout=60)
    if run.returncode:
        assert run.returncode == 130 and "Traceback" not in text, text
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0 or target.exists(), ended.stderr
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "out.safetensors"]
    shutil.rmtree(path)
