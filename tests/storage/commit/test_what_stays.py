"""Whatever is removed, other checkpoints and the user's files below the same place stay."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import xckpt
from tests.support.servers import environment, gcs, new_place, s3
from tests.support.stored import DOCUMENT
from xckpt.core.manifest.own_keys import GENERATIONS
from xckpt.storage import ZarrStorageWriter
from xckpt.storage.commit import file_system
from xckpt.storage.commit.conditional import KeyClaim
from xckpt.storage.commit.file_system import check_deletable, hold, let_go, may_write
from xckpt.storage.commit.folder import ClaimText
from xckpt.storage.commit.remove import Pace, hide_checkpoint
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "gcs", "s3"]

CLAIMED = msgspec.json.encode(ClaimText("elsewhere", 1, "0" * 16))
STATE = {"m": {"w": np.arange(6.0)}, "step": 1}


@pytest.fixture(params=["folder", "memory", "s3", "gcs"])
def place(request: pytest.FixtureRequest) -> str:
    return new_place(request)


def contents(place: str) -> dict[str, bytes]:
    """Key -> content of all that is below a place."""
    store = open_store(Location.parse(place))
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def collect(place: str) -> None:
    assert all(left.removed for left in xckpt.gc(place, older_than=0))


def delete(place: str) -> None:
    with contextlib.suppress(xckpt.NotACheckpointError):
        xckpt.delete(place)


def overwrite(place: str) -> None:
    xckpt.save(place, STATE, overwrite=True)


def fail(place: str) -> None:
    """A save that fails in its midst, after it was tried to go on where a dead one was."""

    def raise_it(progress: xckpt.Progress) -> None:
        raise RuntimeError(progress)

    options = xckpt.SaveOptions(progress=raise_it)
    with pytest.raises(Exception, match="Progress"):
        xckpt.save(place, STATE, overwrite=True, options=options)


@pytest.mark.parametrize("call", [collect, delete, overwrite, fail])
@pytest.mark.parametrize("left", ["a claim", "an unreadable manifest"])
def test_other_checkpoints_below_stay(place: str, left: str, call: Callable[[str], None]) -> None:
    """What a killed save has left is known by its shape, and so does another checkpoint look, or an
    array of another library: one that lay beside was deleted.
    """
    xckpt.save(f"{place}/step-1", STATE)
    xckpt.save(f"{place}/deep/er/step-2", STATE)
    for key in ("mine/zarr.json", "mine/c/0", "w/mine/zarr.json", ".generations/notes/0"):
        open_store(Location.parse(place)).write(key, b'{"shape": [3], "zarr_format": 3}').result()
    steps = contents(place)
    mark = {"a claim": "xckpt.saving", "an unreadable manifest": "xckpt.json"}[left]
    content = CLAIMED if left == "a claim" else b"{"
    for key, value in {mark: content, "w/zarr.json": DOCUMENT, "w/c/0": b"ours"}.items():
        open_store(Location.parse(place)).write(key, value).result()
    call(place)
    there = contents(place)
    assert {key: there.get(key) for key in steps} == steps
    assert call not in (collect, overwrite) or left != "a claim" or "w/c/0" not in there


@pytest.mark.parametrize("call", [collect, xckpt.delete, overwrite])
def test_a_users_file_of_a_manifests_name(place: str, call: Callable[[str], None]) -> None:
    mine = {"xckpt.json": b'{"my": "settings"}', "zarr.json": b"{}", "w/zarr.json": b"{}"}
    for key, content in (mine | {"w/c/0": b"mine"}).items():
        open_store(Location.parse(place)).write(key, content).result()
    before = contents(place)
    if call is collect:
        call(place)
    else:
        error = "xckpt.json there is no manifest of xckpt, so .*nothing"
        with pytest.raises(xckpt.XckptError, match=error):
            call(place)
    assert contents(place) == before


def test_names_that_resemble_those_of_leftovers(tmp_path: Path) -> None:
    mine = [
        *("run/.generations/photos/1.png", "run/.generations/notes.txt", "elsewhere/photos/1.png"),
        *(".x.saving-mine/notes.txt", ".x.saving-mine.new", ".x.saving-0123456789abcdef.new"),
    ]
    for key in mine:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_text("mine")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".generations").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "0123456789abcdef").mkdir()
    (tmp_path / "elsewhere" / "0123456789abcdef" / "w").write_text("mine")
    xckpt.save(tmp_path / "x", STATE)
    xckpt.gc(tmp_path, older_than=0)
    assert all((tmp_path / key).read_text() == "mine" for key in mine)
    assert (tmp_path / "elsewhere" / "0123456789abcdef" / "w").exists()


def test_a_save_after_a_deletion_that_had_no_room_for_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of such a deletion is tried again later: it took the new checkpoint's files."""
    path, plain = tmp_path / "ckpt", xckpt.SaveOptions(pack_bytes=0)
    xckpt.save(path, {"w": np.arange(3)}, options=plain)

    def full(*given: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(KeyClaim, "take", full)
        hidden = hide_checkpoint(Location.parse(path))
    shutil.rmtree(path)
    xckpt.save(path, {"w": np.arange(3, 6)}, options=plain)
    hidden.sweep(Pace())
    assert xckpt.open(path).verify() == [] and xckpt.load(path)["w"].tolist() == [3, 4, 5]


def test_a_generation_that_its_save_still_holds_goes_with_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save has committed it, and has not ended: it is deleting what it replaced."""
    monkeypatch.setattr("xckpt.storage.commit.staging.can_exchange", lambda folder: False)
    path = tmp_path / "ckpt"
    for end in (xckpt.delete, lambda path: xckpt.save(path, STATE, overwrite=True)):
        for _ in range(2):
            xckpt.save(path, STATE, overwrite=True)
        (generation,) = (path / GENERATIONS).iterdir()
        held = hold(generation)
        end(path)
        let_go(held)
        assert not generation.exists()
    xckpt.delete(path)
    assert not path.exists()


def test_a_save_beside_a_deletion_lives_on(tmp_path: Path) -> None:
    """Nothing was there when it began, as now; another save and deletion had removed its data."""
    path, plain = tmp_path / "ckpt", xckpt.SaveOptions(pack_bytes=0)
    xckpt.save(path, STATE, options=plain)
    first = hide_checkpoint(Location.parse(path))
    writer = ZarrStorageWriter(path, overwrite=True, options=plain)

    def meanwhile() -> None:
        first.sweep(Pace())
        xckpt.save(path, STATE, overwrite=True, options=plain)
        assert [left.owner for left in xckpt.gc(path, older_than=0)] == ["alive"]
        xckpt.delete(path)

    finish = writer.finish
    writer.finish = lambda *given: (meanwhile(), finish(*given))[1]  # type: ignore[method-assign]
    xckpt.save_state_dict({"w": np.arange(9), "step": 4}, writer, no_dist=True)
    checkpoint = xckpt.open(path)
    assert checkpoint.verify() == [] and checkpoint["step"] == 4


def test_a_folder_that_goes_while_its_permissions_are_asked_is_no_forbidden_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another deletion, or an overwrite, one ended by a request to check permissions."""
    (tmp_path / "w" / "c").mkdir(parents=True)

    def goes(folder: Path) -> bool:
        folder.rmdir()
        return may_write(folder)

    monkeypatch.setattr(file_system, "may_write", goes)
    check_deletable(tmp_path, ["w/c/0"])
    assert not (tmp_path / "w" / "c").exists()
