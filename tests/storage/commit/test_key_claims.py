"""Who works on keys holds a claim: saves, deletions and collections that meet at one path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.support.servers import bucket, environment, gcs
from tests.support.stored import DOCUMENT, keys, step_at
from xckpt.storage.commit import collect_keys, conditional, remove, staging
from xckpt.storage.commit.keys import KeyStaging
from xckpt.storage.commit.remove import Pace, hide_checkpoint
from xckpt.storage.location import Location, open_store

__all__ = ["bucket", "environment", "gcs"]

PLAIN = xckpt.SaveOptions(pack_bytes=0)
OLD, NEW = {"w": np.arange(3), "step": 1}, {"w": np.arange(4), "step": 2}


@pytest.fixture(params=["memory", "bucket", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param != "memory":
        request.getfixturevalue(request.param)
    scheme = {"memory": "memory", "bucket": "s3", "gcs": "gs"}[request.param]
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"{scheme}://bucket/{name}"


def once_before(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, act: Callable[[], object]):
    """Have something done before the next call of a function."""
    called = getattr(where, name)

    def first(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(where, name, called)
        act()
        return called(*given, **options)

    monkeypatch.setattr(where, name, first)


def collect(url: str) -> None:
    """Remove what is there of a save that is under way; the trial of a listing may be there too."""
    assert [left for left in xckpt.gc(url, older_than=0) if left.removed]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_was_collected_is_not_committed(
    url: str, overwrite: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a person who names too short a time; the claim was looked at before, but long ago."""
    if overwrite:
        xckpt.save(url, OLD, options=PLAIN)
    if late:
        monkeypatch.setattr(conditional, "SECONDS", -1.0)
    once_before(monkeypatch, KeyStaging, "publish" if late else "prepare", lambda: collect(url))
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.save(url, NEW, overwrite=overwrite, options=PLAIN)
    if overwrite:
        assert step_at(url) == 1
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert step_at(url) == 2 and xckpt.gc(url, older_than=0) == []


def test_a_copy_that_was_collected_is_not_committed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save("memory://key-claims-copied", NEW, overwrite=True, options=PLAIN)
    monkeypatch.setattr(conditional, "SECONDS", -1.0)
    once_before(monkeypatch, KeyStaging, "publish", lambda: collect(url))
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.copy("memory://key-claims-copied", url)
    assert keys(url) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_amid_a_collection_is_said(
    url: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest was on its way when the claim was taken over: nobody says that all is well."""
    if overwrite:
        xckpt.save(url, OLD, options=PLAIN)
    write = KeyStaging._write_manifest

    def while_it_is_collected(self: KeyStaging, store: Any, manifest: bytes) -> None:
        if self.trial is not None:
            self.trial.wait()  # what it tried the bucket with would be collected first
        once_before(monkeypatch, collect_keys, "delete_keys", lambda: write(self, store, manifest))
        with pytest.raises(xckpt.StorageError, match="a save committed here while"):
            xckpt.gc(url, older_than=0)

    monkeypatch.setattr(KeyStaging, "_write_manifest", while_it_is_collected)
    if not overwrite:  # the claim is looked at with the manifest
        with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
            xckpt.save(url, NEW, options=PLAIN)
        assert "xckpt.json" not in keys(url)
        return
    xckpt.save(url, NEW, overwrite=overwrite, options=PLAIN)
    assert xckpt.open(url).verify() != []


def test_of_two_deletions_one_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one says so, and leaves the claim, by which the remains are known."""
    xckpt.save(url, OLD, options=PLAIN)
    target, hidden = Location.parse(url), list[remove.Hidden]()
    once_before(monkeypatch, remove, "_claim", lambda: hidden.append(hide_checkpoint(target)))
    with pytest.raises(xckpt.StorageError, match="at work here just now"):
        xckpt.delete(url)
    assert "xckpt.saving" in keys(url) and "w/c/0" in keys(url)
    collect(url)  # as if the first one had been killed
    assert keys(url) == []


def test_who_came_first_is_said(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion, or another save; to a save, and to a deletion."""

    def overwritten() -> None:
        xckpt.save(url, NEW, overwrite=True, options=PLAIN)

    xckpt.save(url, OLD, options=PLAIN)
    once_before(monkeypatch, KeyStaging, "publish", lambda: xckpt.delete(url))
    with pytest.raises(xckpt.StorageError, match="was to replace was deleted meanwhile"):
        overwritten()
    xckpt.save(url, OLD, options=PLAIN)
    once_before(monkeypatch, KeyStaging, "publish", overwritten)
    with pytest.raises(xckpt.CheckpointExistsError, match="another save committed here"):
        xckpt.save(url, OLD, overwrite=True, options=PLAIN)
    once_before(monkeypatch, remove, "_withdraw", overwritten)
    with pytest.raises(xckpt.StorageError, match="another save has replaced this checkpoint"):
        xckpt.delete(url)
    assert step_at(url) == 2


def test_a_deletion_that_lost_the_race_leaves_the_save_its_claim(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw a checkpoint that is deleted by now, and a save has begun in its place."""
    xckpt.save(url, OLD, options=PLAIN)
    writer = xckpt.storage.ZarrStorageWriter(url, options=PLAIN)

    def begin_anew() -> None:
        hide_checkpoint(Location.parse(url)).sweep(Pace())
        begun = staging.begin(Location.parse(url), overwrite=False)
        writer.stage(begun)
        assert isinstance(begun, KeyStaging) and begun.trial is not None
        begun.trial.wait()  # it is removed while the save goes on

    once_before(monkeypatch, remove, "_claim", begin_anew)
    with pytest.raises(xckpt.StorageError, match="at work here just now"):
        xckpt.delete(url)
    assert keys(url) == ["xckpt.saving"]
    writer.abort()
    assert keys(url) == []


def test_a_slow_deletion_ends_when_another_has_the_path(url: str) -> None:
    xckpt.save(url, OLD, options=PLAIN)
    slow = hide_checkpoint(Location.parse(url))
    xckpt.save(url, OLD, overwrite=True, options=PLAIN)
    xckpt.delete(url)
    xckpt.save(url, NEW, options=PLAIN)
    there = keys(url)
    slow.sweep(Pace())
    assert keys(url) == there and step_at(url) == 2


def damage_claim(url: str, of: str = "xckpt.saving") -> Callable[[], object]:
    """Cut a claim short; what makes it whole again."""
    store = open_store(Location.parse(url))
    [key] = [key for key in keys(url) if key.startswith(of) and key.endswith("xckpt.saving")]
    whole = store.read(key).result().value
    store.write(key, whole[:10]).result()
    return lambda: store.write(key, whole).result()


def test_a_damaged_claim_does_not_end_a_deletion_without_a_word(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no claim of another call: the deletion tries again, and says what is left."""
    xckpt.save(url, OLD, options=PLAIN)
    hidden = hide_checkpoint(Location.parse(url))
    mend, there = damage_claim(url), keys(url)
    monkeypatch.setattr(remove, "DELAYS", (0.0,))
    with pytest.raises(xckpt.StorageError, match=r"are left, up to 5, .*saving is damaged"):
        hidden.sweep(Pace())
    assert keys(url) == there
    once_before(monkeypatch, Pace, "rest", mend)
    hidden.sweep(Pace())
    assert set(keys(url)) <= {"xckpt.saving"}  # which this test wrote anew


def test_nor_is_a_save_taken_for_a_dead_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once_before(monkeypatch, KeyStaging, "prepare", lambda: damage_claim(url))
    with pytest.raises(xckpt.StorageError, match="saving is damaged"):
        xckpt.save(url, OLD, options=PLAIN)
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert step_at(url) == 2 and "w/c/0" not in keys(url)


def test_what_lies_beside_a_damaged_claim_is_collected(url: str) -> None:
    """No time removed it: its age cannot be known."""
    store = open_store(Location.parse(url))
    for key, content in {"xckpt.saving": b'{"host', "w/zarr.json": DOCUMENT, "mine": b""}.items():
        store.write(key, content).result()
    [left] = xckpt.gc(url, older_than=3600)
    assert (left.owner, left.age, left.removed) == ("unknown", None, False)
    assert str(left).endswith(
        f"xckpt.saving: {len(DOCUMENT)} B in 2 files, of unknown age: perhaps alive"
    )
    assert xckpt.gc(url, older_than=0)[0].removed
    assert keys(url) == ["mine"] and xckpt.gc(url, older_than=0) == []


def test_a_committed_overwrite_says_what_a_damaged_claim_leaves(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xckpt.save(url, OLD, options=PLAIN)
    monkeypatch.setattr(conditional, "AT_ONCE", 2)
    once_before(monkeypatch, KeyStaging, "delete", lambda: damage_claim(url, ".generations"))
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert step_at(url) == 2 and "saving is damaged" in caplog.text


def test_what_an_overwrite_could_not_delete_is_collected(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    xckpt.save(url, OLD, options=PLAIN)
    open_store(Location.parse(url)).write("mine/zarr.json", b"{}").result()
    with monkeypatch.context() as refusing:
        refusing.setattr(KeyStaging, "delete", lambda *given: True)
        xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert "w/c/0" in keys(url)
    [left] = xckpt.gc(url, dry_run=True)
    assert left.path.endswith("/xckpt.replaced") and left.bytes > 0
    assert not xckpt.gc(url, older_than=3600)[0].removed
    collect(url)
    root = xckpt.open(url).manifest.root
    outside = [key for key in keys(url) if not key.startswith(f"{root}/")]
    assert outside == ["mine/zarr.json", "xckpt.json"]
    assert step_at(url) == 2 and xckpt.gc(url, older_than=0) == []


def test_a_long_sweep_ends_when_another_has_the_path(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overwrite has committed and deletes the old keys: a new save writes the same ones."""
    monkeypatch.setattr(conditional, "AT_ONCE", 2)
    xckpt.save(url, OLD, options=PLAIN)
    delete, late = conditional.delete_keys, list[dict[str, Exception]]()

    def delete_late(store: Any, some: Any, target: Any, claim: Any = None) -> dict[str, Exception]:
        if claim is None:  # of another call
            return delete(store, some, target)
        monkeypatch.setattr(conditional, "delete_keys", delete)
        xckpt.delete(url)
        xckpt.save(url, NEW, options=PLAIN)
        late.append(delete(store, ["none", "none", *some], target, claim))
        return late[0]

    monkeypatch.setattr(conditional, "delete_keys", delete_late)
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert "w/c/0" in late[0] and step_at(url) == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_manifest_that_came_too_late_goes_back(
    url: str, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names was collected while it was on its way."""
    if overwrite:
        xckpt.save(url, OLD, options=PLAIN)
    monkeypatch.setattr(conditional, "SECONDS", -1.0)
    once_before(monkeypatch, KeyStaging, "_write_manifest", lambda: collect(url))
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.save(url, NEW, overwrite=overwrite, options=PLAIN)
    xckpt.gc(url, older_than=0)
    if overwrite:
        assert step_at(url) == 1
    else:
        assert keys(url) == []


def test_what_came_after_another_save_had_cleared_the_path_is_collected(url: str) -> None:
    writer = xckpt.storage.ZarrStorageWriter(url, options=PLAIN)
    writer.stage()
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    open_store(Location.parse(url)).write("late/c/0", b"late").result()
    writer.abort()
    assert "late/c/0" in keys(url)
    xckpt.gc(url, older_than=0)
    assert "late/c/0" not in keys(url) and "xckpt.saving" not in keys(url)
    assert step_at(url) == 2 and xckpt.gc(url, older_than=0) == []


@pytest.mark.parametrize("damage", [(b'"version":1', b'"version":2'), (b"shape", b"shade")])
def test_beside_a_manifest_that_cannot_be_read_nothing_is_collected(
    url: str, damage: tuple[bytes, bytes]
) -> None:
    """It may be a newer release's, and name any generation."""
    xckpt.save(url, OLD, options=PLAIN)
    xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    store = open_store(Location.parse(url))
    store.write("xckpt.json", store.read("xckpt.json").result().value.replace(*damage)).result()
    there = keys(url)
    assert xckpt.gc(url, older_than=0) == [] and keys(url) == there


def test_nor_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "can_exchange", lambda folder: False)
    for state in (OLD, NEW):
        xckpt.save(tmp_path / "run", state, overwrite=True, options=PLAIN)
    manifest = tmp_path / "run" / "xckpt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":2'))
    assert xckpt.gc(tmp_path, older_than=0) == []
    assert len(list(tmp_path.rglob("c/0"))) == 1


def test_a_collection_lists_each_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a run were listed again for each of its leftovers."""
    run, listed = "memory://collected-run", list[tuple[str, str]]()
    for step in ("1", "10", "2"):
        xckpt.save(f"{run}/{step}", OLD, options=PLAIN)
    lost = open_store(Location.parse(run))
    for step in ("1", "2"):
        lost.write(f"{step}/.generations/0123456789abcdef/w/c/0", b"lost").result()

    class Listed:
        """A store that notes what is listed."""

        def __init__(self, location: Location) -> None:
            self.store = open_store(location)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def list(self, only: Any = None) -> Any:
            found = self.store.list(only) if only else self.store.list()
            listed.append((min(found.result()).decode(), max(found.result()).decode()))
            return found

    monkeypatch.setattr(collect_keys, "open_store", Listed)
    collect(run)
    assert [low.partition("/")[0] for low, _ in listed] == ["1", "1", "2"]
    assert [high.partition("/")[0] for _, high in listed] == ["2", "1", "2"]
    assert sorted(xckpt.open(f"{run}/{step}").verify() == [] for step in ("1", "10", "2"))
    assert not any(".generations" in key for key in keys(run))


@pytest.mark.parametrize("cleaned", [True, False])
def test_a_deletion_amid_a_save_that_began_where_nothing_was(
    url: str, monkeypatch: pytest.MonkeyPatch, cleaned: bool
) -> None:
    """Its manifest needs that nothing is there, as before: it was committed without its data."""
    xckpt.save(url, OLD, options=PLAIN)
    hide_checkpoint(Location.parse(url))  # and is killed
    whole: list[bool] = []

    def waited() -> None:
        whole.append(sum(key.endswith("w/c/0") for key in keys(url)) >= 2)

    def meanwhile() -> None:
        with monkeypatch.context() as patch:
            if not cleaned:
                patch.setattr(KeyStaging, "delete", lambda *given: True)
            xckpt.save(url, OLD, overwrite=True, options=PLAIN)
        monkeypatch.setattr(remove, "let_arrive", waited)
        xckpt.delete(url)

    once_before(monkeypatch, KeyStaging, "_write_manifest", meanwhile)
    with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
        xckpt.save(url, NEW, overwrite=True, options=PLAIN)
    assert whole == ([] if cleaned else [True]) and "xckpt.json" not in keys(url)


def test_a_save_at_a_free_path_that_another_has_overwritten_and_deleted(url: str) -> None:
    """Nothing is there again when it commits: it was committed without its data."""

    def meanwhile() -> None:
        xckpt.save(url, OLD, overwrite=True, options=PLAIN)
        xckpt.delete(url)

    with pytest.MonkeyPatch.context() as patch:
        once_before(patch, KeyStaging, "_write_manifest", meanwhile)
        with pytest.raises(xckpt.StorageError, match="taken for a dead one"):
            xckpt.save(url, NEW, options=PLAIN)
    assert "xckpt.json" not in keys(url)
    xckpt.save(url, NEW, options=PLAIN)
    assert xckpt.open(url).verify() == []
