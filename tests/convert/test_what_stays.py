"""A conversion that stops says what it leaves, where, how large, and how to go on or remove it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.convert.test_resuming import OPTIONS
from tests.convert.test_run import MAPPING, torch_like
from xckpt.cli.commands import commands
from xckpt.convert import run
from xckpt.convert.run import convert

Stop = type[BaseException]
KEPT = r"(\d+\.\d KiB) that were written are kept in (\S+): the same call goes on with them, and "


@pytest.fixture
def source(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "source", torch_like())
    return tmp_path / "source"


def stopping(error: Stop) -> xckpt.SaveOptions:
    def tell(progress: xckpt.Progress) -> None:
        if progress.done >= 0.5 * progress.total:
            raise error("the disk is full")

    return replace(OPTIONS, progress=tell)


@pytest.mark.parametrize("name", ["target", "target.safetensors"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, xckpt.StorageError])
def test_a_note_says_it(source: Path, tmp_path: Path, name: str, error: Stop) -> None:
    with pytest.raises(error) as raised:
        convert(source, tmp_path / name, mapping=MAPPING, options=stopping(error))
    (note,) = raised.value.__notes__
    found = re.fullmatch(f"{KEPT}xckpt gc {re.escape(str(tmp_path))} removes them", note)
    assert found is not None
    assert found[2] == str(tmp_path / f".{name}.saving-conversion") and Path(found[2]).is_dir()
    (left,) = xckpt.gc(tmp_path)
    assert left.removed and left.path == found[2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", ["target", "target.safetensors"])
def test_its_size_is_what_was_written(tmp_path: Path, name: str) -> None:
    leaves = {f"w{number}": np.full(1 << 18, number, np.uint8) for number in range(8)}
    xckpt.save(tmp_path / "source", leaves)
    # Each unit is a leaf, and one thread stops after half of them.
    tell = stopping(KeyboardInterrupt).progress
    options = xckpt.SaveOptions(memory_bytes=1 << 20, threads=1, progress=tell)
    with pytest.raises(KeyboardInterrupt) as raised:
        convert(tmp_path / "source", tmp_path / name, options=options)
    assert re.match(r"1\.0 MiB that were written are kept", raised.value.__notes__[0])
    (left,) = xckpt.gc(tmp_path, dry_run=True)
    assert 1 << 20 < left.bytes < 1.1 * (1 << 20)


def test_nothing_is_said_where_nothing_stays(source: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("taken")
    with pytest.raises(xckpt.CheckpointExistsError) as raised:
        convert(source, tmp_path / "target", mapping=MAPPING, options=OPTIONS)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("error, code", [(KeyboardInterrupt, 130), (xckpt.StorageError, 2)])
def test_the_command_says_it(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Stop,
    code: int,
) -> None:
    def half(*arguments: Any, **named: Any) -> None:
        convert(*arguments, **{**named, "mapping": MAPPING, "options": stopping(error)})

    monkeypatch.setattr(run, "convert", half)
    result = CliRunner().invoke(commands, ["convert", str(source), str(tmp_path / "target")])
    assert result.exit_code == code
    assert re.search(KEPT, result.stderr) and "xckpt gc" in result.stderr
