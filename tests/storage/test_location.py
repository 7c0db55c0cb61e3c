"""What people may write as a path, and where it leads."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

import xckpt
from tests.support.schedules import at_once
from xckpt.storage import location
from xckpt.storage.location import Location


@pytest.mark.parametrize(
    "text, expected",
    [
        ("/data/ckpt", Location("file", "/data/ckpt")),
        ("/data//x/../ckpt/", Location("file", "/data/ckpt")),
        ("file:///data/ckpt", Location("file", "/data/ckpt")),
        ("//data/ckpt", Location("file", "/data/ckpt")),
        ("file://localhost/data/ckpt", Location("file", "/data/ckpt")),
        ("file:///data/a%20b%23c", Location("file", "/data/a b#c")),
        ("file:///data/a?b#c", Location("file", "/data/a?b#c")),
        ("memory://run/7/", Location("memory", "run/7")),
        ("memory://a?b#c%20", Location("memory", "a?b#c%20")),
        ("s3://bucket", Location("s3", "", "bucket")),
        ("s3://bucket/run/7/", Location("s3", "run/7", "bucket")),
        ("s3://bucket/a?b#c%20", Location("s3", "a?b#c%20", "bucket")),
        ("gs://bucket/run", Location("gcs", "run", "bucket")),
    ],
)
def test_parse(text: str, expected: Location) -> None:
    assert Location.parse(text) == expected


def test_relative_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Location.parse("a/../b").path == str(tmp_path / "b")
    assert Location.parse(Path("b")).path == str(tmp_path / "b")
    assert Location.parse("~/b").path == str(tmp_path / "home" / "b")
    assert Location.parse("./s3:/b").path == str(tmp_path / "s3:" / "b")
    assert Location.parse("a/s3://b").path == str(tmp_path / "a" / "s3:" / "b")


@pytest.mark.parametrize("text", ["/a b/ü#?%20", "/data/ckpt"])
def test_file_urls_of_pathlib_lead_back(text: str) -> None:
    assert Location.parse(Path(text).as_uri()).folder == Path(text)


@pytest.mark.parametrize(
    "text", ["/data/ckpt", "memory://run/7", "s3://bucket/run", "s3://bucket", "gs://bucket/run"]
)
def test_a_location_is_written_as_it_was_given(text: str) -> None:
    assert str(Location.parse(text)) == text
    assert Location.parse(text).child("xckpt.json") == f"{text}/xckpt.json"
    assert Location.parse(text).within("") == Location.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the path is empty"),
        ("http://host/ckpt", "'http' is not supported"),
        ("S3://bucket/ckpt", "'S3' is not supported"),
        ("hf://meta/llama", "'hf' is not supported; download it and give a local path"),
        ("s3:/bucket/ckpt", "a URL has two slashes"),
        ("gs:bucket/ckpt", "a URL has two slashes"),
        ("://x", "'' is not supported"),
        ("s3://", "no bucket is named"),
        ("s3:///run", "no bucket is named"),
        ("gs:///run", "no bucket is named"),
        ("file://ckpt/run", "three slashes"),
        ("file://", "three slashes"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        xckpt.load,
        xckpt.open,
        lambda path: xckpt.save(path, {}),
        lambda path: xckpt.save_async(path, {}).result(),
    ],
)
def test_unusable_paths_are_refused(text: str, message: str, call) -> None:
    with pytest.raises(xckpt.PathError, match=message) as raised:
        call(text)
    assert isinstance(raised.value, ValueError)  # as other arguments that make no sense


@pytest.mark.parametrize("path", [b"/data/ckpt", 3, None, {"w": np.zeros(1)}, ["a"]])
@pytest.mark.parametrize(
    "call",
    [xckpt.load, xckpt.open, lambda path: xckpt.save(path, {}), lambda p: xckpt.load_into(p, {})],
)
def test_what_is_no_path_is_a_type_error(path: object, call) -> None:
    with pytest.raises(TypeError, match="the first argument is the path"):
        call(path)


def test_a_path_like_of_bytes_is_a_type_error() -> None:
    class Bytes(os.PathLike):
        def __fspath__(self) -> bytes:
            return b"/data/ckpt"

    with pytest.raises(TypeError, match="PathLike of str"):
        xckpt.load(Bytes())


def test_the_root_of_the_file_system_is_a_folder_and_no_place_for_a_checkpoint() -> None:
    """A save took it for empty, and left what it wrote there as it failed."""
    with pytest.raises(xckpt.NotACheckpointError, match=r"^/ holds no committed checkpoint: there"):
        xckpt.open("/")
    with pytest.raises(xckpt.PathError, match="give a folder below it"):
        xckpt.save("/", {})


def test_swapped_arguments_name_the_right_call(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"got a dict: call save\(path, state\)"):
        xckpt.save({"w": np.zeros(1)}, tmp_path / "ckpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a dict: call load\(path, like\)"):
        xckpt.load({"w": np.zeros(1)}, tmp_path / "ckpt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got a dict: call load_into\(path, state\)"):
        xckpt.load_into({"w": np.zeros(1)}, tmp_path / "ckpt")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "100%",
        "a%20b",
        "naïve-模型",
        "模" * 80,
        "a" * 255,
        "#?&=+,;",
        "'\"`$(id)",
        "[a]*",
        "-rf",
        "...",
        "xckpt.json",
        "zarr.json",
        "\n\t",
    ],
)
def test_folders_with_odd_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    xckpt.save(path, {"w": np.arange(4)})
    xckpt.save(path, {"w": np.arange(5)}, overwrite=True)
    loaded = xckpt.load(path)
    assert isinstance(loaded, dict) and loaded["w"].tolist() == [0, 1, 2, 3, 4]
    assert xckpt.open(path.as_uri()).verify() == []
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a" * 256, "nul\0", "back\\slash", "\udcff"])
def test_folders_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(xckpt.StorageError):
        xckpt.save(tmp_path / name, {})
    with pytest.raises(xckpt.StorageError):
        xckpt.load(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


ASCII = """
import os, sys
import xckpt
from xckpt.convert import convert
top = sys.argv[1]
assert sys.getfilesystemencoding() == "ascii"
xckpt.save(f"{top}/plain", {"w\\u00fc": 1})
assert xckpt.load(f"{top}/plain") == {"w\\u00fc": 1}
for name in ("caf\\u00e9", "caf\\udcc3\\udca9"):  # as Python spells it, and as an argument
    path = f"{top}/{name}"
    for call in (
        lambda: xckpt.save(path, {"w": 1}),
        lambda: xckpt.load(path),
        lambda: xckpt.copy(f"{top}/plain", path),
        lambda: convert(f"{top}/plain", path, format="safetensors"),
        lambda: xckpt.CheckpointManager(path),
    ):
        try:
            call()
        except xckpt.StorageError as error:
            assert "names files in ascii" in str(error) and "PYTHONUTF8=1" in str(error)
        else:
            sys.exit(f"{name!a} was taken")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name files in UTF-8 always")
def test_names_that_the_locale_cannot_spell_are_refused(tmp_path: Path) -> None:
    says = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", ASCII, str(tmp_path)]
    subprocess.run(command, env={**os.environ, **says}, check=True, timeout=60)
    assert os.listdir(tmp_path) == ["plain"]


def test_the_first_calls_of_two_threads_share_what_is_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one of them saves to a memory that no later call sees, or takes its save for lost."""
    make = ts.Context

    def slowly(*about: Any) -> ts.Context:
        time.sleep(0.1)
        return make(*about)

    for name in ("_base", "_context"):  # as in a new process
        monkeypatch.setattr(location, name, functools.cache(getattr(location, name).__wrapped__))
    monkeypatch.setattr(ts, "Context", slowly)
    at_once(*(partial(xckpt.save, f"memory://first/{n}", {"n": n}) for n in range(2)))
    assert [xckpt.load(f"memory://first/{n}") for n in range(2)] == [{"n": 0}, {"n": 1}]


def test_a_signal_may_come_while_the_first_context_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may save, too, in the thread that waits for the context."""
    make, handled = ts.Context, list[ts.Context]()

    def interrupted(*about: Any) -> ts.Context:
        if not handled:
            handled.append(make())
            handled.append(location.context())
        return make(*about)

    for name in ("_base", "_context"):
        monkeypatch.setattr(location, name, functools.cache(getattr(location, name).__wrapped__))
    monkeypatch.setattr(ts, "Context", interrupted)
    thread = threading.Thread(target=location.context, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for itself"
