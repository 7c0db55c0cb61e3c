"""An overwrite loses none of the user's files: it carries them over, or lets them lie."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.storage.commit.test_staging import Stopping, keys, names, save_with, step_at
from xckpt.core.commit import Step
from xckpt.core.manifest.own_keys import BY_SHAPE
from xckpt.storage.commit import carry as carry_module
from xckpt.storage.commit import remove
from xckpt.storage.commit import staging as staging_module
from xckpt.storage.commit.carry import Seen
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.commit.remove import Hidden, Pace, hide_checkpoint
from xckpt.storage.commit.staging import StagedCheckpoint, StagedFolder, begin
from xckpt.storage.location import Location, open_store

OLD = {"m": {"w": np.arange(10), "b": np.ones(3)}, "step": 1}
NEW = {"m": {"w": np.arange(20)}, "step": 2}
PLAIN = xckpt.SaveOptions(pack_bytes=0)


def put_files(path: Path) -> dict[str, str]:
    """Files of all sorts; the folders of the checkpoint may be there or not."""
    files = {
        "config.json": "{}",
        "tokenizer/vocab.txt": "a b",
        "tokenizer/deep/merges.txt": "a",
        "m/notes.txt": "mine",
        "m/w/notes.txt": "of an array that stays",
        "m/b/deep/notes.txt": "of an array that goes",
        "own.zarr/zarr.json": "{}",
        "own.zarr/c/0": "chunk",
        ".hidden": "",
    }
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    (path / "empty").mkdir()
    (path / "link").symlink_to("config.json")
    (path / "dangling").symlink_to("nowhere")
    (path / "linked folder").symlink_to("tokenizer")
    (path / "tokenizer").chmod(0o750)
    return files


def check_files(path: Path, files: dict[str, str]) -> None:
    assert {name: (path / name).read_text() for name in files} == files
    assert (path / "empty").is_dir()
    assert os.readlink(path / "link") == "config.json"
    assert os.readlink(path / "dangling") == "nowhere"
    assert os.readlink(path / "linked folder") == "tokenizer"
    assert stat.S_IMODE((path / "tokenizer").stat().st_mode) == 0o750
    assert not (path / ".carried").exists()


@pytest.mark.parametrize("place", ["exchange", "generation", "mount", "no links"])
@pytest.mark.parametrize("old", [True, False])
def test_an_overwrite_keeps_the_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, old: bool
) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    if place == "generation":
        monkeypatch.setattr(staging_module, "can_exchange", lambda folder: False)
    if place == "mount":
        monkeypatch.setattr(Path, "is_mount", lambda folder: folder == path)
    if place == "no links":

        def refuse(*arguments: object, **named: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    if old:
        xckpt.save(path, OLD)
    files = put_files(path)
    inode = (path / "config.json").stat().st_ino
    path.chmod(0o750)
    for step in (2, 3, 4):
        xckpt.save(path, NEW | {"step": step}, overwrite=True)
        assert step_at(path) == step
        check_files(path, files)
    assert names(tmp_path) == ["ckpt"]
    opened = [os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()]
    assert not [each for each in opened if each.startswith(f"{tmp_path}/.ckpt.saving-")]
    assert (path / "config.json").stat().st_ino == inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert (xckpt.open(path).manifest.root == "") is (place == "exchange")
    assert not (path / "m" / "b" / "zarr.json").exists()


def test_files_in_the_folder_of_an_array_are_there_before_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reader of the path ever sees it without them."""
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    files = put_files(path)
    take_name = staging_module.take_name

    def looking(step: Step, staged: Path, target: Path) -> None:
        check_files(staged, files)
        take_name(step, staged, target)
        check_files(target, files)

    monkeypatch.setattr(staging_module, "take_name", looking)
    xckpt.save(path, NEW, overwrite=True)
    check_files(path, files)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_overwrite_touches_none(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    files = put_files(path)

    def fail() -> None:
        raise error("while saving")

    with pytest.raises(error):
        save_with(Stopping(str(path), fail, overwrite=True), NEW)
    check_files(path, files)
    assert step_at(path) == 1 and names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize(
    ("state", "file"),
    [
        ({"config.json": {"w": np.ones(2)}}, "config.json"),
        ({"w": {"inner": np.ones(2)}}, "w/inner/zarr.json"),
        ({"w": np.ones(2)}, "w/c"),
        ({"w": np.ones(2)}, "zarr.json"),
        ({"w": np.ones(2)}, "xckpt.digests"),
    ],
)
def test_a_name_that_the_checkpoint_needs(
    tmp_path: Path, state: dict[str, object], file: str
) -> None:
    """The file keeps it, and the data lies in a generation."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("mine")
    for _ in range(2):
        xckpt.save(tmp_path, state, overwrite=True)
        assert xckpt.open(tmp_path).verify() == []
        assert xckpt.open(tmp_path).manifest.root != ""
        assert (tmp_path / file).read_text() == "mine"


def test_files_that_change_while_it_saves(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    put_files(path)

    def change() -> None:
        (path / "config.json").unlink()
        (path / "new.txt").write_text("new")
        (path / "m" / "w" / "inside.txt").write_text("among the chunks")
        (path / "other").write_text("replaced")
        os.replace(path / "other", path / ".hidden")

    save_with(Stopping(str(path), change, overwrite=True), NEW)
    assert step_at(path) == 2
    assert not (path / "config.json").exists()
    assert (path / "new.txt").read_text() == "new"
    assert (path / "m/w/inside.txt").read_text() == "among the chunks"
    assert (path / ".hidden").read_text() == "replaced"


def test_an_old_folder_that_cannot_be_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Something is mounted in it: the log says what is left, where, why, and what to do."""
    path, rmdir = tmp_path / "ckpt", os.rmdir
    xckpt.save(path, OLD)
    (path / "mounted").mkdir()

    def busy(at: str | Path, **given: int) -> None:
        if str(at).endswith("mounted") and ".carried" not in str(at):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(at))
        rmdir(at, **given)

    with monkeypatch.context() as mounted:
        mounted.setattr(os, "rmdir", busy)
        xckpt.save(path, NEW, overwrite=True)
    [left] = tmp_path.glob(".ckpt.saving-*[0-9a-f]")
    assert step_at(path) == 2 and xckpt.open(path).verify() == []
    assert f"{path} is committed, but the folder that it replaced" in caplog.text
    assert f"{left} (" in caplog.text and f"{left / 'mounted'}: Device or resource" in caplog.text
    assert f"xckpt gc {tmp_path}" in caplog.text
    assert [each.removed for each in xckpt.gc(tmp_path)] == [True] and names(tmp_path) == ["ckpt"]


def test_so_is_that_of_another_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    staging = tmp_path / "busy"
    (staging / "in").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as busy:
        busy.setattr(shutil, "rmtree", lambda *given, **options: None)
        StagedFolder(tmp_path / "new", staging, None).remove_replaced()
    assert f"{staging} (" in caplog.text and "xckpt gc" in caplog.text


def test_a_name_that_is_taken_while_it_saves(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    taken = Stopping(str(path), lambda: (path / "v").write_text("mine"), overwrite=True)
    with pytest.raises(xckpt.CheckpointExistsError, match="names that the new checkpoint needs: v"):
        save_with(taken, NEW | {"v": np.ones(2)})
    assert step_at(path) == 1
    assert (path / "v").read_text() == "mine" and names(tmp_path) == ["ckpt"]


def appear_after_carrying(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    def carry(old: Path, new: Path, seen: Seen) -> None:
        carry_module.carry(old, new, seen)
        (old / name).unlink(missing_ok=True)
        (old / name).write_text(text)

    monkeypatch.setattr(staging_module, "carry", carry)


def test_a_file_that_appears_just_before_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    appear_after_carrying(monkeypatch, "late.txt", "late")
    xckpt.save(path, NEW, overwrite=True)
    assert step_at(path) == 2
    assert (path / "late.txt").read_text() == "late" and names(tmp_path) == ["ckpt"]


def test_a_file_that_is_replaced_just_before_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    (path / "notes.txt").write_text("first")
    appear_after_carrying(monkeypatch, "notes.txt", "second")
    with pytest.warns(
        UserWarning, match=r"changed: notes\.txt; their old contents are kept in .*kept-"
    ):
        xckpt.save(path, NEW, overwrite=True)
    assert step_at(path) == 2
    (kept,) = tmp_path.glob("ckpt.kept-*")
    assert (path / "notes.txt").read_text() == "first"
    assert names(kept) == ["notes.txt"] and (kept / "notes.txt").read_text() == "second"


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("when", ["before it carries", "before it exchanges"])
@pytest.mark.parametrize("new", [OLD, NEW])
def test_what_it_overwrites_is_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: dict[str, object], when: str, ended: bool
) -> None:
    """The deletion goes on in the old folder, wherever that is, and takes nothing of the new."""
    path, hidden = tmp_path / "ckpt", list[Hidden]()
    xckpt.save(path, OLD, options=PLAIN)
    files = put_files(path)

    def delete() -> None:
        hidden.append(hide_checkpoint(Location.parse(path)))
        if ended:
            hidden[0].sweep(Pace())

    def carry(old: Path, new: Path, seen: Seen) -> None:
        if when == "before it carries":
            delete()
        carry_module.carry(old, new, seen)
        if when == "before it exchanges":
            delete()

    monkeypatch.setattr(staging_module, "carry", carry)
    xckpt.save(path, new, overwrite=True, options=PLAIN)
    hidden[0].sweep(Pace())
    assert step_at(path) == new["step"] and xckpt.open(path).verify() == []
    check_files(path, files)
    assert names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("when", ["as it begins", "before it carries", "in between"])
def test_another_writers_checkpoint_that_is_being_deleted_has_no_files_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It came after this save had begun, and the shapes of its keys tell them."""
    path, hidden = tmp_path / "ckpt", list[Hidden]()
    xckpt.save(path, NEW, options=PLAIN)
    files = put_files(path)
    own_keys_in, replaced = carry_module.own_keys_in, list[Path]()

    def replace(*given: Any) -> Any:
        found = own_keys_in(*given)
        if not replaced and given[0] == path:
            replaced.append(path)
            with monkeypatch.context() as patch:
                patch.setattr(carry_module, "own_keys_in", own_keys_in)
                patch.setattr(staging_module, "carry", carry_module.carry)
                xckpt.save(path, OLD, overwrite=True, options=PLAIN)
        return found

    def replace_and_delete(*given: Any) -> Any:
        found = replace(*given)
        if not hidden:
            hidden.append(hide_checkpoint(Location.parse(path)))
        return found

    def carry(old: Path, new: Path, seen: Seen) -> None:
        if when == "in between":
            monkeypatch.setattr(carry_module, "own_keys_in", replace_and_delete)
        else:
            replace_and_delete(path, BY_SHAPE)
        carry_module.carry(old, new, seen)

    monkeypatch.setattr(staging_module, "carry", carry)
    if when == "as it begins":
        monkeypatch.setattr(carry_module, "own_keys_in", replace)
    xckpt.save(path, NEW, overwrite=True, options=PLAIN)
    hidden[0].sweep(Pace())
    assert step_at(path) == 2 and names(tmp_path) == ["ckpt"]
    assert {name: (path / name).read_text() for name in files} == files
    assert not (path / "m/b/zarr.json").exists() and not (path / "m/b/c").exists()


class Slow:
    """A store of a folder: another call comes between its look at a manifest and the deletion."""

    def __init__(self, store: Any, call: Callable[[], object]) -> None:
        self.store, self.call = store, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes) -> Any:
        if value is None and self.store.read(key).result().stamp.generation == if_equal:
            self.call()
            return self.store.write(key, value)
        return self.store.write(key, value, if_equal=if_equal)


@pytest.mark.parametrize("ended", [True, False])
def test_a_deletion_takes_no_manifest_of_a_folder_that_has_just_got_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ended: bool
) -> None:
    """TensorStore deletes by path: the new checkpoint went, and its files were the user's then."""
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD, options=PLAIN)
    files = put_files(path)

    def overwrite() -> None:
        with monkeypatch.context() as patch:
            if not ended:
                patch.setattr(staging_module, "remove_old", lambda old, new: None)
            xckpt.save(path, NEW, overwrite=True, options=PLAIN)

    monkeypatch.setattr(remove, "open_store", lambda at: Slow(open_store(at), overwrite))
    if ended:
        with pytest.raises(xckpt.StorageError, match=f"^{path}: another save has replaced this"):
            hide_checkpoint(Location.parse(path))
    else:
        hide_checkpoint(Location.parse(path))
    assert step_at(path) == 2 and xckpt.open(path).verify() == []
    monkeypatch.undo()
    xckpt.save(path, NEW, overwrite=True, options=PLAIN)
    check_files(path, files)
    assert names(tmp_path) == ["ckpt"] and not caplog.messages


def test_a_claim_that_comes_late_to_an_old_folder_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deletion had opened it; the folder stayed, and a warning said that it was not empty."""
    path, walk = tmp_path / "ckpt", carry_module.walk_up
    xckpt.save(path, OLD, options=PLAIN)

    def late(top: Path, *given: Any, **named: Any) -> Any:
        yield from walk(top, *given, **named)
        for name in ("xckpt.saving", "xckpt.json.__lock"):
            (top / name).touch()

    def remove_old(old: Path, new: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(carry_module, "walk_up", late)
            carry_module.remove_old(old, new)

    monkeypatch.setattr(staging_module, "remove_old", remove_old)
    xckpt.save(path, NEW, overwrite=True, options=PLAIN)
    assert step_at(path) == 2 and names(tmp_path) == ["ckpt"] and not caplog.messages


def test_what_a_deletion_takes_meanwhile_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zarr.json that was listed and is gone belonged to the checkpoint."""
    path, hidden = tmp_path / "ckpt", list[Hidden]()
    xckpt.save(path, {"w": np.arange(10)}, options=PLAIN)
    names_below, take_name = carry_module.names_below, staging_module.take_name

    def listed(folder: Path) -> list[str]:
        found = names_below(folder)
        (folder / "w" / "zarr.json").unlink()
        monkeypatch.setattr(carry_module, "names_below", names_below)
        return found

    def deleted(step: Step, staged: Path, target: Path) -> None:
        hidden.append(hide_checkpoint(Location.parse(target)))
        take_name(step, staged, target)
        monkeypatch.setattr(carry_module, "names_below", listed)

    monkeypatch.setattr(staging_module, "take_name", deleted)
    xckpt.save(path, {"w": np.arange(5)}, overwrite=True, options=PLAIN)
    hidden[0].sweep(Pace())
    assert xckpt.load(path)["w"].size == 5 and names(tmp_path) == ["ckpt"]


def die(staged: StagedCheckpoint) -> None:
    """What the kernel does for a killed process."""
    assert staged.claim is not None
    os.close(staged.claim.descriptor)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("exchanged", [True, False])
def test_the_next_save_rescues_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, exchanged: bool
) -> None:
    """Killed just before or after the exchange, with a file that was not carried over."""
    path = tmp_path / "ckpt"
    path.mkdir()
    if old:
        xckpt.save(path, OLD)
    files = put_files(path)
    xckpt.save(tmp_path / "other" / "ckpt", NEW)
    staged = begin(Location.parse(path), overwrite=True)
    assert isinstance(staged, StagedCheckpoint)
    shutil.copytree(tmp_path / "other" / "ckpt", staged.staging, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "other")

    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        where = (
            (StagedCheckpoint, "remove_replaced") if exchanged else (staging_module, "take_name")
        )
        patch.setattr(*where, kill)
        appear_after_carrying(patch, "late.txt", "late")
        with pytest.raises(Killed):
            staged.publish((staged.staging / "xckpt.json").read_bytes())
    die(staged)
    assert len(list(tmp_path.glob(".ckpt.saving-*"))) == 2
    xckpt.save(path, NEW | {"step": 3}, overwrite=True)
    assert step_at(path) == 3
    check_files(path, files | {"late.txt": "late"})
    assert names(tmp_path) == ["ckpt"]


def test_a_folder_that_is_gone_is_not_filled_again(tmp_path: Path) -> None:
    staged, target = tmp_path / ".ckpt.saving-1", tmp_path / "ckpt"
    staged.mkdir()
    put_files(staged)
    carry_module.rescue(staged, target)
    assert names(tmp_path) == []


def test_what_a_killed_overwrite_did_not_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies outside of generations, and no manifest at the path names it any more."""
    url = f"memory://{tmp_path.name}"
    xckpt.save(url, OLD)
    with monkeypatch.context() as patch:
        patch.setattr(KeyStaging, "delete", lambda *arguments: None)
        xckpt.save(url, NEW, overwrite=True)
    assert "m/b/c/0" in keys(url)
    xckpt.save(url, NEW | {"step": 3}, overwrite=True)
    root = xckpt.open(url).manifest.root
    assert [key for key in keys(url) if not key.startswith(f"{root}/")] == ["xckpt.json"]
    assert step_at(url) == 3


def test_a_copy_of_a_generation_lies_beside_files_whose_names_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of any other checkpoint did, and this one was refused in the end."""
    source, path = tmp_path / "source", tmp_path / "ckpt"
    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "can_exchange", lambda folder: False)
        for state in (OLD, NEW):
            xckpt.save(source, state, overwrite=True)
    path.mkdir()
    (path / "zarr.json").write_text("mine")
    xckpt.copy(source, path, overwrite=True)
    assert step_at(path) == 2 and (path / "zarr.json").read_text() == "mine"


def test_old_files_that_may_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where folders are not exchanged nothing was said of them, and they stayed for ever."""
    monkeypatch.setattr(staging_module, "can_exchange", lambda folder: False)
    path, unlink = tmp_path / "ckpt", os.unlink
    xckpt.save(path, OLD, options=PLAIN)

    def refuse(entry: str, *given: object, **named: int) -> None:
        if entry == "m/w/c/0":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), entry)
        unlink(entry, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        xckpt.save(path, NEW, options=PLAIN, overwrite=True)
    assert step_at(path) == 2 and (path / "m/w/c/0").exists()
    assert f"the first of them {path}/m/w/c/0: " in caplog.text
    assert "Operation not permitted (m/w/c/0); it is another user's" in caplog.text
    xckpt.save(path, NEW | {"step": 3}, options=PLAIN, overwrite=True)
    assert step_at(path) == 3 and names(path) == [".generations", "xckpt.json"]


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_an_old_folder_that_cannot_be_read_goes_with_the_next_save(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
) -> None:
    """Its manifest went, and old chunks were the user's then; or a committed save failed."""
    path, real = tmp_path / "ckpt", getattr(os, call)
    xckpt.save(path, OLD, options=PLAIN)

    def refuse(at: object, *given: object, **named: object) -> object:
        if str(at).endswith(("/m", "/xckpt.json")):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(at))
        return real(at, *given, **named)

    def removing(old: Path, new: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, refuse)
            carry_module.remove_old(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "remove_old", removing)
        xckpt.save(path, NEW, options=PLAIN, overwrite=True)
    assert step_at(path) == 2 and "is left, because of" in caplog.text
    assert "Too many open files" in caplog.text
    xckpt.save(path, NEW | {"step": 3}, options=PLAIN, overwrite=True)
    assert (
        step_at(path) == 3
        and names(tmp_path) == ["ckpt"]
        and names(path / "m")
        == [
            "w",
            "zarr.json",
        ]
    )
