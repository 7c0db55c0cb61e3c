"""A bucket by S3's interface, in memory, that notes when each request came and was answered.

1. `CountedBucket` answers each request after `delay` seconds, as a bucket does that is far away,
   and moves `rate` bytes a second in all, as one does whose network is full.
2. What it has seen is fetched over HTTP too (`SEEN`), so that it can run in a process of its own
   (``python -m tests.support.counted_bucket``) and takes no time from the client that is measured.
3. With `quiet` it answers in *rounds*: all requests under way together, once none has come for so
   many seconds. A request's round is how many it waited for, one after the other, and itself. So
   rounds count what waits for what, by the caller's order or its limits of memory and concurrency,
   and nothing that only takes time: a slow line, a busy processor.
4. `longest_chain` is the most requests that came one after the other in time. Each wait for an
   answer is in it, and so is what was sent late because others took the line or the processor: of
   many large objects it says more than the rounds, never less.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

import xxhash

if TYPE_CHECKING:
    import pytest

SEEN = "/-/seen"
"""What a GET of this path answers: all requests since the last one, as JSON."""
PAGE = 1000
"""Keys in an answer to a listing."""


@dataclass(frozen=True)
class SeenRequest:
    """A request, and how long it took."""

    method: str
    key: str
    """Without the bucket; the prefix of a listing."""
    listing: bool
    conditional: bool
    began: float
    """Seconds, when it had come."""
    ended: float
    """Seconds, before the answer went out."""
    sent: int
    """Bytes of the request's content."""
    answered: int
    """Bytes of the answer's."""
    copy: bool = False
    """Whether the bucket is to copy another object."""
    round: int = 0
    """In which round of the server it was answered; 0 if it has none."""

    @property
    def kind(self) -> str:
        """What it asks for: the method, and the last part of a name that checkpoints have."""
        name = self.key.rpartition("/")[2]
        if self.listing:
            return "LIST"
        if self.method == "POST":
            return "DELETE many"
        method = f"{self.method}-if" if self.conditional else self.method
        if name in ("xckpt.json", "xckpt.digests", "xckpt.saving", "places", "zarr.json"):
            return f"{method} {name}"
        if name.startswith("xckpt.trial-"):
            return f"{method} trial"
        method = "COPY" if self.copy else method
        return f"{method} {'pack' if 'xckpt.packs/' in self.key else 'chunk'}"


def longest_chain(requests: Iterable[SeenRequest]) -> list[SeenRequest]:
    """The most requests of which each began when the one before had ended.

    Example:
        >>> def request(began, ended):
        ...     return SeenRequest("GET", "", False, False, began, ended, 0, 0)
        >>> len(longest_chain([request(0, 3), request(1, 2), request(2.5, 4)]))
        2
    """
    chain: list[SeenRequest] = []
    for each in sorted(requests, key=lambda request: request.ended):
        if not chain or each.began >= chain[-1].ended:
            chain.append(each)
    return chain


def rounds(requests: Iterable[SeenRequest]) -> int:
    """How often an answer of a server with rounds was waited for, one after the other."""
    return len({request.round for request in requests})


def kinds(requests: Iterable[SeenRequest]) -> dict[str, int]:
    """How many requests there are of each kind."""
    return dict(sorted(Counter(request.kind for request in requests).items()))


class CountedBucket:
    """The server: one bucket, whatever it is called.

    Args:
        delay: seconds before each answer.
        rate: bytes a second of all requests and answers together.
        quiet: seconds without a request after which all are answered; 0 for a server that answers
            each by itself.
    """

    def __init__(self, delay: float = 0.0, rate: float = math.inf, quiet: float = 0.0) -> None:
        self.delay, self.rate, self.quiet = delay, rate, quiet
        self._busy_until = 0.0
        """When what is being sent is out, by the rate."""
        self.objects: dict[str, tuple[str, bytes]] = {}
        """Key -> ETag and content."""
        self.refused = ""
        """How keys end that must not be written."""
        self._seen: list[SeenRequest] = []
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[object]] = set()
        self._round, self._moving, self._moved_last = 0, 0, 0.0
        self._held: list[asyncio.Future[int]] = []
        """Requests that wait for the end of the round."""

    async def start(self) -> int:
        """Listen on this machine; the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 24)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Cut all connections, and listen no more."""
        assert self._server is not None
        self._server.close()
        for serving in tuple(self._serving):
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.sleep(0)  # for the transports

    def taken(self) -> list[SeenRequest]:
        """The requests since the last call, in the order of their answers."""
        seen, self._seen = self._seen, []
        return seen

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        ends = asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        with contextlib.suppress(*ends):
            try:
                await self._serve_all(reader, writer)
            finally:
                self._serving.discard(serving)
                writer.transport.abort()

    async def _serve_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            began = time.monotonic()
            first, *lines = head.decode().split("\r\n")
            method, target, _ = first.split(" ", 2)
            pairs = (line.partition(":") for line in lines if line)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            if "expect" in headers:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            with self._moves():
                content = await reader.readexactly(int(headers.get("content-length", 0)))
            if target == SEEN:
                answer = json.dumps([asdict(request) for request in self.taken()]).encode()
                self._answer(writer, method, 200, {}, answer)
                continue
            answered = await self._turn()
            url = urlsplit(target)
            query = {name: values[0] for name, values in parse_qs(url.query, True).items()}
            key = unquote(url.path).lstrip("/").partition("/")[2]
            status, given, answer = self._done(method, key, query, headers, content)
            await self._moved(len(content) + len(answer))
            self._note(method, key, query, headers, began, content, answer, answered)
            with self._moves():
                self._answer(writer, method, status, given, answer)
                await writer.drain()

    @contextlib.contextmanager
    def _moves(self) -> Iterator[None]:
        """Note that a request or an answer is on the line while the block runs."""
        self._moving += 1
        try:
            yield
        finally:
            self._moving -= 1
            self._moved_last = time.monotonic()

    async def _turn(self) -> int:
        """Wait as long as the bucket is away, or until the end of the round, which is returned."""
        if not self.quiet:
            await asyncio.sleep(self.delay)
            return 0
        loop = asyncio.get_running_loop()
        self._held.append(turn := loop.create_future())
        if len(self._held) == 1:
            ending = loop.create_task(self._end_round())
            self._serving.add(ending)
            ending.add_done_callback(self._serving.discard)
        return await turn

    async def _end_round(self) -> None:
        """Answer all that wait, once nothing has moved for a while."""
        while self._moving or time.monotonic() < self._moved_last + self.quiet:
            await asyncio.sleep(self.quiet / 8)
        self._round += 1
        held, self._held = self._held, []
        for turn in held:
            if not turn.done():  # else its connection was cut
                turn.set_result(self._round)

    async def _moved(self, count: int) -> None:
        """Wait as long as so many bytes take behind those of others."""
        now = time.monotonic()
        self._busy_until = max(now, self._busy_until) + count / self.rate
        await asyncio.sleep(self._busy_until - now)

    def _note(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        began: float,
        content: bytes,
        answer: bytes,
        answered: int,
    ) -> None:
        listing = "list-type" in query
        conditional = method == "PUT" and ("if-match" in headers or "if-none-match" in headers)
        named = query.get("prefix", "") if listing else key
        sizes = len(content), len(answer)
        times = began, time.monotonic()
        copy = "x-amz-copy-source" in headers
        about = method, named, listing, conditional, *times, *sizes, copy
        self._seen.append(SeenRequest(*about, answered))

    def _done(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        content: bytes,
    ) -> tuple[int, dict[str, str], bytes]:
        """Do what a request asks for: status, headers and content of the answer."""
        if not key and method == "POST":
            return 200, {}, self._deleted(re.findall("<Key>(.*?)</Key>", content.decode()))
        if not key:
            return (200, {}, self._listed(query)) if "list-type" in query else (200, {}, b"")
        tag, found = self.objects.get(key, ("", b""))
        if method == "PUT" and self.refused and key.endswith(self.refused):
            return 403, {}, _error("AccessDenied")
        wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
        if wanted is not None and not tag:
            return 404, {}, _error("NoSuchKey")  # as Amazon's does, and not 412
        if (wanted is not None and wanted != tag) or (unwanted == "*" and tag):
            return 412, {}, _error("PreconditionFailed")
        if method == "PUT" and (source := headers.get("x-amz-copy-source")):
            copied = self.objects.get(unquote(source).lstrip("/").partition("/")[2])
            if copied is None:
                return 404, {}, _error("NoSuchKey")
            self.objects[key] = copied
            return (
                200,
                {},
                f"<CopyObjectResult><ETag>{copied[0]}</ETag></CopyObjectResult>".encode(),
            )
        if method == "PUT":
            tag = f'"{xxhash.xxh3_128_hexdigest(content)}"'
            self.objects[key] = tag, content
            return 200, {"ETag": tag}, b""
        if method == "DELETE":
            self.objects.pop(key, None)
            return 204, {}, b""
        if not tag:
            return 404, {}, _error("NoSuchKey")
        given = {"ETag": tag}
        if unwanted == tag:
            return 304, given, b""
        return _ranged(headers.get("range", ""), found, given)

    def _deleted(self, names: list[str]) -> bytes:
        """Delete objects by their names in XML; the answer."""
        for name in names:
            self.objects.pop(html.unescape(name), None)
        gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        head = '<?xml version="1.0" encoding="UTF-8"?>'
        return f"{head}<DeleteResult>{gone}</DeleteResult>".encode()

    def _listed(self, query: Mapping[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        after = query.get("continuation-token", after)
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        page, more = keys[:PAGE], len(keys) > PAGE
        contents = "".join(
            f"<Contents><Key>{_escaped(key)}</Key><Size>{len(self.objects[key][1])}</Size>"
            f"</Contents>"
            for key in page
        )
        last = _escaped(page[-1]) if more else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>"
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{contents}{token if more else ''}</ListBucketResult>"
        )
        return text.encode()

    def _answer(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        status: int,
        headers: Mapping[str, str],
        content: bytes,
    ) -> None:
        lines = [f"HTTP/1.1 {status} -", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if method != "HEAD" and content:
            writer.write(content)


def _ranged(
    wanted: str, content: bytes, given: dict[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """An answer with the bytes of an object that a request wants."""
    if not wanted:
        return 200, given, content
    low, _, high = wanted.removeprefix("bytes=").partition("-")
    size = len(content)
    start = int(low) if low else max(0, size - int(high))
    stop = min(int(high) + 1, size) if low and high else size
    if start >= size:
        return 416, given, _error("InvalidRange")
    given["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return 206, given, content[start:stop]


def _error(code: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code></Error>'.encode()


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def environment_of(port: int) -> dict[str, str]:
    """The variables that lead a client to the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def counted_in_thread(
    delay: float = 0.0, quiet: float = 0.0
) -> Iterator[tuple[CountedBucket, int]]:
    """A server in a thread of this process, and its port, for as long as the block lasts."""
    loop, bucket = asyncio.new_event_loop(), CountedBucket(delay, quiet=quiet)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield bucket, asyncio.run_coroutine_threadsafe(bucket.start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(bucket.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def counted_apart(delay: float, rate: float = math.inf, quiet: float = 0.0) -> Iterator[int]:
    """A server in a process of its own, for as long as the block lasts; its port."""
    numbers = map(str, (delay, rate, quiet))
    command = [sys.executable, "-m", "tests.support.counted_bucket", *numbers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.terminate()


def seen_at(port: int) -> list[SeenRequest]:
    """The requests that a server has seen since it was asked last."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{SEEN}") as answer:
        return [SeenRequest(**request) for request in json.load(answer)]


async def _main(delay: float, rate: float, quiet: float) -> None:
    print(await CountedBucket(delay, rate, quiet).start(), flush=True)
    await asyncio.Event().wait()


def without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process lack the package that asks a bucket for copies."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(*map(float, sys.argv[1:])))
