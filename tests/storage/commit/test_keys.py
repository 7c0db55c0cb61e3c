"""Lock files of dead writers are emptied, those of living ones and what they became are not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

import xckpt
from tests.support.servers import bucket, environment, gcs
from xckpt.storage.commit import conditional, keys
from xckpt.storage.commit.collect import Leftover
from xckpt.storage.commit.collect_keys import find_in_keys, remove_keys
from xckpt.storage.commit.conditional import empty_stale_lock
from xckpt.storage.commit.folder import ClaimText, new_identity
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.location import Location, open_store

__all__ = ["bucket", "environment", "gcs"]


def test_a_dead_writers_lock_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "k.__lock").write_bytes(b"x" * 100)
    empty_stale_lock(tmp_path, "k")
    open_store(Location("file", str(tmp_path))).write("k", b"new").result()
    assert (tmp_path / "k").read_bytes() == b"new"


def test_where_there_is_none(tmp_path: Path) -> None:
    empty_stale_lock(tmp_path, "k")
    assert list(tmp_path.iterdir()) == []


def test_a_living_writers_lock_is_left(tmp_path: Path) -> None:
    path = tmp_path / "k.__lock"
    path.write_bytes(b"half of it")
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=pipe, stdout=pipe) as held:
        assert held.stdout is not None and held.stdout.readline() == b"locked\n"
        empty_stale_lock(tmp_path, "k")
        assert path.read_bytes() == b"half of it"
        held.communicate(b"")
    empty_stale_lock(tmp_path, "k")
    assert path.read_bytes() == b""


def test_what_was_renamed_meanwhile_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer finishes after the lock was opened: it is the key now."""
    path = tmp_path / "k.__lock"
    path.write_bytes(b"the manifest")

    def lock_after_it_finished(file, how: int) -> None:
        os.rename(path, tmp_path / "k")
        path.write_bytes(b"of another")
        fcntl.flock(file, how)

    monkeypatch.setattr(conditional.fcntl, "lockf", lock_after_it_finished)
    empty_stale_lock(tmp_path, "k")
    assert (tmp_path / "k").read_bytes() == b"the manifest"
    assert path.read_bytes() == b"of another"


def test_files_of_the_user_survive_a_kill_amid_the_deletion_beside_a_claim() -> None:
    """The copy of the old manifest says what is to go; the claim alone would mean any zarr.json."""
    place = Location.parse("memory://keys-killed-amid-the-deletion")
    store = open_store(place)
    xckpt.save(place, {"w": np.arange(3)})
    old = {key: store.read(key).result().value for key in store.list().result()}
    xckpt.save(place, {"w": np.arange(4)}, overwrite=True)
    root = next(k.decode() for k in store.list().result() if b".generations/" in k).split("/")[1]
    left = {"w/c/0": old[b"w/c/0"], "xckpt.saving": b"{}", "mine/zarr.json": b"{}"}
    left[f".generations/{root}/{keys.REPLACED}"] = old[b"xckpt.json"]
    for key, content in left.items():
        store.write(key, content).result()
    xckpt.save(place, {"w": np.arange(5)}, overwrite=True)
    there = [key.decode() for key in store.list().result()]
    outside = [key for key in there if not key.startswith(".generations/")]
    assert sorted(outside) == ["mine/zarr.json", "xckpt.json"]
    assert xckpt.open(place).verify() == []


@pytest.mark.parametrize("store", ["memory", "bucket", "gcs"])
@pytest.mark.parametrize("again", [False, True])
def test_a_save_whose_keys_were_collected_is_not_committed(
    store: str, again: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a person who names too short a time; another save may have begun there since."""
    scheme = {"memory": "memory", "bucket": "s3", "gcs": "gs"}[store]
    if store != "memory":
        request.getfixturevalue(store)
    url = f"{scheme}://bucket/collected-{again}"
    prepare, options = KeyStaging.prepare, xckpt.SaveOptions(pack_bytes=0)

    def collected(self: KeyStaging) -> object:
        monkeypatch.setattr(KeyStaging, "prepare", prepare)
        assert self.trial is not None
        self.trial.wait()  # what it tried the bucket with is gone, too
        while "w/c/0" not in listed(url):  # it is on its way
            time.sleep(0.01)
        (left,) = xckpt.gc(url, older_than=0)
        assert left.removed and "w/c/0" not in listed(url)
        if again:
            xckpt.save(url, {"v": np.ones(3)}, overwrite=True)
        return prepare(self)

    monkeypatch.setattr(KeyStaging, "prepare", collected)
    why = "another save committed" if again else "taken for a dead one.*overwrite=True"
    with pytest.raises(xckpt.XckptError, match=why):
        xckpt.save(url, {"w": np.arange(4)}, options=options)
    if again:
        assert xckpt.load(url)["v"].tolist() == [1, 1, 1]
    else:
        assert "xckpt.json" not in listed(url)
        xckpt.save(url, {"w": np.arange(4)}, options=options, overwrite=True)
    assert xckpt.open(url).verify() == []


def test_a_claim_of_a_later_save_is_not_collected() -> None:
    url = "memory://collected-late"
    store, location = open_store(Location.parse(url)), Location.parse(url)
    old = ClaimText.own("00000000" + new_identity()[8:])
    store.write("xckpt.saving", msgspec.json.encode(old)).result()
    (left,) = find_in_keys(location)
    staged = msgspec.json.encode(ClaimText.own(new_identity()))
    store.write("xckpt.saving", staged).result()
    assert not next(remove_keys(location, [left], 3600)).removed
    assert store.read("xckpt.saving").result().value == staged


def test_what_is_committed_while_it_is_looked_for_stays(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, found = "s3://bucket/committed-late", list[Leftover]()
    prepare = KeyStaging.prepare

    def looked_for(self: KeyStaging) -> object:
        found.extend(find_in_keys(self.target))
        return prepare(self)

    monkeypatch.setattr(KeyStaging, "prepare", looked_for)
    xckpt.save(url, {"w": np.arange(4)})
    there = listed(url)
    (left,) = found
    assert not next(remove_keys(Location.parse(url), [left], 0)).removed
    assert listed(url) == there and "xckpt.saving" in there
    assert xckpt.open(url).verify() == []


def listed(url: str) -> list[str]:
    return [key.decode() for key in open_store(Location.parse(url)).list().result()]
