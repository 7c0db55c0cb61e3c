"""Other libraries' checkpoints as wholes: found, copied, deleted; the user's files stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.support.states import same
from xckpt.cli.commands import commands
from xckpt.convert import convert
from xckpt.storage.location import Location, open_store

STATE = {"model": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "other": np.ones(2)}
HEADER = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
SMALL = len(HEADER).to_bytes(8, "little") + HEADER + b"ab"
MADE = ["file.safetensors", "safetensors", "dcp", "orbax", "file.pt"]


@pytest.fixture(params=MADE)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each format, with a file of the user beside it where it is a folder."""
    path = tmp_path / request.param
    xckpt.save(tmp_path / "ckpt", STATE)
    if path.suffix == ".pt":
        import torch

        torch.save({"model": {"w": torch.arange(6.0).reshape(2, 3)}, "other": torch.ones(2)}, path)
    else:
        convert(tmp_path / "ckpt", path, format=path.suffix.lstrip(".") or path.name)
    shutil.rmtree(tmp_path / "ckpt")
    if path.is_dir():
        (path / "notes.txt").write_text("mine")
    return path


def test_it_is_found_copied_and_deleted(made: Path, tmp_path: Path) -> None:
    copied = tmp_path / f"copy{made.suffix}"
    assert xckpt.exists(made) and not xckpt.exists(copied)
    shown: list[xckpt.Progress] = []
    xckpt.copy(made, copied, options=xckpt.LoadOptions(progress=shown.append))
    assert shown[-1].done == shown[-1].total > 0
    expected = xckpt.load(made)
    assert same(xckpt.load(copied), expected)
    assert not (copied / "notes.txt").exists()
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True"):
        xckpt.copy(made, copied)
    xckpt.copy(made, copied, overwrite=True)
    gone: list[xckpt.Progress] = []
    xckpt.delete(made, options=xckpt.LoadOptions(progress=gone.append))
    assert gone[-1].done == gone[-1].total == len(gone) and gone[-1].unit == "files"
    assert not xckpt.exists(made)
    assert made.is_dir() is ("." not in made.name)
    assert not made.is_dir() or [each.name for each in made.rglob("*")] == ["notes.txt"]
    assert same(xckpt.load(copied), expected)


def test_a_copy_replaces_no_file_of_the_user(made: Path, tmp_path: Path) -> None:
    copied = tmp_path / f"copy{made.suffix}"
    xckpt.copy(made, copied)
    if copied.is_dir():
        (copied / "mine.txt").write_text("mine")
    else:
        copied.unlink()
        copied.mkdir()
        (copied / "mine.txt").write_text("mine")
    with pytest.raises(xckpt.CheckpointExistsError, match=r"mine.txt|is a folder"):
        xckpt.copy(made, copied, overwrite=True)
    assert (copied / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("call", [xckpt.delete, lambda path: xckpt.copy(path, f"{path}-copy")])
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, call: Callable[[Path], None]) -> None:
    weights = {name: tmp_path / name for name in ("notes.bin", "two", "steps")}
    weights["notes.bin"].write_text("no weights")
    for number in (1, 2):
        xckpt.save(tmp_path / "ckpt", STATE, overwrite=True)
        convert(tmp_path / "ckpt", tmp_path / "two" / f"{number}.safetensors")
        convert(tmp_path / "ckpt", tmp_path / "steps" / str(number) / "default", format="orbax")
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "folder").mkdir()
    weights["notes.bin"].rename(tmp_path / "folder" / "notes.bin")
    before = list(tmp_path.rglob("*"))
    for name in ("two", "steps", "folder", "nothing"):
        with pytest.raises(xckpt.NotACheckpointError):
            call(tmp_path / name)
    assert list(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("call", [xckpt.delete, lambda path: xckpt.copy(path, f"{path}-copy")])
@pytest.mark.parametrize("folder", ["mine", "mine_3", "mine/orbax"])
def test_checkpoints_in_an_orbax_folder_are_not_its_own(
    tmp_path: Path, folder: str, call: Callable[[Path], None]
) -> None:
    """A folder of one's checkpoints, of which Orbax has written one, is no step of Orbax."""
    root = tmp_path / folder
    xckpt.save(tmp_path / "ckpt", STATE)
    convert(tmp_path / "ckpt", root if folder == "mine/orbax" else root / "orbax", format="orbax")
    convert(tmp_path / "ckpt", root / "dcp", format="dcp")
    (tmp_path / "ckpt").rename(root / "ckpt")
    if folder != "mine/orbax":
        (root / "plots").mkdir()
        (root / "plots" / "loss.png").write_bytes(b"mine")
    mine = {each for name in ("ckpt", "dcp", "plots") for each in (root / name).rglob("*")}
    if folder == "mine":
        with pytest.raises(xckpt.NotACheckpointError, match="may be yours; give the path of the"):
            call(root)
    else:
        call(root)
        copied = {each.name for each in tmp_path.glob(f"{folder}-copy/**/*") if each.is_file()}
        assert not copied & {"xckpt.json", ".metadata", "loss.png"}
    assert all(map(Path.exists, mine))
    assert xckpt.open(root / "ckpt").verify() == []


def test_buckets_are_refused_with_what_to_do() -> None:
    url = "memory://own-files/model.safetensors"
    open_store(Location.parse("memory://own-files")).write("model.safetensors", SMALL).result()
    assert xckpt.exists(url) and list(xckpt.load(url)) == ["w"]  # type: ignore[call-overload]
    for call in (xckpt.delete, lambda path: xckpt.copy(path, "elsewhere.safetensors")):
        with pytest.raises(xckpt.StorageError, match="use the bucket's own tools, or convert it"):
            call(url)


def test_the_commands(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(SMALL)
    one, two = str(tmp_path / "one.safetensors"), str(tmp_path / "two.safetensors")
    for arguments in (["cp", one, two], ["rm", "--yes", one]):
        assert CliRunner().invoke(commands, arguments).exit_code == 0
    assert not Path(one).exists() and Path(two).read_bytes() == SMALL
