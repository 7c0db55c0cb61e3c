"""What a served page is about changes, vanishes, is large or silent, while it is looked at."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from tests.viewer.test_schema import in_page
from xckpt.cli.commands import commands
from xckpt.errors import StorageError
from xckpt.policies import EverySteps
from xckpt.storage.stored_array import StoredArray
from xckpt.viewer.server import PageServer

FIRST = {"w": np.zeros((4, 4)), "v": np.ones(3)}
SECOND = {"v": np.full(3, 2.0), "w": np.ones((4, 4)), "new": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "ckpt", FIRST)
    return tmp_path / "ckpt"


@pytest.fixture
def server(path: Path) -> Iterator[PageServer]:
    with PageServer(xckpt.view(path)) as server:
        yield server


def ask(server: PageServer, question: str) -> tuple[int, Any]:
    status, kind, content = server.answer(f"/{server.token}/{question}")
    return status, json.loads(content) if "json" in kind else content


def opened(server: PageServer, below: str = "") -> Any:
    """The JSON of a page that is opened now."""
    status, html = ask(server, below)
    assert status == 200, html
    return in_page(html)


def values(page: Any, leaf: int, axes: str) -> str:
    return f"values?leaf={leaf}&{axes}&token={page['token']}"


W = "down=0&across=1&at=0,0"


def test_a_page_that_is_opened_again_shows_what_is_there_now(
    server: PageServer, path: Path
) -> None:
    before = opened(server)
    assert opened(server)["token"] == before["token"]
    xckpt.save(path, SECOND, overwrite=True)
    # The older page says so, and does not show the values of another leaf.
    status, text = ask(server, values(before, 0, W))
    assert (status, "replaced" in text, "reload the page" in text) == (409, True, True)
    after = opened(server)
    assert after["checkpoint"]["names"] == ["v", "w", "new"]
    assert ask(server, values(after, 1, W))[1]["mean"] == 1.0
    status, text = ask(server, values(before, 0, W))
    assert (status, "reload the page" in text) == (409, True)


def test_a_checkpoint_vanishes_and_comes_again(server: PageServer, path: Path) -> None:
    before = opened(server)
    shutil.rmtree(path)
    assert ask(server, values(before, 0, W))[0] == 409
    status, text = ask(server, "")
    assert (status, "holds no committed checkpoint" in text) == (400, True)
    xckpt.save(path, SECOND)
    assert opened(server)["checkpoint"]["names"] == ["v", "w", "new"]


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with xckpt.CheckpointManager(root, save=[EverySteps(1)]) as run:
        run.save(1, FIRST)
        run.wait()
        with PageServer(xckpt.view(root)) as server:
            assert len(opened(server)["run"]) == 1
            step = opened(server, "steps/step-00000001/")
            run.save(2, SECOND)
            run.wait()
            assert [each["number"] for each in opened(server)["run"]] == [1, 2]
            # The page of a step stays what it is.
            assert ask(server, f"steps/step-00000001/{values(step, 0, W)}")[0] == 200
            shutil.rmtree(root / "step-00000001")
            assert ask(server, "steps/step-00000001/")[0] == 400
            assert [each["number"] for each in opened(server)["run"]] == [2]


def test_many_browsers_at_once(server: PageServer) -> None:
    """Each has its own answer, while pages are opened again."""
    questions = [*["", "values?leaf=0&" + W, "values?leaf=1&down=-1&across=0&at=0"] * 20]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: ask(server, each), questions))
    assert {status for status, _ in answers} == {200}
    assert {each["count"] for _, each in answers[1::3]} == {16}
    assert {each["count"] for _, each in answers[2::3]} == {3}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts what a process reads")
def test_a_slice_of_a_large_leaf_reads_little(tmp_path: Path) -> None:
    """A leaf of 5 GiB, a file with holes: a plane is read up to `MOST_ELEMENTS`."""
    header = {"w": {"dtype": "F32", "shape": [1280, 1024, 1024], "data_offsets": [0, 5 << 30]}}
    text = json.dumps(header).encode()
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (5 << 30))
    with PageServer(xckpt.view(tmp_path / "large.safetensors")) as server:
        page = opened(server)
        assert page["checkpoint"]["kinds"][0]["bytes"] == 5 << 30
        read = bytes_read()
        status, found = ask(server, values(page, 0, "down=0&across=1&at=0,0,7"))
        assert (status, found["part"]) == (200, "the first 32 rows and 1,024 columns")
        status, found = ask(server, values(page, 0, "down=1&across=2&at=7,0,0"))
        assert (status, found["count"]) == (200, 1 << 20)
        assert bytes_read() - read < 160 << 20


def bytes_read() -> int:
    """What this process has asked its files for."""
    counts = Path("/proc/self/io").read_text(encoding="utf-8")
    return int(dict(line.split(": ") for line in counts.splitlines())["rchar"])


def test_a_silent_bucket_holds_up_one_question_alone(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And becomes an error in words, when its time is over."""
    asked, go_on = threading.Event(), threading.Event()
    read = StoredArray.__getitem__

    def silent(stored: StoredArray, key: Any) -> Any:
        if stored.name != "w":
            return read(stored, key)
        asked.set()
        assert go_on.wait(20)
        raise StorageError("s3://bucket did not answer within 60 s")

    monkeypatch.setattr(StoredArray, "__getitem__", silent)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, f"values?leaf=0&{W}")
        assert asked.wait(20)
        assert ask(server, "values?leaf=1&down=-1&across=0&at=0")[0] == 200
        go_on.set()
        assert waiting.result() == (500, "s3://bucket did not answer within 60 s")


def test_a_text_is_read_on_request(path: Path) -> None:
    state = {"notes": "line 1\nline \u202e2" * 5000, "raw": b"\x00" * 9000, "w": np.zeros(2)}
    xckpt.save(path, state, overwrite=True)
    with PageServer(xckpt.view(path)) as server:
        status, shown = ask(server, "text?leaf=0")
        assert (status, shown["text"][:19]) == (200, "line 1\nline \\u202e2")
        assert shown["characters"] > len(shown["text"]) == 1 << 16
        assert ask(server, "text?leaf=1")[1]["text"].startswith("b'\\x00")
        for wrong in ("leaf=2", "leaf=9", "leaf=-1", "leaf=x", ""):
            assert ask(server, f"text?{wrong}")[0] == 400


def test_a_port_that_is_taken(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(commands, ["view", str(path), "--port", port, "--no-browser"])
    assert done.exit_code == 2
    assert f"--port {port}: {os.strerror(errno.EADDRINUSE)}" in done.stderr


def test_an_interrupt_ends_it(path: Path) -> None:
    command = [sys.executable, "-m", "xckpt", "view", str(path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        url = process.stdout.readline().decode().split()[0]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == b""
