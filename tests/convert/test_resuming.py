"""A conversion that is killed can be resumed: less work the second time, and the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import xckpt
from tests.convert.test_run import MAPPING, files, flax_like, same, torch_like
from tests.support.fork_server import context
from xckpt.convert import Mapping, Rule
from xckpt.convert.journal import Journal, read_journal
from xckpt.convert.run import convert
from xckpt.errors import CheckpointExistsError

OPTIONS = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15, threads=1)


def _stop(progress: xckpt.Progress) -> None:
    if progress.done > progress.total / 2:
        raise RuntimeError("stopped")


STOPPED = replace(OPTIONS, progress=_stop)


def convert_until_killed(source: Path, target: Path, share: float) -> None:
    def tell(progress: xckpt.Progress) -> None:
        if progress.done >= share * progress.total:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, mapping=MAPPING, options=replace(OPTIONS, progress=tell))


def killed(source: Path, target: Path, share: float) -> None:
    """Convert in a process that is killed when a share of the bytes is written."""
    process = context().Process(target=convert_until_killed, args=(source, target, share))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source"
    xckpt.save(path, torch_like(), options=OPTIONS)
    return path


@pytest.mark.parametrize("name", ["checkpoint", "model.safetensors"])
def test_a_kill_in_the_middle(source: Path, tmp_path: Path, name: str) -> None:
    whole = tmp_path / "whole" / name
    whole.parent.mkdir()
    convert(source, whole, mapping=MAPPING, options=OPTIONS)
    target = tmp_path / name
    killed(source, target, 0.3)
    killed(source, target, 0.7)
    assert not target.exists()
    done = convert(source, target, mapping=MAPPING, options=OPTIONS)
    assert 0.6 * done.bytes < done.bytes_before < done.bytes
    if target.is_dir():
        assert files(target) == files(whole)
        same(xckpt.load(target), flax_like(torch_like()))
    else:
        assert target.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", name}


def test_a_kill_at_the_end_leaves_nothing_to_make(source: Path, tmp_path: Path) -> None:
    killed(source, tmp_path / "target", 1)
    done = convert(source, tmp_path / "target", mapping=MAPPING, options=OPTIONS)
    assert done.bytes_before == done.bytes
    same(xckpt.load(tmp_path / "target"), flax_like(torch_like()))


def test_another_conversion_clears_the_remains_away(source: Path, tmp_path: Path) -> None:
    killed(source, tmp_path / "target", 0.5)
    done = convert(source, tmp_path / "target", mapping=MAPPING, dtype="float16", options=OPTIONS)
    assert done.bytes_before == 0
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert xckpt.load(tmp_path / "target")["embed"]["embedding"].dtype == np.float16
    assert xckpt.open(tmp_path / "target").verify() == []


@pytest.mark.parametrize("first, second", [("list", "dict"), ("none", "list")])
def test_another_tree_of_the_target_starts_over(tmp_path: Path, first: str, second: str) -> None:
    """What was written for other leaf names was taken for this tree's: its leaves were missing."""
    leaves = [np.full((32, 64), n, np.float32) for n in range(6)]
    named = {str(n): leaf for n, leaf in enumerate(leaves)}
    likes: dict[str, Any] = {"none": None, "list": {"l": leaves}, "dict": {"l": named}}
    xckpt.save(tmp_path / "source", {f"l.{n}": leaf for n, leaf in enumerate(leaves)})
    mapping = Mapping([Rule("l.{n}", "l/{n}")])
    about: dict[str, Any] = {"mapping": mapping, "like": likes[first]}
    with pytest.raises(RuntimeError, match="stopped"):
        convert(tmp_path / "source", tmp_path / "target", options=STOPPED, **about)
    about["like"] = likes[second]
    convert(tmp_path / "source", tmp_path / "target", options=OPTIONS, **about)
    loaded = xckpt.load(tmp_path / "target")["l"]
    assert type(loaded).__name__ == second
    same(dict(enumerate(loaded.values() if second == "dict" else loaded)), dict(enumerate(leaves)))


def test_an_ordinary_save_clears_the_remains_away(source: Path, tmp_path: Path) -> None:
    killed(source, tmp_path / "target", 0.5)
    xckpt.save(tmp_path / "target", {"w": np.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("name", ["target", "target.safetensors"])
def test_two_conversions_to_one_path_are_not_mixed(
    source: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the second told that it starts over, or may go on with what the first writes."""
    refused: list[BaseException] = []
    other: dict[str, Any] = {"dtype": "float16", "mapping": MAPPING, "options": OPTIONS}

    def tell(progress: xckpt.Progress) -> None:
        with pytest.raises(
            CheckpointExistsError, match="another process is writing here"
        ) as caught:
            convert(source, tmp_path / name, **other)
        refused.append(caught.value)

    options = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15, progress=tell)
    convert(source, tmp_path / name, mapping=MAPPING, options=options)
    assert refused and not caplog.records
    assert not any(hasattr(error, "__notes__") for error in refused)
    whole = xckpt.load(tmp_path / name)["layers" if name == "target" else "layers.up.kernel"]
    whole = whole["up"]["kernel"] if name == "target" else whole
    same(whole, flax_like(torch_like())["layers"]["up"]["kernel"])


def test_a_failure_keeps_what_was_written(source: Path, tmp_path: Path) -> None:
    def tell(progress: xckpt.Progress) -> None:
        if progress.done > progress.total / 2:
            raise RuntimeError("the caller has had enough")

    options = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15, progress=tell)
    with pytest.raises(RuntimeError, match="had enough"):
        convert(source, tmp_path / "target", mapping=MAPPING, options=options)
    done = convert(source, tmp_path / "target", mapping=MAPPING, options=OPTIONS)
    assert done.bytes_before > done.bytes / 2


def test_a_journal_is_read_up_to_where_it_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, b"this")
    for unit in range(5):
        journal.note(unit, bytes([unit]) * unit)
    whole = path.read_bytes()
    ends = [read_journal(path)[2]]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        digest, done, sound = read_journal(path)
        assert list(done) == list(range(len(done)))
        assert sound <= length
        ends.append(sound)
        assert (digest is None) == (sound == 0)
    assert len(set(ends)) == 7
    Journal(path, b"this").note(9, b"")
    assert list(read_journal(path)[1]) == [0, 1, 2, 3, 9]


def test_a_journal_ends_before_a_byte_that_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, b"this")
    for unit in range(5):
        journal.note(unit, bytes([unit]) * unit)
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        digest, done, sound = read_journal(path)
        assert sound <= place
        assert digest in (None, b"this")
        assert done == {unit: bytes([unit]) * unit for unit in range(len(done))}


POOLED = """
import os, signal, sys
from concurrent.futures import ProcessPoolExecutor
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from tests.convert.test_run import MAPPING
from tests.convert.test_resuming import OPTIONS
from xckpt.convert.run import convert

source, target, method = sys.argv[1:]

def tell(progress):
    if progress.done >= 0.5 * progress.total:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    executor = ProcessPoolExecutor(2, get_context(method))
    options = replace(OPTIONS, progress=tell)
    convert(source, target, mapping=MAPPING, options=options, executor=executor)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_workers_that_outlive_their_parent_do_not_keep_the_path(
    source: Path, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "pooled.py"
    script.write_text(POOLED)
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(source), str(tmp_path / "target"), method]
    with subprocess.Popen(command, cwd=root, env=environment, start_new_session=True) as process:
        try:
            assert process.wait() == -signal.SIGKILL
            # Its workers live on: they got no signal.
            os.killpg(process.pid, 0)
            done = convert(source, tmp_path / "target", mapping=MAPPING, options=OPTIONS)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert done.bytes_before >= done.bytes / 2
    same(xckpt.load(tmp_path / "target"), flax_like(torch_like()))


def _safetensors(path: Path, fill: float) -> Path:
    save_file({f"w{i}": np.full((64, 64), fill, np.float32) for i in range(8)}, path)
    return path


def _dcp(path: Path, fill: float) -> Path:
    _safetensors(path.with_name("a.safetensors"), fill)
    convert(path.with_name("a.safetensors"), path, format="dcp", overwrite=True)
    return path


def _torch_save(path: Path, fill: float) -> Path:
    torch = pytest.importorskip("torch")
    torch.save({f"w{i}": torch.full((64, 64), fill) for i in range(8)}, path)
    return path


@pytest.mark.parametrize("to", ["checkpoint", "b.safetensors"])
@pytest.mark.parametrize(
    "write, name",
    [
        (_safetensors, "m.safetensors"),
        (_dcp, "m"),
        pytest.param(_torch_save, "m.pt", marks=pytest.mark.thorough),
    ],
)
def test_a_source_that_was_written_anew_at_its_old_time(
    write: Callable[[Path, float], Path],
    name: str,
    to: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = write(tmp_path / name, 1.0)
    files = [path for path in [source, *source.glob("*"), *source.glob(".*")] if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}

    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped"):
            convert(source, tmp_path / to, options=STOPPED)
    assert not caplog.records
    write(source, 2.0)
    for path, time in times.items():
        os.utime(path, ns=(time, time))
    done = convert(source, tmp_path / to, options=OPTIONS)
    assert done.bytes_before == 0
    assert "the conversion starts over" in caplog.text
    loaded = xckpt.load(tmp_path / to)
    assert all((loaded[f"w{i}"] == 2).all() for i in range(8))


@pytest.mark.parametrize("write", [_dcp, _torch_save])
def test_a_source_that_is_written_meanwhile(
    write: Callable[[Path, float], Path], tmp_path: Path
) -> None:
    """The target was a mixture of two checkpoints."""
    source, new = write(tmp_path / "old", 1.0), write(tmp_path / "new", 2.0)

    def rewrite(progress: xckpt.Progress) -> None:
        if progress.done < progress.total / 2:
            return
        for file in [new, *new.glob("*")]:
            if file.is_file():
                (source / file.relative_to(new)).write_bytes(file.read_bytes())

    with pytest.raises(xckpt.StorageError, match="old: a file of it was written while it was read"):
        convert(source, tmp_path / "to", options=replace(OPTIONS, progress=rewrite))
    assert not (tmp_path / "to").exists()
    assert convert(source, tmp_path / "to", options=OPTIONS).bytes_before == 0
    assert all((leaf == 2).all() for leaf in xckpt.load(tmp_path / "to").values())


@pytest.mark.skipif(sys.platform != "linux", reason="the paths of open files are in /proc")
@pytest.mark.parametrize("name", ["out.safetensors", "out"])
def test_a_unit_is_noted_once_it_survives_a_power_cut(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the next conversion took for written what was not on the disk."""
    xckpt.save(tmp_path / "a", {"w": np.arange(1000.0)})
    synced, before = list[str](), list[list[str]]()
    sync, note = os.fsync, Journal.note

    def syncing(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def noting(journal: Journal, unit: int, report: bytes) -> None:
        before.append([path for path in synced if "/output/" in path])
        note(journal, unit, report)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Journal, "note", noting)
    convert(tmp_path / "a", tmp_path / name, format="dcp" if name == "out" else None)
    assert before and all(before)
