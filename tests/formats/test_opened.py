"""`xckpt.open`, `ls`, `info` and `verify` take every format that `load` takes."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import save_file

import xckpt
from tests.formats import orbax_writers
from tests.support.steps import steps
from xckpt.cli.commands import commands
from xckpt.convert import convert

STATE = {"model": {"w": np.arange(12.0).reshape(3, 4)}, "b": np.arange(5, dtype=np.int16)}
FORMATS = ["safetensors", "orbax", "dcp", "torch"]


@pytest.fixture(params=FORMATS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each format."""
    if request.param == "safetensors":
        save_file({"model.w": STATE["model"]["w"], "b": STATE["b"]}, tmp_path / "x.safetensors")
        return tmp_path / "x.safetensors"
    if request.param == "orbax":
        return orbax_writers.save(tmp_path / "x", STATE)
    if request.param == "torch":
        tensors = {"model": {"w": torch.from_numpy(STATE["model"]["w"])}}
        torch.save({**tensors, "b": torch.from_numpy(STATE["b"])}, tmp_path / "x.pt")
        return tmp_path / "x.pt"
    xckpt.save(tmp_path / "ours", STATE)
    convert(tmp_path / "ours", tmp_path / "x", format=request.param)
    return tmp_path / "x"


def test_it_is_opened_sliced_and_verified(path: Path) -> None:
    checkpoint = xckpt.open(path)
    flat = checkpoint.format == "safetensors"
    name = "model.w" if flat else "model/w"
    assert checkpoint.format in FORMATS
    assert set(checkpoint) == {name, "b"}
    stored: Any = checkpoint[name]
    assert stored.shape == (3, 4) and stored.nbytes == 96
    assert np.array_equal(stored[1:, ::2], STATE["model"]["w"][1:, ::2])
    whole: Any = checkpoint["b"]
    assert np.array_equal(whole, STATE["b"])
    assert checkpoint.verify() == []
    part = checkpoint.array(name)[[2, 0], -1]
    assert np.array_equal(part, STATE["model"]["w"][[2, 0], -1])
    assert np.array_equal(pickle.loads(pickle.dumps(stored)), STATE["model"]["w"])
    checkpoint.close()
    with pytest.raises(ValueError, match="is closed"):
        stored[0]


def test_the_commands_take_it(path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(commands, ["ls", str(path), "--json"])
    assert listed.exit_code == 0, listed.output
    assert {leaf["bytes"] for leaf in json.loads(listed.output)} == {96, 10}
    for arguments in (["info", str(path)], ["info", str(path), "b"], ["ls", str(path)]):
        result = runner.invoke(commands, arguments)
        assert (result.exit_code, result.stderr) == (0, "") and "int16" in result.output
    verified = runner.invoke(commands, ["verify", str(path)])
    assert verified.exit_code == 0 and "can be read whole: 2 tensors" in verified.output


def test_damage_is_named(tmp_path: Path) -> None:
    """Where the format has checksums; here zarr's crc32c."""
    xckpt.save(tmp_path / "ours", {"w": np.arange(100)})
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    [chunk] = [each for each in (tmp_path / "theirs" / "w" / "c").rglob("*") if each.is_file()]
    data = bytearray(chunk.read_bytes())
    data[50] ^= 1
    chunk.write_bytes(data)
    [problem] = xckpt.open(tmp_path / "theirs").verify()
    assert problem.leaf == "w" and problem.kind == "chunk"
    result = CliRunner().invoke(commands, ["verify", str(tmp_path / "theirs")])
    assert result.exit_code == 1 and "w: " in result.stderr


def marker(path: Path) -> Path:
    """A file that each writer of a format writes."""
    marks = [path / name for name in ("_METADATA", ".metadata")]
    return next((each for each in marks if each.exists()), path)


def test_what_was_written_since_it_was_opened_is_not_read(path: Path) -> None:
    """Its places in the files are those of before."""
    checkpoint = xckpt.open(path)
    array = checkpoint.array("b")
    assert array[1] == 1
    os.utime(marker(path), ns=(1, 1))
    for read in (lambda: array[1], lambda: np.asarray(array), checkpoint.verify):
        with pytest.raises(xckpt.CheckpointReplacedError, match="was replaced after it was opened"):
            read()
    assert np.array_equal(xckpt.open(path).array("b")[...], STATE["b"])


def test_a_read_looks_at_the_files_of_its_tensor_however_many_ranks_have_written(
    tmp_path: Path,
) -> None:
    """It looked at all of them: 10 ms where there were 1,200."""
    took: list[int] = []
    for count in (2, 40):
        folder = tmp_path / str(count)
        xckpt.save(folder / "ours", {f"w{n}": np.full(3, n) for n in range(count)})
        convert(folder / "ours", folder / "dcp", format="dcp")
        assert len(list((folder / "dcp").glob("*.distcp"))) == count
        array = xckpt.open(folder / "dcp").array("w1")
        took.append(steps(lambda array=array: array[:]))
    assert took[0] == took[1]
    files = {name: folder / "dcp" / name for name in os.listdir(folder / "dcp")}
    own = xckpt.open(folder / "dcp").source._tensors["w1"].parts[0].path  # pyright: ignore
    os.utime(next(each for name, each in files.items() if name not in (own.name, ".metadata")))
    assert array[0] == 1
    os.utime(own, ns=(1, 1))
    with pytest.raises(xckpt.CheckpointReplacedError, match="was replaced after it was opened"):
        array[0]


@pytest.mark.parametrize("elements", [5, 50_000, 1])
def test_a_file_that_torch_writes_over(elements: int, tmp_path: Path) -> None:
    """It truncates the file and writes on in it; a shorter one is not called damaged."""
    path = tmp_path / "x.pt"
    torch.save({"b": torch.arange(20_000)}, path)
    array = xckpt.open(path).array("b")
    torch.save({"b": torch.arange(elements)}, path)
    with pytest.raises(xckpt.CheckpointReplacedError, match="open it again"):
        array[-1]


def test_what_is_written_while_it_is_verified_or_copied(path: Path) -> None:
    """What was read, or is in the copy, may be of two checkpoints."""
    file = marker(path)

    def rewrite(progress: xckpt.Progress) -> None:
        os.utime(file, ns=(1, progress.done + 1))

    with pytest.raises(xckpt.StorageError, match="written while it was read"):
        xckpt.open(path).verify(rewrite)
    options = xckpt.LoadOptions(progress=rewrite)
    with pytest.raises(xckpt.StorageError, match="was written while it was copied"):
        xckpt.copy(path, path.with_name("copy.safetensors"), options=options)
    assert not path.with_name("copy.safetensors").exists()


def test_containers_values_and_metadata_are_there(tmp_path: Path) -> None:
    tree = {"opt": [np.zeros(2), (np.ones(3),)], "step": 7, "none": None, "empty": {}}
    xckpt.save(tmp_path / "ours", tree, metadata={"run": "a"})
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    checkpoint = xckpt.open(tmp_path / "theirs")
    whole: Any = checkpoint.tree
    assert whole["step"] == 7 and whole["none"] is None and whole["empty"] == {}
    assert isinstance(whole["opt"], list) and checkpoint.user_metadata == {"run": "a"}


def test_nothing_that_is_known_is_refused_as_before(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(xckpt.NotACheckpointError):
        xckpt.open(tmp_path)


def test_it_is_compared_by_reading(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ours", STATE)
    convert(tmp_path / "ours", tmp_path / "theirs", format="orbax")
    assert xckpt.diff(tmp_path / "ours", tmp_path / "theirs", values=True) == []
    xckpt.save(tmp_path / "others", {**STATE, "b": np.arange(1, 6, dtype=np.int16)})
    [difference] = xckpt.diff(tmp_path / "others", tmp_path / "theirs", values=True)
    assert difference.name == "b" and difference.kind == "content"


def test_what_is_being_read_stays_open_until_it_is_read(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the number of its descriptor may be another file's by then, whose bytes are taken."""
    checkpoint = xckpt.open(path)
    name, expected = ("b", STATE["b"]) if "b" in checkpoint else ("", STATE["b"])
    (tmp_path / "other").write_bytes(bytes(1 << 12))
    begun, goes_on, read = threading.Event(), threading.Event(), os.preadv

    def slowly(descriptor: int, *about: Any) -> int:
        begun.set()
        goes_on.wait()
        return read(descriptor, *about)

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(checkpoint.array(name)[...]))
    monkeypatch.setattr(os, "preadv", slowly)
    thread.start()
    begun.wait(1)  # TensorStore reads what Orbax has saved
    checkpoint.close()
    others = [os.open(tmp_path / "other", os.O_RDONLY) for _ in range(8)]
    goes_on.set()
    thread.join()
    for each in others:
        os.close(each)
    np.testing.assert_array_equal(found[0], expected)
