"""What killed saves leave is removed by the next save into the folder, or by `xckpt.gc`."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest

import xckpt
from tests.support.stored import DOCUMENT
from xckpt import options
from xckpt.core.manifest.own_keys import CLAIM
from xckpt.storage.commit import collect, file_system
from xckpt.storage.commit import folder as folder_module
from xckpt.storage.commit import leftovers as leftovers_module
from xckpt.storage.commit import staging as staging_module
from xckpt.storage.commit.file_system import (
    Lock,
    delete_entries,
    is_local,
    opened_folder,
    suited_threads,
)
from xckpt.storage.commit.folder import ClaimText, claim, journal_of, new_identity, process_identity
from xckpt.storage.commit.leftovers import OwnerState, owner_state
from xckpt.storage.commit.remove import hide_checkpoint
from xckpt.storage.commit.staging import StagedCheckpoint, begin
from xckpt.storage.location import Location, open_store

ROOT = Path(__file__).parents[3]
SAVER = """
import os, signal, socket, sys, time
import numpy as np, xckpt
path, host, die = sys.argv[1:]
socket.gethostname = lambda: host
state = {f"leaf{n}": np.full((64, 64), n, np.float32) for n in range(8)}
written = 0
def progress(now):
    global written
    written += 1
    if written == int(die):
        os.kill(os.getpid(), signal.SIGKILL)
xckpt.save(path, state, overwrite=True, options=xckpt.SaveOptions(progress=progress))
os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def leave(path: Path, owner: ClaimText | None = None) -> StagedCheckpoint:
    """What a killed save to a path leaves; ``owner`` takes the place of this process."""
    staged = begin(Location.parse(path), overwrite=True)
    assert isinstance(staged, StagedCheckpoint) and staged.claim is not None
    (staged.staging / "data").write_bytes(b"x" * 1000)
    if owner is not None:
        staged.claim.path.write_bytes(msgspec.json.encode(owner))
    os.close(staged.claim.descriptor)  # what the kernel does for a killed process
    return staged


def elsewhere() -> ClaimText:
    return ClaimText("elsewhere", 1, "x", boot="another system")


def kill_saves(folder: Path, count: int, seed: int) -> None:
    """SIGKILL saves to changing names under changing host names, at moments drawn at random."""
    pick = random.Random(seed)
    for number in range(count):
        path = folder / f"step-{pick.randrange(20)}"
        arguments = [str(path), f"pod-{number}", str(pick.randint(1, 10))]
        done = subprocess.run([sys.executable, "-c", SAVER, *arguments], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL


def left_in(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".")]


def test_a_kill_while_a_save_gives_up_its_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(folder: Path) -> None:
        raise Killed

    staged = begin(Location.parse(tmp_path / "killed"), overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "remove_tree", die)
        with pytest.raises(Killed):
            staged.abort()
    folder_module._close_claims()  # what the kernel does for a killed process
    assert len(left_in(tmp_path)) > 1
    xckpt.save(tmp_path / "last", {"step": 1})
    assert left_in(tmp_path) == []


def test_a_save_removes_what_others_left_beside_it(tmp_path: Path) -> None:
    kill_saves(tmp_path, 2, seed=1)
    xckpt.save(tmp_path / "last", {"step": 1})
    assert left_in(tmp_path) == []


@pytest.mark.thorough
def test_a_hundred_killed_saves(tmp_path: Path) -> None:
    kill_saves(tmp_path, 50, seed=2)
    xckpt.save(tmp_path / "last", {"step": 1})
    assert left_in(tmp_path) == []
    kill_saves(tmp_path, 50, seed=3)
    assert left_in(tmp_path) != []
    assert all(left.removed for left in xckpt.gc(tmp_path))
    assert left_in(tmp_path) == []
    assert xckpt.gc(tmp_path) == []
    for name in names(tmp_path):
        assert xckpt.open(tmp_path / name).verify() == []


def test_who_is_dead() -> None:
    own = ClaimText.own("x")
    assert owner_state(own, Lock.HELD, local=True) is OwnerState.ALIVE
    renamed = msgspec.structs.replace(own, host="another name")
    assert owner_state(renamed, Lock.TAKEN, local=False) is OwnerState.DEAD
    for local in (True, False):
        assert owner_state(elsewhere(), Lock.TAKEN, local=local) is OwnerState.UNKNOWN
        before = msgspec.structs.replace(own, boot="before this host was started again")
        dead = owner_state(before, Lock.TAKEN, local=local) is OwnerState.DEAD
        assert dead is local
        assert owner_state(before, Lock.HELD, local=local) is OwnerState.ALIVE


def test_where_there_are_no_locks_the_process_tells() -> None:
    own = ClaimText.own("x")
    assert owner_state(own, Lock.LACKING, local=False) is OwnerState.ALIVE
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        life = process_identity(process.pid)
        text = msgspec.structs.replace(own, process=process.pid, life=life)
        assert life and owner_state(text, Lock.LACKING, local=False) is OwnerState.ALIVE
        process.communicate(b"\n")
    assert owner_state(text, Lock.LACKING, local=False) is OwnerState.DEAD
    again = msgspec.structs.replace(own, life=f"{own.life}1")
    assert owner_state(again, Lock.LACKING, local=False) is OwnerState.DEAD
    container = msgspec.structs.replace(own, life="1-1")
    assert owner_state(container, Lock.LACKING, local=False) is OwnerState.UNKNOWN


def test_where_the_system_says_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers_module, "boot_identity", lambda: "")
    own = ClaimText.own("x")
    assert owner_state(own, Lock.TAKEN, local=False) is OwnerState.DEAD
    assert owner_state(own, Lock.LACKING, local=True) is OwnerState.UNKNOWN
    other = msgspec.structs.replace(own, host="another name")
    assert owner_state(other, Lock.TAKEN, local=True) is OwnerState.UNKNOWN


@pytest.mark.skipif(sys.platform != "linux", reason="types of file systems are Linux's")
def test_disks_are_local_and_proc_is_not() -> None:
    assert not is_local(Path("/proc"))
    assert not is_local(Path("/nowhere"))


@pytest.mark.skipif(sys.platform != "linux", reason="types of file systems are Linux's")
@pytest.mark.parametrize("count, wanted", [(1, 1), (3, 3), (200, 32)])
def test_files_in_memory_want_a_thread_for_each_processor(
    monkeypatch: pytest.MonkeyPatch, count: int, wanted: int
) -> None:
    """More of them would take turns at the interpreter's lock; a disk is waited for."""
    for module in (options, file_system):
        monkeypatch.setattr(module, "processors", lambda: count)
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    in_memory = [where for _, where, kind, *_ in mounts if kind == "tmpfs" and os.path.isdir(where)]
    assert {suited_threads(Path(where)) for where in in_memory} <= {wanted}
    for other in (None, Path("/proc"), Path("/nowhere")):
        assert suited_threads(other) is None


def test_what_may_be_alive_elsewhere_goes_by_age(tmp_path: Path) -> None:
    left = leave(tmp_path / "a" / "ckpt", elsewhere())
    xckpt.save(tmp_path / "a" / "other", {"step": 1})
    assert left.staging.exists()
    (found,) = xckpt.gc(tmp_path)
    assert (found.owner, found.removed, found.path) == ("unknown", False, str(left.staging))
    assert found.target == str(tmp_path / "a" / "ckpt") and found.bytes >= 1000
    assert xckpt.gc(tmp_path, older_than=timedelta(hours=1))[0].removed is False
    past = time.time() - 7200
    for path in (left.staging / "data", left.staging.with_name(f"{left.staging.name}.claim")):
        os.utime(path, (past, past))
    (found,) = xckpt.gc(tmp_path, dry_run=True, older_than=3600)
    assert found.age is not None and found.age > 7000 and not found.removed
    assert "2 h old: perhaps alive" in str(found)
    assert xckpt.gc(tmp_path, older_than=3600)[0].removed
    assert names(tmp_path / "a") == ["other"]


def test_what_is_alive_stays(tmp_path: Path) -> None:
    staged = begin(Location.parse(tmp_path / "ckpt"), overwrite=False)
    (found,) = xckpt.gc(tmp_path, older_than=0)
    assert (found.owner, found.removed) == ("alive", False)
    staged.abort()
    assert xckpt.gc(tmp_path, older_than=0) == [] and names(tmp_path) == []


def test_a_conversion_elsewhere_can_go_on(tmp_path: Path) -> None:
    """A save to another path leaves it; gc, and a save to its path, do not."""
    for remove in (lambda: xckpt.gc(tmp_path), lambda: xckpt.save(tmp_path / "out", {"s": 1})):
        staged = begin(Location.parse(tmp_path / "out"), overwrite=True, identity="conversion")
        assert isinstance(staged, StagedCheckpoint) and staged.claim is not None
        journal_of(staged.staging, 0).write_text("journal")
        os.close(staged.claim.descriptor)
        xckpt.save(tmp_path / "ckpt", {"step": 1}, overwrite=True)
        assert len(left_in(tmp_path)) == 3
        remove()
        assert left_in(tmp_path) == []


def test_a_claim_that_was_never_locked(tmp_path: Path) -> None:
    (tmp_path / ".ckpt.saving-0123456789abcdef.new").write_bytes(b"{")
    (found,) = xckpt.gc(tmp_path)
    assert found.removed and names(tmp_path) == []


def test_a_long_name_is_cut_in_files_beside_it_and_kept_in_the_claim(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    left = leave(path)
    assert len(left.staging.name) <= 255
    assert xckpt.gc(tmp_path, dry_run=True)[0].target == str(path)
    xckpt.save(path, {"step": 1})
    assert names(tmp_path) == [path.name]


def test_generations_and_saves_in_place(tmp_path: Path) -> None:
    """Their owners are unknown; what a manifest names stays, and so do files of the user."""
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.ones(4)})
    generation = path / ".generations" / new_identity()
    (generation / "w").mkdir(parents=True)
    (generation / "w" / "zarr.json").write_bytes(b"{}")
    mount = tmp_path / "mount"
    (mount / "w" / "c").mkdir(parents=True)
    for key in ("xckpt.saving", "w/zarr.json", "w/c/0", "config.json"):
        (mount / key).write_bytes(DOCUMENT if key == "w/zarr.json" else b"{}")
    found = xckpt.gc(tmp_path)
    assert {(left.path, left.removed) for left in found} == {
        (str(generation), False),
        (str(mount / "xckpt.saving"), False),
    }
    assert all(left.removed for left in xckpt.gc(tmp_path, older_than=0))
    assert not (path / ".generations").exists() and names(mount) == ["config.json"]
    assert xckpt.open(path).verify() == []


def test_steps_in_a_root_that_is_a_checkpoint_itself(tmp_path: Path) -> None:
    looks_like_a_step = {"7": {".generations": {"a": np.ones(3)}, "w": np.ones(3)}}
    xckpt.save(tmp_path, looks_like_a_step, options=xckpt.SaveOptions(pack_bytes=0))
    xckpt.save(tmp_path / "8", {"w": np.zeros(3)})
    generation = tmp_path / "8" / ".generations" / new_identity()
    generation.mkdir(parents=True)
    [left] = xckpt.gc(tmp_path, older_than=0)
    assert left.path == str(generation) and left.removed and not generation.exists()
    assert all(not xckpt.open(path).verify() for path in (tmp_path, tmp_path / "8"))


def test_a_killed_deletion_costs_the_user_no_empty_folder(tmp_path: Path) -> None:
    """After each file or folder that it deletes; what is left of the checkpoint goes."""
    state = {"m": {"a": np.ones(3), "b": np.zeros((2, 2))}}
    for killed in itertools.count(1):
        step = tmp_path / f"step-{killed:08}"
        xckpt.save(step, state, options=xckpt.SaveOptions(pack_bytes=0))
        for name in ("logs", "m/notes", "a/1/0"):
            (step / name).mkdir(parents=True)
        hidden = hide_checkpoint(Location.parse(step))
        with opened_folder(step) as opened:
            delete_entries(hidden.keys[:killed], opened)
        claimed = (step / CLAIM).stat()
        (step / CLAIM).write_bytes(msgspec.json.encode(ClaimText("elsewhere", 1)))
        os.utime(step / CLAIM, ns=(claimed.st_atime_ns, claimed.st_mtime_ns))
        assert [left.removed for left in xckpt.gc(tmp_path, older_than=0)] == [True]
        left = {str(each.relative_to(step)) for each in step.rglob("*")}
        assert left == {"m", "logs", "m/notes", "a", "a/1", "a/1/0"}
        if killed == len(hidden.keys):
            break


def test_what_gc_may_not_delete_of_a_killed_deletion_stays_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim was deleted all the same; and one that another gc had just removed was an error."""
    step = tmp_path / "step-00000001"
    xckpt.save(step, {"w": np.ones(3)}, options=xckpt.SaveOptions(pack_bytes=0))
    hide_checkpoint(Location.parse(step))
    (step / CLAIM).write_bytes(msgspec.json.encode(ClaimText("elsewhere", 1)))
    delete = file_system.delete_entry

    def refused(entry: str, folder: int | None) -> None:
        if entry == "w/c/0":
            raise PermissionError(13, "no permission")
        delete(entry, folder)

    with monkeypatch.context() as patch:
        patch.setattr(file_system, "delete_entry", refused)
        with pytest.raises(xckpt.StorageError, match="no permission"):
            xckpt.gc(tmp_path, older_than=0)
    [left] = xckpt.gc(tmp_path, dry_run=True)
    assert [each.removed for each in xckpt.gc(tmp_path, older_than=0)] == [True]
    assert names(tmp_path) == []
    step.mkdir()
    assert collect.remove(left, 0.0).removed


@pytest.mark.parametrize(
    "name", ["xckpt.json", "xckpt.saving", ".ckpt.saving-0123456789abcdef.claim"]
)
def test_text_that_is_none_is_damage(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ckpt"
    xckpt.save(path, {"w": np.ones(3)})
    place = tmp_path if name.startswith(".") else path
    (place / name).write_bytes(b'{"host": "\xa2"}' if name != "xckpt.json" else b'{"\xa2": 1}')
    assert all(left.removed for left in xckpt.gc(tmp_path, older_than=0))
    xckpt.save(path, {"w": np.zeros(3)}, overwrite=True)
    assert xckpt.open(path).verify() == [] and names(tmp_path) == ["ckpt"]


@pytest.mark.thorough
def test_folders_a_thousand_deep(tmp_path: Path) -> None:
    path = at = tmp_path / "d"
    xckpt.save(path, {"w": np.ones(3)})
    for _ in range(1010):
        at = at / "d"
        at.mkdir()
    assert xckpt.gc(tmp_path) == []
    xckpt.save(path, {"w": np.ones(4)}, overwrite=True)
    xckpt.delete(path)
    assert os.listdir(tmp_path) == ["d"] and os.listdir(path) == ["d"]
    while at != tmp_path:
        at.rmdir()
        at = at.parent


def test_an_empty_folder_of_another_name_beside_steps(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    xckpt.save(run / "step-7", {"w": np.ones(3)})
    for folder in (run / "5", run / "notes", run / "step-7.old", other / "5", other / "6"):
        folder.mkdir(parents=True)
    [found] = xckpt.gc(tmp_path)
    assert (found.owner, found.removed, found.path) == ("unknown", False, str(run / "5"))
    assert xckpt.gc(tmp_path, older_than=3600)[0].removed is False
    assert xckpt.gc(tmp_path, older_than=0)[0].removed
    assert names(run) == ["notes", "step-7", "step-7.old"] and names(other) == ["5", "6"]


def test_keys_in_a_bucket(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    for name in ("a", "b/c"):
        xckpt.save(f"{url}/{name}", {"w": np.ones(4, np.float32)})
        xckpt.save(f"{url}/{name}", {"w": np.ones(4, np.float32)}, overwrite=True)
    dead = begin(Location.parse(f"{url}/a"), overwrite=True)
    store = open_store(dead.location)
    (document,) = [
        open_store(Location.parse(f"{url}/a")).read(key).result().value
        for key in open_store(Location.parse(f"{url}/a")).list().result()
        if key.endswith(b"w/zarr.json")
    ]
    store.write("w/zarr.json", document).result()
    store.write("w/c/0", b"0" * 16).result()
    claimed = msgspec.json.encode(ClaimText.own(new_identity()))
    for key, content in (("xckpt.saving", claimed), ("w/c/0", b"half")):
        open_store(Location.parse(f"{url}/b")).write(key, content).result()
    found = xckpt.gc(url, older_than=3600)
    assert {left.target: left.removed for left in found} == {f"{url}/a": False, f"{url}/b": False}
    assert [left.bytes - len(document) for left in found if left.target == f"{url}/a"] == [16]
    assert all(left.age is not None and left.age < 60 for left in found)
    assert all(left.removed for left in xckpt.gc(url, older_than=0))
    assert xckpt.gc(url, older_than=0) == []
    for name in ("a", "b/c"):
        assert xckpt.open(f"{url}/{name}").verify() == []
    keys = open_store(Location.parse(url)).list().result()
    assert not [key for key in keys if key.startswith(b"b/") and not key.startswith(b"b/c/")]


def test_a_claim_of_an_older_release(tmp_path: Path) -> None:
    left = leave(tmp_path / "ckpt")
    claimed = left.staging.with_name(f"{left.staging.name}.claim")
    own = ClaimText.own("x")
    claimed.write_bytes(msgspec.json.encode({"host": own.host, "process": 1, "save": "x"}))
    xckpt.save(tmp_path / "other", {"step": 1})
    assert names(tmp_path) == ["other"]


@pytest.mark.parametrize("time", ["1h", True, -1.0, float("nan")])
def test_what_is_no_time(tmp_path: Path, time: object) -> None:
    with pytest.raises((TypeError, ValueError), match="older_than must"):
        xckpt.gc(tmp_path, older_than=time)  # type: ignore[arg-type]
    assert xckpt.gc(tmp_path, older_than=np.int64(3)) == []


def test_a_checkpoint_that_is_called_as_leftovers_are(tmp_path: Path) -> None:
    path = tmp_path / ".run.saving-0123456789abcdef"
    xckpt.save(path, {"step": 1})
    xckpt.save(tmp_path / "run", {"step": 2})  # which removes what is left beside it
    staged = path / ".generations" / "0123456789abcdef"
    staged.mkdir(parents=True)
    (staged / "x").write_bytes(b"x")
    journal = tmp_path / f"{path.name}.journal-0"
    journal.write_bytes(b"x")
    assert {left.path for left in xckpt.gc(tmp_path, older_than=0)} == {str(path), str(staged)}
    assert xckpt.load(path) == {"step": 1} and not staged.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        xckpt.StorageError, match=r"none holds .* it does not exist; .* check the path"
    ):
        xckpt.gc(tmp_path / "none")


@pytest.mark.parametrize("removed", [True, False])
def test_a_claim_that_another_takes_for_a_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """It is locked, and perhaps removed, before its own save locks it: that makes it again."""
    real = folder_module.lock
    unlocked = tmp_path / ".ckpt.saving-0123456789abcdef.new"
    others: list[int] = []

    def lock(descriptor: int) -> Lock:
        if not others:
            others.append(os.open(unlocked, os.O_RDWR))
            assert real(others[0]) is Lock.TAKEN
            if removed:
                unlocked.unlink()
        return real(descriptor)

    monkeypatch.setattr(folder_module, "lock", lock)
    made = claim(tmp_path / "ckpt", "0123456789abcdef")
    os.close(others[0])
    third = os.open(made.path, os.O_RDWR)
    assert real(third) is Lock.HELD
    os.close(third)
    made.release()
    assert names(tmp_path) == []


def test_two_processes_that_begin_one_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither saw the other: the second took the claim of the first away, and both went on."""
    target = tmp_path / "ckpt"
    first = claim(target, "conversion")
    monkeypatch.setattr(folder_module, "LEFTOVER", re.compile("none"))
    with pytest.raises(xckpt.CheckpointExistsError, match="another process is writing here"):
        folder_module.claim_folder(target, "conversion")
    assert os.path.samestat(os.fstat(first.descriptor), first.path.stat())
    first.release()
    assert names(tmp_path) == []
