"""What a save leaves at a path: the old checkpoint, the new one, or nothing; never a mixture."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts

import xckpt
from tests.support.stored import keys
from xckpt.core.commit import Found, Step
from xckpt.storage import ZarrStorageWriter
from xckpt.storage.commit import folder as folder_module
from xckpt.storage.commit import keys as keys_module
from xckpt.storage.commit import probe
from xckpt.storage.commit import staging as staging_module
from xckpt.storage.commit.staging import StagedCheckpoint, begin
from xckpt.storage.location import Location, open_store

OLD = {"w": np.arange(10), "b": np.ones(3), "step": 1}
NEW = {"w": np.arange(20), "step": 2}


def step_at(path: str | Path) -> object:
    checkpoint = xckpt.open(path)
    assert checkpoint.verify() == []
    return checkpoint["step"]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(params=["file", "generation", "memory"])
def path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A path in each kind of place; ``generation`` is a file system that exchanges no folders."""
    if request.param == "generation":
        monkeypatch.setattr(staging_module, "can_exchange", lambda folder: False)
    if request.param != "memory":
        yield str(tmp_path / "ckpt")
        assert [name for name in names(tmp_path) if name != "ckpt"] == []
        return
    yield f"memory://{tmp_path.name}"


class Stopping(ZarrStorageWriter):
    """A writer that calls something when all data is written and nothing is committed."""

    def __init__(self, path: str, call, *, overwrite: bool = False) -> None:
        super().__init__(path, overwrite=overwrite)
        self.call = call

    def finish(self, metadata, results) -> bytes:
        self.call()
        return super().finish(metadata, results)


def save_with(writer: ZarrStorageWriter, state: Mapping[str, object]) -> None:
    from xckpt.core.plan.save import DefaultSavePlanner
    from xckpt.engine.ranks.group import LocalGroup
    from xckpt.engine.save import save_state

    save_state(state, writer, group=LocalGroup(), planner=DefaultSavePlanner())


@pytest.mark.parametrize("again", [False, True])
def test_what_is_to_be_replaced_is_deleted_and_another_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Where another was saved, the error said "No such file or directory", of the own staging."""
    path, take_name = tmp_path / "ckpt", staging_module.take_name
    xckpt.save(path, OLD)

    def take(step: Step, source: Path, target: Path) -> None:
        if step is not Step.EXCHANGE:
            return take_name(step, source, target)
        xckpt.delete(path)
        with pytest.raises(FileNotFoundError) as refused:
            take_name(step, source, target)
        if again:
            xckpt.save(path, OLD)
        raise refused.value

    monkeypatch.setattr(staging_module, "take_name", take)
    if again:
        with pytest.raises(xckpt.CheckpointExistsError, match="taken by another writer meanwhile"):
            xckpt.save(path, NEW, overwrite=True)
    else:
        xckpt.save(path, NEW, overwrite=True)
    assert (step_at(path), names(tmp_path)) == (1 if again else 2, ["ckpt"])


def test_save_refuse_overwrite(path: str) -> None:
    xckpt.save(path, OLD)
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True"):
        xckpt.save(path, NEW)
    assert step_at(path) == 1
    for number in range(2, 5):
        xckpt.save(path, NEW | {"step": number}, overwrite=True)
        assert step_at(path) == number
    loaded = xckpt.load(path)
    assert isinstance(loaded, dict) and list(loaded) == ["w", "step"]


def test_only_the_new_data_is_left(path: str) -> None:
    xckpt.save(path, OLD)
    xckpt.save(path, NEW, overwrite=True)
    xckpt.save(path, NEW, overwrite=True)
    left = keys(path)
    assert "xckpt.json" in left and "xckpt.saving" not in left
    assert not any("/b/" in key for key in left)
    assert len([key for key in left if key.endswith("w/c/0")]) == 1
    if not path.startswith("memory"):
        assert all(any(folder.iterdir()) for folder in Path(path).rglob("*/"))


def test_the_old_one_is_readable_until_the_commit(path: str) -> None:
    xckpt.save(path, OLD)
    seen: list[object] = []
    save_with(Stopping(path, lambda: seen.append(step_at(path)), overwrite=True), NEW)
    assert (seen, step_at(path)) == ([1], 2)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_save_leaves_what_was_there(
    path: str, old: bool, error: type[BaseException]
) -> None:
    if old:
        xckpt.save(path, OLD)

    def fail() -> None:
        raise error("while saving")

    with pytest.raises(error, match="while saving"):
        save_with(Stopping(path, fail, overwrite=True), NEW)
    if old:
        assert step_at(path) == 1
    else:
        with pytest.raises(xckpt.NotACheckpointError):
            xckpt.open(path)
        assert keys(path) == []
    xckpt.save(path, NEW, overwrite=old)
    assert step_at(path) == 2


@pytest.mark.parametrize("state", [OLD, NEW])
def test_an_interrupt_after_the_commit_loses_nothing(
    path: str, monkeypatch: pytest.MonkeyPatch, state: dict[str, object]
) -> None:
    if state is NEW:
        xckpt.save(path, OLD)

    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(keys_module.KeyStaging, "delete", interrupt)
    monkeypatch.setattr(StagedCheckpoint, "remove_replaced", interrupt)
    with pytest.raises(KeyboardInterrupt):
        xckpt.save(path, state, overwrite=True)
    assert step_at(path) == state["step"]


@pytest.mark.parametrize("first, second", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("old", [False, True])
def test_two_saves_at_once(path: str, first: bool, second: bool, old: bool) -> None:
    """The second begins and ends while the first is about to commit."""
    if old:
        xckpt.save(path, OLD)
        first = second = True
    outcome: list[str] = []

    def attempt(save) -> None:
        try:
            save()
            outcome.append("committed")
        except xckpt.CheckpointExistsError:
            outcome.append("refused")

    def other() -> None:
        attempt(lambda: xckpt.save(path, NEW | {"step": 3}, overwrite=second))

    attempt(lambda: save_with(Stopping(path, other, overwrite=first), NEW))
    assert "committed" in outcome
    winner = 2 if outcome[1] == "committed" else 3
    assert step_at(path) == winner
    xckpt.save(path, NEW | {"step": 4}, overwrite=True)
    assert step_at(path) == 4
    assert "xckpt.saving" not in keys(path)


def test_a_save_that_lost_its_claim_deletes_nothing_of_the_winner(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    slow = begin(Location.parse(url), overwrite=False)
    assert slow.step is Step.IN_PLACE
    open_store(slow.location).write("w/c/0", b"half").result()
    with pytest.raises(xckpt.CheckpointExistsError, match="claimed by a save"):
        xckpt.save(url, NEW)
    xckpt.save(url, NEW, overwrite=True)
    open_store(slow.location).write("w/c/1", b"late").result()
    with pytest.raises(xckpt.CheckpointExistsError, match="another save committed"):
        slow.publish(b"{}")
    slow.abort()
    assert step_at(url) == 2


def test_a_living_save_keeps_its_folder_and_a_dead_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    living = begin(Location.parse(path), overwrite=False)
    dead = begin(Location.parse(path), overwrite=False)
    other = begin(Location.parse(tmp_path / "ckpt2"), overwrite=False)
    for staging in (living, dead, other):
        assert isinstance(staging, StagedCheckpoint)
        (staging.staging / "data").write_bytes(b"x")
    assert isinstance(living, StagedCheckpoint)
    assert isinstance(dead, StagedCheckpoint) and dead.claim is not None
    assert isinstance(other, StagedCheckpoint)
    os.close(dead.claim.descriptor)  # what the kernel does for a killed process
    xckpt.save(path, NEW)
    assert (living.staging / "data").exists()
    assert (other.staging / "data").exists()
    assert not dead.staging.exists() and not dead.claim.path.exists()
    living.abort()
    other.abort()
    assert names(tmp_path) == ["ckpt"]


def test_remains_of_another_host_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt"
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        patch.setattr(folder_module, "boot_identity", lambda: "another system")
        dead = begin(Location.parse(path), overwrite=False)
    assert isinstance(dead, StagedCheckpoint) and dead.claim is not None
    os.close(dead.claim.descriptor)
    xckpt.save(path, NEW)
    assert dead.staging.exists() and dead.claim.path.exists()


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link, empty, dangling = tmp_path / "latest", tmp_path / "empty", tmp_path / "dangling"
    link.symlink_to("real/step1")
    empty.symlink_to("real/empty")
    dangling.symlink_to("real/new/below")
    (tmp_path / "real" / "empty").mkdir()
    xckpt.save(tmp_path / "real" / "step1", OLD)
    xckpt.save(link, NEW, overwrite=True)
    xckpt.save(empty, NEW)
    xckpt.save(dangling, NEW)
    for name in ("step1", "empty", "new/below"):
        assert step_at(tmp_path / "real" / name) == 2
    assert link.is_symlink() and empty.is_symlink() and dangling.is_symlink()
    assert names(tmp_path / "real") == ["empty", "new", "step1"]


def test_parents_are_made(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a" / "b" / "c", NEW)
    assert step_at(tmp_path / "a" / "b" / "c") == 2


def test_a_refused_save_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True to save there and keep"):
        xckpt.save(path, NEW)
    assert (names(tmp_path), names(path)) == (["ckpt"], ["notes.txt"])
    assert (path / "notes.txt").read_text() == "mine"


def test_a_damaged_checkpoint_can_be_replaced(path: str) -> None:
    xckpt.save(path, OLD)
    open_store(Location.parse(path)).write("xckpt.json", b"rubbish").result()
    with pytest.raises(xckpt.ManifestError):
        xckpt.open(path)
    with pytest.raises(xckpt.CheckpointExistsError):
        xckpt.save(path, NEW)
    xckpt.save(path, NEW, overwrite=True)
    assert step_at(path) == 2
    assert not any("b" in key.split("/") for key in keys(path))


def test_a_folder_that_cannot_be_renamed_is_filled_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point: also where only the folder itself is ours, not its parent."""
    path = tmp_path / "mount"
    path.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda folder: folder == path)
    inode = path.stat().st_ino
    for state in (OLD, NEW, OLD):
        xckpt.save(path, state, overwrite=True)
        assert step_at(path) == state["step"]
    assert path.stat().st_ino == inode
    assert names(tmp_path) == ["mount"]


@pytest.mark.parametrize("below", ["", "sub"])
def test_the_working_folder_is_filled_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """This process, and a shell that started it there, would stand in a deleted folder."""
    path = tmp_path / "here"
    (path / below).mkdir(parents=True)
    monkeypatch.chdir(path / below)
    for state in (OLD, NEW):
        xckpt.save(".." if below else ".", state, overwrite=True)
        assert step_at(path) == state["step"]
    assert Path.cwd() == path / below
    assert names(tmp_path) == ["here"]


@pytest.mark.parametrize("place", ["in place", "generation"])
def test_a_lock_that_a_killed_save_left_spoils_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """TensorStore writes over such a file, and leaves what is longer."""
    monkeypatch.setattr(staging_module, "can_rename", lambda folder: place == "generation")
    monkeypatch.setattr(staging_module, "can_exchange", lambda folder: False)
    path = tmp_path / "ckpt"
    xckpt.save(path, OLD)
    (path / "xckpt.json.__lock").write_bytes(b"{" * 10_000)
    xckpt.save(path, NEW, overwrite=True)
    assert step_at(path) == 2


class AnotherRelease:
    """A store whose generation of an absent key is not today's, as in other TensorStores."""

    TODAY = ts.KvStore.open("memory://").result().read("absent").result().stamp.generation
    OTHER = b"\xff another release's"

    def __init__(self, store: ts.KvStore) -> None:
        self.store = store

    def read(self, key: str) -> Future:
        found = self.store.read(key).result()
        absent = found.state == "missing"
        stamp = SimpleNamespace(generation=self.OTHER if absent else found.stamp.generation)
        return answer(SimpleNamespace(state=found.state, value=found.value, stamp=stamp))

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Future:
        if if_equal == self.TODAY:
            return answer(SimpleNamespace(generation=b""))
        expected = self.TODAY if if_equal == self.OTHER else if_equal
        return answer(self.store.write(key, value, if_equal=expected).result())

    def list(self) -> Future:
        return answer(self.store.list().result())


def answer(result: object) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


def test_what_a_release_of_tensorstore_calls_absent(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save once wrote no manifest, said nothing of it, and took the old checkpoint away."""
    for module in (staging_module, keys_module):
        monkeypatch.setattr(module, "open_store", lambda place: AnotherRelease(open_store(place)))
    xckpt.save(path, OLD)
    assert step_at(path) == 1
    xckpt.save(path, NEW, overwrite=True)
    assert step_at(path) == 2
    with pytest.raises(xckpt.CheckpointExistsError):
        xckpt.save(path, NEW)


def test_storage_without_generations_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AnotherRelease, "OTHER", b"")
    for module in (staging_module, keys_module):
        monkeypatch.setattr(module, "open_store", lambda place: AnotherRelease(open_store(place)))
    url = f"memory://{tmp_path.name}"
    with pytest.raises(xckpt.StorageError, match="two saves at once could not be distinguished"):
        xckpt.save(url, NEW)
    assert keys(url) == []


def test_the_manifest_of_a_killed_save_is_not_published(tmp_path: Path) -> None:
    """Whatever is in the staging folder, what is published is this save's."""
    path = tmp_path / "ckpt"

    def leave() -> None:
        (folder,) = (each for each in tmp_path.iterdir() if each.is_dir())
        (folder / "xckpt.json").write_bytes(b"an earlier one")

    save_with(Stopping(str(path), leave), NEW)
    assert step_at(path) == 2


def test_a_staging_folder_that_cannot_be_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that was closed twice might be another thread's by then."""
    staging = begin(Location.parse(tmp_path / "ckpt"), overwrite=False)
    assert isinstance(staging, StagedCheckpoint)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with pytest.raises(OSError, match="Too many open files"):
            staging.clear()
    assert len(os.listdir("/proc/self/fd")) == before
    staging.abort()
    assert names(tmp_path) == []


def refused(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def test_two_saves_that_both_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}"
    monkeypatch.setattr(probe, "find_keys", lambda *place, **found: Found.NOTHING)
    first = begin(Location.parse(url), overwrite=False)
    with pytest.raises(xckpt.CheckpointExistsError, match="another save has just begun here"):
        begin(Location.parse(url), overwrite=False)
    first.abort()
    begin(Location.parse(url), overwrite=False).abort()


def test_a_save_that_begins_during_a_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written its data when the other lists what to delete: it is refused, or is whole."""
    xckpt.save(path, OLD)
    written, resume = Event(), Event()
    outcome: list[str] = []

    def wait() -> None:
        written.set()
        resume.wait(60)

    def other() -> None:
        try:
            save_with(Stopping(path, wait, overwrite=True), NEW | {"step": 3})
            outcome.append("committed")
        except xckpt.CheckpointExistsError:
            outcome.append("refused")

    thread = Thread(target=other)
    listing = keys_module.KeyStaging.replaced

    def interrupted(staging: keys_module.KeyStaging, store) -> list[str]:
        if thread.ident is None:
            thread.start()
            assert written.wait(60)
        return listing(staging, store)

    monkeypatch.setattr(keys_module.KeyStaging, "replaced", interrupted)
    xckpt.save(path, NEW, overwrite=True)
    resume.set()
    if thread.ident is not None:
        thread.join()
    assert step_at(path) == (3 if outcome == ["committed"] else 2)
    assert (outcome == []) is (path[0] == "/" and staging_module.can_exchange(Path(path).parent))


@pytest.mark.parametrize("old", [False, True])
def test_a_private_folder_stays_private(tmp_path: Path, old: bool) -> None:
    """An empty folder of mode 0700 became one that all could read; an old one was, while saved."""
    path, seen = tmp_path / "ckpt", set[int]()
    if old:
        xckpt.save(path, OLD)
    path.mkdir(exist_ok=True)
    path.chmod(0o2700)

    def look() -> None:
        [staging] = tmp_path.glob(".ckpt.saving-*[0-9a-f]")
        seen.update(stat.S_IMODE(each.stat().st_mode) for each in (staging, path))

    save_with(Stopping(str(path), look, overwrite=True), NEW)
    assert seen == {0o2700} and stat.S_IMODE(path.stat().st_mode) == 0o2700


@pytest.mark.parametrize(("mode", "left"), [(0o770, 0o700), (0o775, 0o755), (0o711, 0o711)])
def test_a_group_that_cannot_be_given_gives_its_rights_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, left: int
) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    path.chmod(mode)

    def refuse(*given: object) -> None:
        raise PermissionError(1, "not a member of the group")

    with monkeypatch.context() as patch:
        patch.setattr(os, "chown", refuse)
        xckpt.save(path, OLD)
    assert stat.S_IMODE(path.stat().st_mode) == left
