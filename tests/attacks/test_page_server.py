"""The server of `xckpt view` under attack: it goes on to answer its own page."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import xckpt
from xckpt.viewer.server import PageServer

pytestmark = pytest.mark.thorough

HOST = "127.0.0.1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    xckpt.save(tmp_path / "ckpt", {"w": np.arange(64.0).reshape(8, 8)})
    made = PageServer(xckpt.view(tmp_path / "ckpt"))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def said_to(server: PageServer, content: bytes) -> bytes:
    """What is answered to some bytes, as far as it comes at once."""
    with socket.create_connection((HOST, server.server_port), 5) as peer:
        peer.settimeout(0.3)
        with contextlib.suppress(OSError):
            peer.sendall(content)
        with contextlib.suppress(OSError):
            return peer.recv(1 << 16)
    return b""


def is_up(server: PageServer) -> bool:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        return answer.status == 200 and b"<html" in answer.read().lower()


REQUESTS = {
    "half a request": b"GET / HT",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: evil\r\nHost: 127.0.0.1\r\n\r\n",
    "random bytes": np.random.default_rng(1).bytes(5000),
    "a long line": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
    "no token": b"GET // HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a token that is not text": b"GET /\xff\xfe/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a NUL": b"GET /\0/x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a path upward": b"GET /../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a body without end": b"GET / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 5000,
}


@pytest.mark.parametrize("what", REQUESTS)
def test_a_request_that_makes_no_sense(
    server: PageServer, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = said_to(server, REQUESTS[what])
    assert b" 200 " not in answer.partition(b"\r\n")[0] and b"root:" not in answer
    assert server.token.encode() not in answer
    assert is_up(server)
    assert "Traceback" not in capfd.readouterr().err


QUERIES = (
    "values?leaf=0&down=0&across=1&at=" + "0," * 100_000,
    "values?leaf=99999999999999999999999999&down=0&across=1",
    "values?leaf=-1&down=-5&across=7&at=-1",
    "values?leaf=0&down=0&across=0&at=999999999999",
    "values?leaf=" + "9" * 5000,
    "plan?mesh=" + "x%20" * 10_000,
    "diff?other=" + "%00",
    "diff?other=memory%3A%2F%2F",
)


@pytest.mark.parametrize("number", range(len(QUERIES)))
def test_a_question_that_is_absurd(
    server: PageServer, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = f"/{server.token}/{QUERIES[number]}&token={server.token}"
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n"
    said_to(server, request.encode())
    assert is_up(server)
    assert "Traceback" not in capfd.readouterr().err


def test_many_silent_connections(server: PageServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((HOST, server.server_port), 5))
        assert is_up(server)
