"""Orbax's files in an item or a step are told from the user's by Orbax's own documents."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import xckpt
from tests.formats.orbax_writers import LAYOUTS, save, save_steps
from xckpt.convert import convert

TREE = {"a": {"b": np.ones((3, 4)), "x/y": np.ones(2)}, "s": np.arange(3)}
RELEASES = sorted((Path(__file__).parent / "fixtures").glob("*.tar.xz"))


def add_mine(folder: Path) -> list[Path]:
    """What a user may put into the folder of a checkpoint."""
    before = files(folder)
    xckpt.save(folder.parent / "other", {"w": np.ones(2)})
    convert(folder.parent / "other", folder / "hf" / "model.safetensors")
    convert(folder.parent / "other", folder / "eval" / "old", format="orbax")
    xckpt.delete(folder.parent / "other")
    for key in ("notes.txt", "_notes.txt", "manifest.md", "plots/loss.png", "plots/c/0"):
        (folder / key).parent.mkdir(exist_ok=True)
        (folder / key).write_text("mine")
    return [path for path in files(folder) if path not in before]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("version, ocdbt, zarr3", LAYOUTS)
def test_only_an_items_own_files_are_deleted(
    tmp_path: Path, version: str, ocdbt: bool, zarr3: bool
) -> None:
    path = save(tmp_path / "ckpt", TREE, version, ocdbt, zarr3)
    mine = add_mine(path)
    for array in [each for each in path.rglob("s") if each.is_dir()]:
        mine.append(array / "notes.txt")
        mine[-1].write_text("mine")
    xckpt.delete(path)
    assert files(path) == sorted(mine)


def test_only_a_steps_own_files_are_deleted(tmp_path: Path) -> None:
    root = save_steps(tmp_path / "run", 7, default=TREE)
    mine = [*add_mine(root / "7" / "default"), *add_mine(root / "7")]
    xckpt.delete(root / "7")
    assert files(root) == sorted(mine)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_all_that_a_release_has_written_is_deleted(tmp_path: Path, release: Path) -> None:
    with tarfile.open(release) as archive:
        archive.extractall(tmp_path, filter="data")
    for tree in list(tmp_path.rglob("_METADATA")):
        if tree.exists():
            xckpt.delete(tree.parent)
            assert not tree.parent.exists(), files(tree.parent)


def test_a_damaged_tree_is_deleted_too(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", {"w": np.ones(3)}, ocdbt=False)
    mine = add_mine(path)
    (path / "_METADATA").write_text("{")
    xckpt.delete(path)
    assert files(path) == mine


@pytest.mark.parametrize("format", ["orbax", "dcp", "safetensors"])
@pytest.mark.parametrize(
    "name", ["plots", "x.safetensors", "x.distcp", "lora.safetensors/", "n.txt/"]
)
def test_an_output_replaces_no_folder_with_other_files(
    tmp_path: Path, format: str, name: str
) -> None:
    """A slash stands for a file."""
    source, output = tmp_path / "ckpt", tmp_path / "output"
    xckpt.save(source, {"w": np.arange(3)})
    convert(source, output, format=format)
    other = output / name.rstrip("/")
    if not name.endswith("/"):
        other.mkdir()
        (other / "mine").write_text("mine")
    else:
        convert(source, tmp_path / "one.safetensors")
        (tmp_path / "one.safetensors").rename(other)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    with pytest.raises(xckpt.CheckpointExistsError, match=rf"{other.name}|several"):
        convert(source, output, format=format, overwrite=True)
    assert {path: path.read_bytes() for path in files(tmp_path)} == before
