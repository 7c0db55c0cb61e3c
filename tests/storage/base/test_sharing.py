"""A save with a base writes what differs, shares the rest, and is whole by itself."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import xckpt
from xckpt import SaveOptions
from xckpt.core.manifest.own_keys import DIGESTS, MANIFEST
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.core.run.names import OptionalBase
from xckpt.storage.base.base import Base
from xckpt.storage.base.chunks import FICLONE, BaseChunks
from xckpt.storage.commit.file_system import syncs_at_once
from xckpt.storage.location import Location
from xckpt.storage.read_checkpoint import read_manifest

SMALL = SaveOptions(chunk_bytes=1 << 10, pack_bytes=0)

State = dict[str, Any]


def a_state() -> State:
    return {
        "w": np.arange(4096, dtype=np.float32).reshape(64, 64),
        "big": np.arange(200_000, dtype=np.float64),
        "b": np.arange(5, dtype=np.int16),
        "flag": np.array([True, False]),
        "scalar": np.float32(3),
        "none": np.zeros((0, 3)),
        "text": "x" * 5000,
        "step": 3,
    }


def inodes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and "c" in path.parts)
    return {str(path.relative_to(folder)): path.stat().st_ino for path in files}


def shared(one: Path, other: Path) -> set[str]:
    theirs = inodes(other)
    return {key for key, inode in inodes(one).items() if theirs.get(key) == inode}


def check(path: Path, state: State) -> None:
    """The checkpoint is whole, holds the state, and plain zarr opens it."""
    assert xckpt.open(path).verify() == []
    loaded = xckpt.load(path)
    for name, value in state.items():
        assert np.array_equal(loaded[name], value), name
    array = zarr.open_array(str(path / "w"), mode="r")
    assert np.array_equal(np.asarray(array[...]), state["w"])


def is_own(path: Path) -> bool:
    """Whether a file has no other name."""
    return path.stat().st_nlink == 1


def written_to(folder: Path) -> int:
    """Bytes of files that the folder alone has."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(path.stat().st_size for path in files if is_own(path))


@pytest.mark.parametrize("options", [SaveOptions(), SMALL, SaveOptions(crc32c=True)])
def test_an_unchanged_state_is_shared(tmp_path: Path, options: SaveOptions) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state, options=options)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=options)
    tensors = {key for key in inodes(tmp_path / "b") if not key.startswith("text/")}
    assert shared(tmp_path / "a", tmp_path / "b") == tensors
    check(tmp_path / "b", state)
    shutil.rmtree(tmp_path / "a")
    check(tmp_path / "b", state)


def test_what_changed_is_written(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state, options=SMALL)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    changed = {**state, "w": np.array(state["w"]), "b": np.array([5, 4, 3, 2, 1], np.int16)}
    changed["w"][17, 3] = -1
    xckpt.save(tmp_path / "b", changed, base=tmp_path / "a", options=SMALL)
    check(tmp_path / "a", state)
    check(tmp_path / "b", changed)
    unshared = inodes(tmp_path / "b").keys() - shared(tmp_path / "a", tmp_path / "b")
    assert {key for key in unshared if not key.startswith("text")} == {"w/c/4/0", "b/c/0"}
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("options", [SaveOptions(), SaveOptions(crc32c=True)])
@pytest.mark.parametrize("count", [1, 40])
def test_the_bytes_written_for_an_unchanged_state(
    tmp_path: Path, count: int, options: SaveOptions
) -> None:
    """They are those of the manifest and the digests: a zarr.json that is equal is shared."""
    elements = np.random.default_rng(0).standard_normal((count, 100, 8000 // count), np.float32)
    state = {f"layer.{number}": {"w": each} for number, each in enumerate(elements)}
    xckpt.save(tmp_path / "a", state, options=options)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=options)
    own = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and is_own(path)]
    assert {path.name for path in own} == {MANIFEST, DIGESTS}
    assert written_to(tmp_path / "b") < 0.01 * elements.nbytes
    assert xckpt.open(tmp_path / "b").verify() == []


def test_a_document_that_was_edited_is_written_anew(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    documents = [path.relative_to(tmp_path / "a") for path in tmp_path.rglob("zarr.json")]
    assert len(documents) == 8
    edited = documents[::2]
    for document in edited:
        path = tmp_path / "a" / document
        path.write_bytes(path.read_bytes().replace(b"zarr", b"ZARR"))
    assert len(xckpt.open(tmp_path / "a").verify()) == len(edited)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    assert {each for each in documents if is_own(tmp_path / "b" / each)} == set(edited)
    check(tmp_path / "b", state)


def test_what_goes_with_shared_chunks_is_synced_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zarr.json takes two calls where it is synced by itself."""
    if not syncs_at_once(tmp_path):
        pytest.skip("the system syncs no file system in one call")
    state = {f"w{number}": np.full(9, number) for number in range(40)}
    xckpt.save(tmp_path / "a", state)
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    assert not [path for path in synced if path.endswith(("/zarr.json", "/zarr.json.__lock"))]
    assert len(synced) < 2 * len(state), synced
    assert xckpt.open(tmp_path / "b").verify() == []


def test_an_adapter_beside_a_frozen_model(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    base = {"layer": {"w": random.standard_normal((1024, 2048), np.float32)}}
    lora = {name: random.standard_normal((2048, 8), np.float32) for name in "ab"}
    xckpt.save(tmp_path / "a", {"model": base, "lora": lora})
    trained = {name: array + 1 for name, array in lora.items()}
    xckpt.save(tmp_path / "b", {"model": base, "lora": trained}, base=tmp_path / "a")
    trainable = sum(array.nbytes for array in trained.values())
    assert trainable <= written_to(tmp_path / "b") < trainable + 0.01 * base["layer"]["w"].nbytes


def test_a_base_is_replaced_by_what_shares_with_it(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    kept = inodes(tmp_path / "a")["big/c/0"]
    state["b"] = np.arange(5, 10, dtype=np.int16)
    xckpt.save(tmp_path / "a", state, base=tmp_path / "a", overwrite=True)
    check(tmp_path / "a", state)
    assert inodes(tmp_path / "a")["big/c/0"] == kept
    assert {path.name for path in tmp_path.iterdir()} == {"a"}


def test_no_write_goes_through_a_shared_file(tmp_path: Path) -> None:
    """Whatever is done to one checkpoint, the other's files stay byte for byte."""
    state = a_state()
    xckpt.save(tmp_path / "a", state, options=SMALL)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=SMALL)
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    other = {name: np.zeros_like(value) for name, value in state.items() if name in ("w", "big")}
    xckpt.save(tmp_path / "b", other, base=tmp_path / "a", overwrite=True, options=SMALL)
    xckpt.save(tmp_path / "b", state, overwrite=True, options=SMALL)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "b", overwrite=True, options=SMALL)
    xckpt.copy(tmp_path / "b", tmp_path / "c")
    xckpt.delete(tmp_path / "b")
    assert all(path.read_bytes() == content for path, content in before.items())
    check(tmp_path / "a", state)


def test_other_shards_keep_the_grid_where_it_fits(tmp_path: Path) -> None:
    weights = np.arange(4096.0).reshape(64, 64)
    xckpt.save(tmp_path / "a", {"w": weights}, options=SaveOptions(chunk_bytes=8192))
    other = SaveOptions(chunk_bytes=1 << 20)
    saved = xckpt.save(tmp_path / "b", {"w": weights}, base=tmp_path / "a", options=other)
    leaf = saved["w"]
    assert isinstance(leaf, TensorStorageMetadata) and leaf.grid is not None
    assert leaf.grid.chunks.tolist() == [[16, 64]]
    assert len(shared(tmp_path / "a", tmp_path / "b")) == 4


def test_other_dtypes_and_shapes_are_written(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": np.zeros(8, np.int32), "v": np.zeros((2, 4))})
    other = {"w": np.zeros(8, np.uint32), "v": np.zeros((4, 2))}
    xckpt.save(tmp_path / "b", other, base=tmp_path / "a")
    assert not shared(tmp_path / "a", tmp_path / "b")
    assert xckpt.open(tmp_path / "b").verify() == []


def spoil_chunk(base: Path) -> None:
    chunk = base / "big/c/0"
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)


def link_chunk(base: Path) -> None:
    (base / "big/c/0").rename(base / "elsewhere")
    (base / "big/c/0").symlink_to(base / "elsewhere")


def cut_chunk(base: Path) -> None:
    os.truncate(base / "big/c/0", 1000)


def spoil_digests(base: Path) -> None:
    content = bytearray((base / DIGESTS).read_bytes())
    content[-1] ^= 1
    (base / DIGESTS).write_bytes(content)


def spoil_manifest(base: Path) -> None:
    manifest = base / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"float64"', b'"float32"'))


def make_newer(base: Path) -> None:
    manifest = base / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":2'))


def remove_digests(base: Path) -> None:
    (base / DIGESTS).unlink()


def remove_chunk(base: Path) -> None:
    (base / "big/c/0").unlink()


FAULTS = [
    (cut_chunk, "1,000 bytes long instead of"),
    (link_chunk, "not a plain file"),
    (remove_chunk, "No such file"),
    (spoil_digests, "xckpt.digests: altered"),
    (remove_digests, "xckpt.digests: missing"),
    (spoil_manifest, "/a: the manifest"),
    (make_newer, "version 2"),
]


@pytest.mark.parametrize(("damage", "said"), FAULTS)
def test_a_damaged_base_is_not_shared(
    damage: Callable[[Path], None], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    damage(tmp_path / "a")
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    check(tmp_path / "b", state)
    assert "big/c/0" not in shared(tmp_path / "a", tmp_path / "b")
    assert said in caplog.text


def test_a_damaged_chunk_is_found_where_the_base_is_verified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    spoil_chunk(tmp_path / "a")
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=SaveOptions(verify_base=True))
    check(tmp_path / "b", state)
    assert "big: the base's chunk [0, 200000) is damaged; it is written anew" in caplog.text
    assert "w/c/0/0" in shared(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("pack_bytes", [0, 1 << 20])
def test_the_name_of_a_damaged_chunk_is_logged_without_control_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pack_bytes: int
) -> None:
    state, red = {"\x1b[31m": np.ones(9)}, SaveOptions(pack_bytes=pack_bytes, verify_base=True)
    xckpt.save(tmp_path / "a", state, options=red)
    (chunk,) = (each for each in (tmp_path / "a").rglob("*") if b"\0\0\xf0?" in contents_of(each))
    chunk.write_bytes(chunk.read_bytes().replace(b"\xf0?", b"\xf0>", 1))
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=red)
    assert "\\x1b[31m: the base's" in caplog.text and "\x1b" not in caplog.text


def contents_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def clones(folder: Path) -> bool:
    """Whether files in a folder may share their blocks."""
    one, other = folder / "one", folder / "other"
    one.write_bytes(b"some")
    try:
        with one.open("rb") as source, other.open("wb") as copy:
            fcntl.ioctl(copy, FICLONE, source.fileno())
    except OSError:
        return False
    return True


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_what_cannot_be_linked_is_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    state = a_state()
    xckpt.save(tmp_path / "a", state)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "xckpt"):
        patch.setattr(os, "link", refuse)
        xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    check(tmp_path / "b", state)
    assert not shared(tmp_path / "a", tmp_path / "b")
    # Where the file system shares blocks, nothing is written all the same.
    assert (os.strerror(code) in caplog.text) == (not clones(tmp_path))


def test_another_file_system(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        tmp_path.joinpath("none").mkdir()  # one file system: nothing to show
        return
    state, base = a_state(), memory / f"xckpt-base-{os.getpid()}"
    try:
        xckpt.save(base, state)
        with caplog.at_level(logging.INFO, "xckpt"):
            xckpt.save(tmp_path / "b", state, base=base)
        check(tmp_path / "b", state)
        assert os.strerror(errno.EXDEV) in caplog.text
    finally:
        shutil.rmtree(base)


def test_no_base_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(xckpt.NotACheckpointError, match=r"base: .*nowhere"):
        xckpt.save(tmp_path / "b", {"w": np.zeros(3)}, base=tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
    xckpt.save(tmp_path / "b", {"w": np.zeros(3)}, base=OptionalBase(str(tmp_path / "nowhere")))
    with pytest.raises(TypeError, match="base= takes the path of a checkpoint, not an int"):
        xckpt.save(tmp_path / "c", {"w": np.zeros(3)}, base=3)  # type: ignore[arg-type]


def test_other_codecs_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, options, said = a_state(), SaveOptions(crc32c=True), "other codecs"
    xckpt.save(tmp_path / "a", state)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=options)
    check(tmp_path / "b", state)
    assert not shared(tmp_path / "a", tmp_path / "b") and said in caplog.text
    xckpt.save(tmp_path / "c", state, base=tmp_path / "b")
    check(tmp_path / "c", state)
    both = shared(tmp_path / "b", tmp_path / "c")
    assert not both & {"w/c/0/0", "big/c/0"}


def test_memory_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": np.arange(4.0)}
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save("memory://base-of-a-delta", state)
        xckpt.save("memory://delta", state, base="memory://base-of-a-delta")
    assert "only files of one disk, or objects of one bucket, can be shared" in caplog.text
    with pytest.raises(xckpt.NotACheckpointError, match="base: memory://no-base"):
        xckpt.save("memory://delta-2", state, base="memory://no-base")


def test_a_background_save_and_a_state_dict(tmp_path: Path) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)
    xckpt.save_async(tmp_path / "b", state, base=tmp_path / "a").result()
    writer = xckpt.storage.ZarrStorageWriter(tmp_path / "c", base=tmp_path / "b")
    xckpt.save_state_dict(state, writer)
    for other in "bc":
        check(tmp_path / other, state)
        assert "w/c/0/0" in shared(tmp_path / "a", tmp_path / other)
    assert writer.shared_bytes == sum(np.asarray(state[n]).nbytes for n in ("w", "big", "b")) + 6


def test_metrics_say_what_was_shared(tmp_path: Path) -> None:
    taken: list[xckpt.Metrics] = []
    state = {"w": np.zeros(6, np.uint8), "v": np.zeros(2, np.uint8)}
    xckpt.save(tmp_path / "a", state)
    state["v"] += 1
    xckpt.save(
        tmp_path / "b", state, base=tmp_path / "a", options=SaveOptions(metrics=taken.append)
    )
    assert (taken[0].bytes, taken[0].shared) == (8, 6)
    assert "wrote 0.00 MiB, 75.0% of it shared, in" in taken[0].line()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_base_that_goes_away_meanwhile(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted, or another checkpoint takes its place, while files are shared."""
    state, share = a_state(), BaseChunks.share
    xckpt.save(tmp_path / "a", state, options=SMALL)
    other = {**state, "w": np.asarray(state["w"]) + 1}
    calls: list[str] = []

    def share_late(self: BaseChunks, *arguments: Any, **more: Any) -> str:
        if not calls:
            if replaced:
                xckpt.save(tmp_path / "a", other, overwrite=True, options=SMALL)
            else:
                xckpt.delete(tmp_path / "a")
        calls.append(share(self, *arguments, **more))
        return calls[-1]

    monkeypatch.setattr(BaseChunks, "share", share_late)
    alone = SaveOptions(chunk_bytes=SMALL.chunk_bytes, pack_bytes=0, threads=1)
    xckpt.save(tmp_path / "b", state, base=tmp_path / "a", options=alone)
    check(tmp_path / "b", state)
    assert any(calls), "some chunk could not be shared"


def test_a_base_that_is_deleted_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = a_state()
    xckpt.save(tmp_path / "a", state)

    def read(location: Location) -> bytes:
        manifest = read_manifest(location)
        xckpt.delete(tmp_path / "a")
        return manifest

    monkeypatch.setattr("xckpt.storage.base.base.read_manifest", read)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    check(tmp_path / "b", state)
    assert "replaced or deleted meanwhile" in caplog.text


def test_a_base_that_was_replaced_before_a_rank_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, orders = a_state(), Base.orders
    xckpt.save(tmp_path / "a", state)

    def orders_early(self: Base, given: Any) -> Any:
        made = orders(self, given)
        changed = {**state, "big": np.asarray(state["big"]) + 1}
        xckpt.save(tmp_path / "a", changed, overwrite=True)
        return made

    monkeypatch.setattr(Base, "orders", orders_early)
    with caplog.at_level(logging.INFO, "xckpt"):
        xckpt.save(tmp_path / "b", state, base=tmp_path / "a")
    check(tmp_path / "b", state)
    assert not shared(tmp_path / "a", tmp_path / "b") and "replaced meanwhile" in caplog.text
