"""Outputs in other formats are staged, claimed and named as checkpoints are."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import xckpt
from xckpt.errors import CheckpointExistsError, NotACheckpointError
from xckpt.storage.commit import output as outputs
from xckpt.storage.commit import staging
from xckpt.storage.commit.folder import journal_of, journals
from xckpt.storage.commit.output import OutputPath, StagedOutput


def foreign(path: Path) -> str:
    """What is there is ours if it is a file, or if all files in it are ``data-*``."""
    names = [] if path.is_file() else os.listdir(path)
    other = [name for name in names if not name.startswith("data-")]
    return f"it holds {other[0]}" if other else ""


def at(path: Path, *, overwrite: bool = True, single: bool = False) -> OutputPath:
    return OutputPath(path, foreign, overwrite, single)


def filled(output: OutputPath, content: str) -> StagedOutput:
    staged = output.begin()
    (staged.folder / "data-0").write_text(content)
    return staged


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("single", [False, True])
def test_there_at_once_and_replaced_at_once(tmp_path: Path, single: bool) -> None:
    path = tmp_path / "out"
    for content in ("old", "new"):
        staged = filled(at(path, single=single), content)
        before = names(tmp_path)
        assert ("out" in before) is (content == "new")
        staged.publish()
        assert names(tmp_path) == ["out"]
        assert (path if single else path / "data-0").read_text() == content


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("single", [False, True])
def test_a_name_that_cannot_be_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: bool, old: str | None
) -> None:
    """The old output is back, or else there is the new one: a file that was replaced is gone."""
    path = tmp_path / "out"
    if old is not None:
        filled(at(path, single=single), old).publish()
    staged = filled(at(path, single=single), "new")

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(staging, "sync_folder", fail)
        with pytest.raises(xckpt.StorageError, match="Input/output error"):
            staged.publish()
    staged.abort()
    assert names(tmp_path) == ([] if old is None else ["out"])
    if old is not None:
        found = (path if single else path / "data-0").read_text()
        assert found == ("new" if single else "old")


def test_what_a_dead_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead, living = filled(at(tmp_path / "out"), "dead"), filled(at(tmp_path / "out"), "living")
    assert dead.claim is not None
    os.close(dead.claim.descriptor)  # what the kernel does for a killed process
    xckpt.save(tmp_path / "out", {"step": 1})
    assert not dead.staging.exists() and not dead.claim.path.exists()
    assert living.staging.exists()
    living.abort()
    assert names(tmp_path) == ["out"]


def test_one_claims_and_others_take_part(tmp_path: Path) -> None:
    first = filled(at(tmp_path / "out"), "a")
    first.note(b"layout")
    second = at(tmp_path / "out").attach(first.token, b"layout")
    assert second.claim is None and second.folder == first.folder
    with pytest.raises(NotACheckpointError, match="begun for other tensors"):
        at(tmp_path / "out").attach(first.token, b"another")
    first.release()
    third = at(tmp_path / "out").attach(first.token, b"layout")
    assert third.claim is not None
    second.publish()
    third.release()
    assert names(tmp_path) == ["out"]


def test_a_resumable_output_is_reused_by_the_same_layout_alone(tmp_path: Path) -> None:
    output = at(tmp_path / "out")
    first = output.begin(b"layout", "conversion")
    (first.folder / "data-0").write_text("first")
    first.note(b"layout")
    journal_of(first.staging, 0).write_text("journal")
    with pytest.raises(CheckpointExistsError, match="another process is writing here"):
        output.begin(b"layout", "conversion")
    first.release()  # as the death of its process does
    second = output.begin(b"layout", "conversion")
    assert second.noted() == b"layout" and names(second.folder) == ["data-0"]
    second.release()
    third = output.begin(b"another", "conversion")
    assert third.noted() is None and names(third.folder) == []
    assert journals(third.staging) == []
    journal_of(third.staging, 0).write_text("journal")
    third.publish()
    assert names(tmp_path) == ["out"]


def test_where_no_folders_are_exchanged_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be found out when all is written; a file is replaced all the same."""
    monkeypatch.setattr(outputs, "can_exchange", lambda folder: False)
    filled(at(tmp_path / "folder"), "old").publish()
    with pytest.raises(CheckpointExistsError, match="cannot be replaced in one step here"):
        at(tmp_path / "folder").begin()
    for content in ("old", "new"):
        filled(at(tmp_path / "file", single=True), content).publish()
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_came_meanwhile_is_looked_at_again(tmp_path: Path, overwrite: bool) -> None:
    staged = filled(at(tmp_path / "out", overwrite=overwrite), "ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExistsError, match="taken by another writer meanwhile"):
        staged.publish()
    staged.abort()
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["notes.txt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_came_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """An output of one file took its place, after the path had been found free."""
    staged = filled(at(tmp_path / "out", overwrite=overwrite, single=True), "ours")
    look = OutputPath.step

    def step(self: OutputPath) -> object:
        found = look(self)
        (tmp_path / "out").write_text("mine")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(OutputPath, "step", step)
        with pytest.raises(CheckpointExistsError, match="taken by another writer meanwhile"):
            staged.publish()
    staged.abort()
    assert names(tmp_path) == ["out"] and (tmp_path / "out").read_text() == "mine"


def test_a_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointExistsError, match="is a folder, and a file was to be written"):
        at(tmp_path / "out", single=True).begin()
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("single", [True, False])
def test_a_name_that_may_not_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    """It is another user's in a sticky folder: another writer was said to have taken it."""
    path, rename = tmp_path / "out", os.rename
    if single:
        filled(at(path, single=True), "old").publish()
    else:
        path.mkdir()
    staged = filled(at(path, single=single), "new")

    def refuse(source: Path, target: Path) -> None:
        if target == path:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(xckpt.StorageError, match="not permitted; it is another user's"):
            staged.publish()
    staged.abort()
    assert names(tmp_path) == ["out"]
