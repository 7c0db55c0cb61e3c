"""Where no checkpoint is: what is there instead, and what is beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, s3
from xckpt.convert import convert
from xckpt.storage.absent import what_is_there

__all__ = ["environment", "s3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    for step in (2, 10, 9):
        xckpt.save(root / f"step_{step}", {"w": step})
    (root / "notes").mkdir()
    (root / "notes" / "todo.txt").write_text("rest")
    (root / ".step_11.saving-abc").mkdir()
    return root


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "it holds 3 checkpoints: step_2, step_9, step_10; give the path of one: "),
        ("step_12", "it does not exist; beside it: step_2, step_9, step_10; did you mean "),
        ("zzz", "it does not exist; beside it: step_2, step_9, step_10"),
        ("step_11", "nothing is at the path yet: a save to it is running or was cut off"),
        ("notes", "there is no xckpt.json in it, only: todo.txt; check the path"),
        ("notes/todo.txt/x/y", "todo.txt is a file, so nothing is below it"),
        ("notes/todo.txt/x", "todo.txt is a file, so nothing is below it"),
        ("no/where", "no does not exist"),
        ("step_9/w", "it lies in the checkpoint {}/step_9: give that path, and leaves by their"),
        ("step_9/xckpt.json", "is a file, not a checkpoint folder; it lies in the checkpoint {}"),
    ],
)
def test_what_is_there_instead(run: Path, name: str, words: str) -> None:
    with pytest.raises(xckpt.NotACheckpointError) as caught:
        xckpt.load(run / name)
    if not (run / name).is_file():
        assert f"holds no committed checkpoint: {what_is_there(run / name)}" in str(caught.value)
    assert words.format(run) in str(caught.value)


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "it holds 3 checkpoints: step_2, step_9, step_10; give the path of one: {}/step_10"),
        ("step_12", "it does not exist; beside it: step_2, step_9, step_10; did you mean {}/step_"),
        ("step_9/w", "there is no xckpt.json in it, only: "),
        ("no/where", "there is no xckpt.json in it; check the path"),
    ],
)
@pytest.mark.parametrize("bucket", ["memory", "s3"])
def test_what_is_there_instead_in_a_bucket(
    request: pytest.FixtureRequest, bucket: str, name: str, words: str
) -> None:
    url = "memory://absent" if bucket == "memory" else f"{request.getfixturevalue('s3')}/absent"
    for step in (2, 10, 9):
        if not xckpt.exists(f"{url}/step_{step}"):
            xckpt.save(f"{url}/step_{step}", {"w": np.zeros(3)})
    with pytest.raises(xckpt.NotACheckpointError) as caught:
        xckpt.load(f"{url}/{name}" if name else url)
    assert words.format(url) in str(caught.value)


def test_a_device_is_called_one() -> None:
    with pytest.raises(xckpt.NotACheckpointError, match=r"/dev/null .*: it is a device"):
        xckpt.load("/dev/null")


def test_many_steps_are_not_all_shown(tmp_path: Path) -> None:
    for step in range(30):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "xckpt.json").write_text("")
    assert what_is_there(tmp_path) == (
        "it holds 30 checkpoints: 0, 1, 2, 3, ... 26, 27, 28, 29 (30 in all); "
        f"give the path of one: {tmp_path / '29'}"
    )
    (tmp_path / "0").rename(tmp_path / "10²")  # which is no number
    assert "30 checkpoints: 1, 2, 3, 4, " in what_is_there(tmp_path)


@pytest.mark.parametrize(
    ("name", "first", "words"),
    [
        ("model.gguf", b"GGUF\3\0\0\0", r"GGUF \(llama.cpp\), .*gguf.GGUFReader"),
        ("weights", b"GGUF\3\0\0\0", "weights is of the format GGUF"),
        ("flax_model.msgpack", b"\x81", "msgpack_restore"),
        ("arrays.npz", b"PK\3\4", r"dict\(numpy.load\(path\)\)"),
        ("array.npy", b"\x93NUMPY\1\0", "numpy.load"),
        ("model.keras", b"PK\3\4", "keras.saving.load_model"),
        ("model.h5", b"\x89HDF\r\n\x1a\n", "h5py"),
        ("state.pkl", b"\x80\4", "nothing is unpickled"),
        (".zgroup", b'{"zarr_', "zarr.open_group"),
    ],
)
def test_formats_that_are_not_read_are_named(
    tmp_path: Path, name: str, first: bytes, words: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(first)
    for call in (xckpt.load, xckpt.open):
        with pytest.raises(xckpt.NotACheckpointError, match=words):
            call(tmp_path / "run" / name)
    if "." in name:
        with pytest.raises(xckpt.NotACheckpointError, match=words):
            xckpt.load(tmp_path / "run")
        with pytest.raises(xckpt.NotACheckpointError, match=words):
            convert(tmp_path / "run" / name, tmp_path / "out")
