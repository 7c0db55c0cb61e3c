"""Files read by range: an object answers as the local file of the same bytes does."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.storage.foreign import files
from xckpt.storage.foreign.documents import read_whole
from xckpt.storage.foreign.files import OpenFile, StoredFile, open_file
from xckpt.storage.foreign.paths import StoredPath, find_path
from xckpt.storage.foreign.versions import state_of
from xckpt.storage.location import Location, open_store

SIZES = st.integers(0, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def both(folder: Path, content: bytes) -> tuple[OpenFile, StoredFile]:
    """A local file and an object of the same bytes."""
    (folder / "file").write_bytes(content)
    open_store(Location.parse("memory://files-both")).write("file", content).result()
    local, stored = open_file(folder / "file"), open_file(find_path("memory://files-both/file"))
    assert isinstance(local, OpenFile) and isinstance(stored, StoredFile)
    return local, stored


@given(SIZES, st.integers(0, 700))
def test_an_object_ends_where_its_contents_say(folder: Path, size: int, stated: int) -> None:
    local, stored = both(folder, bytes(size))
    assert local.size(lambda: stated) == stored.size(lambda: size) == size
    if stated != size:
        how = "goes on after" if stated < size else "is truncated: it ends before"
        with pytest.raises(xckpt.CorruptCheckpointError, match=rf"file {how} byte {stated:,}"):
            stored.size(lambda: stated)


@given(st.binary(max_size=200), st.lists(st.tuples(SIZES, SIZES)), st.integers(1, 250))
def test_what_is_read(
    folder: Path, content: bytes, ranges: list[tuple[int, int]], count: int
) -> None:
    ranges = [(low, min(high, len(content))) for low, high in ranges if low <= len(content)]
    ranges = [(min(low, high), high) for low, high in ranges]
    for file in both(folder, content):
        assert file.fetch(ranges) == [content[low:high] for low, high in ranges]
        assert (file.head(count), file.tail(count)) == (content[:count], content[-count:])
        assert file.whole(count) == (None if len(content) > count else content)
        with pytest.raises(xckpt.CorruptCheckpointError, match="truncated: it ends within bytes"):
            file.fetch([(0, 0), (len(content), len(content) + 1)])


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_many_requests_fill_one_buffer(folder: Path, start: int, count: int, most: int) -> None:
    content = bytes(range(60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "REQUEST_BYTES", most)
        for file in both(folder, content):
            into = np.full(count, 0xA5, np.uint8)
            if start + count > 60:
                with pytest.raises(xckpt.CorruptCheckpointError, match=r"file is truncated"):
                    file.read_into(start, into.data)
            else:
                file.read_into(start, into.data)
                assert into.tobytes() == content[start : start + count]


def test_one_call_need_not_move_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves 2 GiB at most."""
    content, pread = bytes(range(10)), os.pread
    (tmp_path / "file").write_bytes(content)
    file = OpenFile(tmp_path / "file")

    def short(descriptor: int, count: int, position: int) -> bytes:
        return pread(descriptor, min(count, 3), position)

    monkeypatch.setattr(files.os, "pread", short)
    assert file.whole(10) == content and file.fetch([(1, 9)]) == [content[1:9]]
    assert (file.head(7), file.tail(20)) == (content[:7], content)
    file.close()


def test_an_object_that_is_not_there() -> None:
    path = find_path("memory://files-none/file")
    assert isinstance(path, StoredPath) and state_of(path) == b""
    for call in (lambda f: f.head(1), lambda f: f.size(lambda: 7), lambda f: f.fetch([(0, 1)])):
        with pytest.raises(xckpt.CorruptCheckpointError, match="memory://files-none/file is miss"):
            call(open_file(path))
    with pytest.raises(xckpt.StorageError, match="is not a plain file"):
        read_whole(path, 10)


def test_an_object_that_is_written_anew_is_another() -> None:
    """Its generation was remembered, so that a load of DCP or Orbax did not notice it."""
    place, path = Location.parse("memory://files-anew"), find_path("memory://files-anew/file")
    states: list[bytes] = []
    for text in (b"one", b"two"):
        open_store(place).write("file", text).result()
        states += [state_of(path), state_of(path)]
    assert states[0] == states[1] != states[2] == states[3]


def test_what_changes_is_another(folder: Path) -> None:
    states = {bytes(both(folder, content)[1].state()) for content in (b"a", b"b", b"a")}
    assert len(states) == 3
    with pytest.raises(xckpt.StorageError, match="longer than the 2 bytes that are read"):
        read_whole(both(folder, b"abc")[1].path, 2)
