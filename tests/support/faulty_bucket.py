"""A server between TensorStore and a bucket's that spoils some of the requests.

`FaultyBucket` passes each request on to the bucket's own server, unless its `fault` says otherwise:
a function from a `Request` to what happens to it, or None.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_server import EndingServer

CONDITIONS = ("if-match", "if-none-match", "ifGenerationMatch")


@dataclass(frozen=True)
class Request:
    """What TensorStore asks."""

    method: str
    path: str
    """Without the query, as text."""
    conditional: bool
    """Whether it is to be done on a condition only."""
    listing: bool
    content: bytes = b""
    source: str = ""
    """The bucket's object that is to be copied, if it is."""

    @property
    def writes(self) -> bool:
        """Whether it puts an object."""
        return self.method in ("PUT", "POST") and not self.deletes

    @property
    def deletes(self) -> bool:
        """Whether it removes an object, or many."""
        return self.method == "DELETE" or self.content.startswith(b"<Delete ")


@dataclass(frozen=True)
class Answer:
    """An answer that the bucket's own server never gave."""

    status: int
    code: str = ""
    """S3's name of the error."""
    headers: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def content(self) -> bytes:
        if not self.code:
            return b""
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code>'
            f"<Message>{self.code}</Message></Error>"
        ).encode()

    @property
    def google(self) -> bytes:
        """What Google's storage says instead."""
        error = {"code": self.status, "message": self.code, "errors": [{"reason": self.code}]}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True)
class Silence:
    """The request is accepted and not answered, for some seconds or for ever."""

    seconds: float = 1e9
    done: bool = False
    """Whether the request is carried out before."""


@dataclass(frozen=True)
class Reset:
    """The connection is cut."""

    done: bool = False
    """Whether the request is carried out before."""
    after: int = 0
    """Bytes of the answer that come before."""


@dataclass(frozen=True)
class Trickle:
    """The answer comes at some bytes a second."""

    rate: int


@dataclass(frozen=True)
class Altered:
    """What is asked is done, and the answer is another one."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    whole: bool = False
    """Whether it has all of the object where a range was asked for."""
    status: int = 0
    content: Callable[[bytes], bytes] | None = None
    """Makes its content of the true one; its length is said as it is."""
    length: int | None = None
    """Another length that is said; the connection is closed after it."""


Fault: TypeAlias = "Answer | Silence | Reset | Trickle | Altered | None"
Faults: TypeAlias = Callable[[Request], Fault]


def never(request: Request) -> Fault:
    """No request is spoilt."""
    return None


class FaultyBucket(EndingServer):
    """The server in between."""

    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(upstream).netloc
        self.fault: Faults = never
        self.url = ""
        """The bucket's, for users."""
        self.name = ""
        """A name for the test."""
        self.dropped: tuple[str, ...] = ()
        """Headers that do not reach the bucket's own server, in lower case."""
        self.seen: list[Request] = []
        """All requests, in the order in which they came."""
        self.released = threading.Event()
        """Set when silent answers are to end."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections end early here; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server: FaultyBucket  # type: ignore[assignment]

    def handle_expect_100(self) -> bool:
        """Ask for the content at once: a client waits for that, a second at most."""
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        conditional = any(name in self.headers or name in query for name in CONDITIONS)
        listing = self.command == "GET" and ("list-type" in query or url.path.endswith("/o"))
        named = query.get("name", [""])[0]
        path = unquote(url.path) + (f"/{named}" if named else "")
        copied = (self.headers.get(f"x-{cloud}-copy-source") for cloud in ("amz", "goog"))
        source = unquote(next(filter(None, copied), "")).partition("/")[2]
        request = Request(self.command, path, conditional, listing, content, source)
        self.server.seen.append(request)
        fault = self.server.fault(request)
        if isinstance(fault, Silence) and not fault.done:
            self.server.released.wait(fault.seconds)
            if self.server.released.is_set():
                self.close_connection = True
                return
        if isinstance(fault, Answer):
            google = url.path.startswith(("/storage/", "/upload/"))
            content = fault.google if google and fault.code else fault.content
            self._answer(fault.status, fault.headers, content)
        elif isinstance(fault, Reset) and not fault.done:
            self._cut()
        else:
            self._pass_on(content, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _pass_on(self, content: bytes, fault: Fault) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        with contextlib.closing(upstream):
            whole = {"range"} if isinstance(fault, Altered) and fault.whole else set[str]()
            dropped = whole.union(self.server.dropped)
            passed = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            upstream.request(self.command, self.path, content or None, passed)
            answer = upstream.getresponse()
            data = answer.read()
        if isinstance(fault, Silence) and fault.done:
            self.server.released.wait(fault.seconds)
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "date", "server")
        }
        if isinstance(fault, Reset):
            if fault.after:
                self._head(answer.status, kept, len(data))
                self.wfile.write(data[: fault.after])
                self.wfile.flush()
            self._cut()
        elif isinstance(fault, Trickle):
            self._head(answer.status, kept, len(data))
            step = max(1, fault.rate // 20)
            for start in range(0, len(data), step):
                self.wfile.write(data[start : start + step])
                self.wfile.flush()
                time.sleep(0.05)
        else:
            self._answer(*_altered(fault, answer.status, kept, data))
            self.close_connection |= isinstance(fault, Altered) and fault.length is not None

    def _answer(
        self, status: int, headers: dict[str, str], content: bytes, length: int | None = None
    ) -> None:
        self._head(status, headers, len(content) if length is None else length)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        headers = {name: v for name, v in headers.items() if name.lower() != "content-length"} | (
            {name: v for name, v in headers.items() if name.lower() == "content-length"}
            if self.command == "HEAD"
            else {"Content-Length": str(length)}
        )
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command == "HEAD" and "Content-Length" not in headers:
            self.send_header("Content-Length", "0")
        self.end_headers()

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _altered(
    fault: Fault, status: int, headers: dict[str, str], content: bytes
) -> tuple[int, dict[str, str], bytes, int | None]:
    """The answer that a fault makes of another one."""
    if not isinstance(fault, Altered):
        return status, headers, content, None
    replaced = {name.lower() for name in fault.headers}
    headers = {n: v for n, v in headers.items() if n.lower() not in replaced} | fault.headers
    made = content if fault.content is None else fault.content(content)
    return fault.status or status, headers, made, fault.length


@contextlib.contextmanager
def in_front_of(upstream: str) -> Iterator[FaultyBucket]:
    """A server that passes requests on to another one, for as long as the block lasts."""
    server = FaultyBucket(upstream)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
