"""A conversion, or what removes its remains, is killed where the names of files change."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

import xckpt
from tests.support.fork_server import context
from xckpt.convert import convert
from xckpt.storage.commit import staging

OPTIONS = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15, threads=1)
OUTPUTS = {
    "xckpt": "out",
    "safetensors": "out.safetensors",
    "safetensors in a folder": "out",
    "orbax": "out",
    "dcp": "out",
}
"""What is written, of which the first word is a format -> the name of the output."""


def state(number: int) -> dict[str, NDArray[np.int32]]:
    return {f"w{n}": np.arange(1024, dtype=np.int32) + number * 10_000 + n for n in range(8)}


def same(path: Path, number: int) -> None:
    loaded = xckpt.load(path)
    for name, leaf in state(number).items():
        np.testing.assert_array_equal(loaded[name], leaf)


def killed(call: Callable[..., object], *arguments: Path | str) -> None:
    process = context().Process(target=call, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def convert_until_named(source: Path, target: Path, format: str) -> None:
    staging.sync_folder = die  # the next step once the output has its name
    convert(source, target, format=format, overwrite=True, options=OPTIONS)


def convert_until_killed(source: Path, target: Path, format: str) -> None:
    def tell(progress: xckpt.Progress) -> None:
        if progress.done > progress.total / 2:
            die()

    options = replace(OPTIONS, progress=tell)
    convert(source, target, format=format, options=options)


def remove_until_killed(target: Path) -> None:
    def remove_some(folder: Path, **_: object) -> NoReturn:
        for path in sorted(folder.glob("*/**/*"))[::2]:
            if path.is_file():
                path.unlink()
        die()

    shutil.rmtree = remove_some
    xckpt.gc(target.parent, older_than=0)


@pytest.mark.parametrize("output", OUTPUTS)
def test_once_it_has_its_name(tmp_path: Path, output: str) -> None:
    """The output that was replaced was taken for what the next conversion had to finish."""
    format, target = output.split()[0], tmp_path / OUTPUTS[output]
    for number in (1, 2):
        xckpt.save(tmp_path / f"source-{number}", state(number))
    convert(tmp_path / "source-1", target, format=format, options=OPTIONS)
    killed(convert_until_named, tmp_path / "source-2", target, format)
    same(target, 2)
    convert(tmp_path / "source-2", target, format=format, overwrite=True, options=OPTIONS)
    same(target, 2)
    assert sorted(os.listdir(tmp_path)) == [target.name, "source-1", "source-2"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_while_its_remains_are_removed(tmp_path: Path, output: str) -> None:
    """What was removed of them was taken for written."""
    format, target = output.split()[0], tmp_path / OUTPUTS[output]
    xckpt.save(tmp_path / "source", state(1))
    killed(convert_until_killed, tmp_path / "source", target, format)
    killed(remove_until_killed, target)
    convert(tmp_path / "source", target, format=format, options=OPTIONS)
    same(target, 1)
    assert sorted(os.listdir(tmp_path)) == [target.name, "source"]
