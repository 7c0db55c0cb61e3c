"""Paths in a store of objects: pathlib, on the same files, is the oracle."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import xckpt
from xckpt.storage.foreign.paths import StoredPath, entries_in, find_path
from xckpt.storage.location import Location, open_store

NAMES = ("a", "b", "a.b", "a-b", "a0", "é", "model.safetensors")
_numbers = itertools.count()

names = st.sampled_from(NAMES)
keys = st.lists(names, min_size=1, max_size=3).map("/".join)


def shown(path: Path | StoredPath) -> tuple[object, ...]:
    children = sorted(each.name for each in path.iterdir()) if path.is_dir() else None
    return path.name, path.exists(), path.is_file(), path.is_dir(), children


@given(st.sets(keys, max_size=8), st.lists(keys, max_size=8), st.data())
def test_they_are_what_pathlib_says(
    tmp_path_factory: pytest.TempPathFactory, files: set[str], asked: list[str], data: st.DataObject
) -> None:
    """Whatever is asked first: a listing answers for what is below it."""
    files = {key for key in files if not any(other.startswith(f"{key}/") for other in files)}
    local = tmp_path_factory.mktemp("files")
    url = f"memory://paths-{next(_numbers)}"
    store = open_store(Location.parse(url))
    for key in files:
        (local / key).parent.mkdir(parents=True, exist_ok=True)
        (local / key).write_bytes(b"content")
        store.write(key, b"content").result()
    stored = find_path(url)
    for key in [*asked, *data.draw(st.permutations(sorted(files)))]:
        assert shown(stored / key) == shown(local / key)
        assert shown((stored / key).parent)[1:] == shown((local / key).parent)[1:] or not files
    suffixes = data.draw(st.sets(st.sampled_from(["b", ".safetensors"]), max_size=2))
    found, expected = entries_in(stored, *suffixes), entries_in(local, *suffixes)
    assert [each.name for each in found] == [each.name for each in expected]


def test_a_path_is_its_url() -> None:
    for url in ("gs://bucket/a/b c", "s3://bucket", "memory://x"):
        assert str(find_path(url)) == url
        assert str(find_path(url) / "./d" / "e") == f"{url}/d/e"
        assert find_path(url) / "d" == find_path(f"{url}/d")
    assert find_path("file:///data/a%20b") == Path("/data/a b")


def test_what_cannot_be_one() -> None:
    for wrong in ("ftp://host/a", "s3://", ""):
        with pytest.raises(xckpt.StorageError):
            find_path(wrong)
    with pytest.raises(TypeError):
        find_path(7)  # pyright: ignore[reportArgumentType]
