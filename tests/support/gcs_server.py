"""A server that speaks as much of Google Cloud Storage's JSON API as TensorStore does.

Obstore speaks the XML API: it has an object copied by a PUT, and asks for one's length by a HEAD.

The emulators that can be installed from PyPI ignore ``ifGenerationMatch``, on which a commit rests;
this one does what the API's reference says of generations, ranges and listings.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_server import EndingServer

PAGE = 20
"""Objects a page of a listing; small, so that listings take several."""

_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/(.+)")
_LISTING = re.compile(r"/storage/v1/b/([^/]+)/o")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_XML = re.compile(r"/([^/]+)/(.+)")


@dataclass
class Bucket:
    """Objects by name: (generation, content)."""

    objects: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    last: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generation(self, name: str) -> int:
        return self.objects.get(name, (0, b""))[0]

    def put(self, name: str, content: bytes) -> None:
        self.last += 1
        self.objects[name] = (self.last, content)

    def resource(self, name: str) -> dict[str, str]:
        """What the API says of an object."""
        generation, content = self.objects[name]
        return {
            "kind": "storage#object",
            "name": name,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "timeCreated": "2020-01-01T00:00:00Z",
            "updated": "2020-01-01T00:00:00Z",
        }


class GCSServer(EndingServer):
    """The server; its buckets are made beforehand."""

    # A client opens many connections at once; one that finds the queue full tries again after 1 s.
    request_queue_size = 1024

    def __init__(self, *buckets: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets = {name: Bucket() for name in buckets}

    def refused(self, name: str, content: bytes | None) -> int | None:
        """A status to answer instead of doing what is asked, if it is not to be done."""
        return None

    def began(self, name: str, content: bytes | None, only_if: int | None) -> int:
        """A request to write or delete an object has come, and gets a number."""
        return 0

    def ended(self, number: int, name: str, version: int) -> int | None:
        """It was dealt with; 0 stands for an object that is gone, -1 for one left as it was.

        Returns:
            The status to answer instead of the true one.
        """
        return None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and content in one packet
    disable_nagle_algorithm = True
    server: GCSServer  # type: ignore[assignment]

    def handle_expect_100(self) -> bool:
        """Ask for the content at once: a client waits for that, a second at most."""
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def do_GET(self) -> None:
        path, query = self._request()
        if found := _OBJECT.fullmatch(path):
            self._read(found[1], unquote(found[2]), query)
        elif found := _LISTING.fullmatch(path):
            self._list(found[1], query)
        else:
            self._answer(400)

    def do_POST(self) -> None:
        path, query = self._request()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        found = _UPLOAD.fullmatch(path)
        bucket = self.server.buckets.get(found[1]) if found else None
        if bucket is None:
            self._answer(404)
            return
        name = query["name"]
        if refused := self.server.refused(name, content):
            self._answer(refused)
            return
        number = self.server.began(name, content, self._condition(query))
        with bucket.lock:
            holds = self._condition_holds(bucket, name, query)
            if holds:
                bucket.put(name, content)
            resource = bucket.resource(name) if holds else None
            version = bucket.generation(name) if holds else -1
            lost = self.server.ended(number, name, version)
        if lost:
            self._answer(lost)
        elif resource is None:
            self._answer(412)
        else:
            self._answer(200, json.dumps(resource).encode())

    def do_PUT(self) -> None:
        path, _ = self._request()
        found = _XML.fullmatch(path)
        bucket = self.server.buckets.get(unquote(found[1])) if found else None
        source = unquote(self.headers.get("x-goog-copy-source", "")).partition("/")[2]
        if found is None or bucket is None or not source:
            self._answer(400)
            return
        name = unquote(found[2])
        with bucket.lock:
            content = bucket.objects.get(source, (0, None))[1]
        if content is None:
            self._answer(404)
            return
        number = self.server.began(name, content, None)
        with bucket.lock:
            bucket.put(name, content)
            lost = self.server.ended(number, name, bucket.generation(name))
        self._answer(lost or 200)

    def do_HEAD(self) -> None:
        found = _XML.fullmatch(self._request()[0])
        bucket = self.server.buckets.get(unquote(found[1])) if found else None
        held = bucket.objects.get(unquote(found[2])) if found and bucket else None
        if held is None:
            self._answer(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(held[1])))
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.send_header("ETag", f'"{held[0]}"')
        self.end_headers()

    def do_DELETE(self) -> None:
        path, query = self._request()
        found = _OBJECT.fullmatch(path)
        bucket = self.server.buckets.get(found[1]) if found else None
        if found is None or bucket is None:
            self._answer(404)
            return
        name = unquote(found[2])
        number = self.server.began(name, None, self._condition(query))
        with bucket.lock:
            holds = self._condition_holds(bucket, name, query)
            gone = holds and bucket.objects.pop(name, None) is not None
            lost = self.server.ended(number, name, 0 if holds else -1)
        self._answer(lost or (204 if gone else 404 if holds else 412))

    def _read(self, bucket_name: str, name: str, query: dict[str, str]) -> None:
        bucket = self.server.buckets.get(bucket_name)
        if bucket is None or name not in bucket.objects:
            self._answer(404)
            return
        generation, content = bucket.objects[name]
        stamp = {"x-goog-generation": str(generation)}
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            self._answer(304, headers=stamp)
        elif not self._condition_holds(bucket, name, query):
            self._answer(412, headers=stamp)
        elif query.get("alt") != "media":
            self._answer(200, json.dumps(bucket.resource(name)).encode(), stamp)
        elif wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            size = len(content)
            start = int(wanted[1]) if wanted[1] else size - int(wanted[2])
            stop = min(int(wanted[2]) + 1, size) if wanted[1] and wanted[2] else size
            if not 0 <= start < size:
                self._answer(416, headers=stamp)
                return
            stamp["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._answer(206, content[start:stop], stamp)
        else:
            self._answer(200, content, stamp)

    def _list(self, bucket_name: str, query: dict[str, str]) -> None:
        bucket = self.server.buckets.get(bucket_name)
        if bucket is None:
            self._answer(404)
            return
        # A token stands for a name: what is deleted between two pages moves no other name.
        after = base64.urlsafe_b64decode(query.get("pageToken", "")).decode()
        first = query.get("startOffset", "")
        with bucket.lock:
            names = sorted(
                name
                for name in bucket.objects
                if name.startswith(query.get("prefix", "")) and name > after and name >= first
                if "endOffset" not in query or name < query["endOffset"]
            )
            page = [bucket.resource(name) for name in names[:PAGE]]
        answer: dict[str, object] = {"kind": "storage#objects", "items": page}
        if len(names) > PAGE:
            # TensorStore sends it back as it is, without escapes.
            answer["nextPageToken"] = base64.urlsafe_b64encode(names[PAGE - 1].encode()).decode()
        self._answer(200, json.dumps(answer).encode())

    def _condition_holds(self, bucket: Bucket, name: str, query: dict[str, str]) -> bool:
        wanted = self._condition(query)
        return wanted is None or wanted == bucket.generation(name)

    def _condition(self, query: dict[str, str]) -> int | None:
        wanted = query.get("ifGenerationMatch")
        return None if wanted is None else int(wanted)

    def _request(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        return url.path, {key: values[-1] for key, values in parse_qs(url.query).items()}

    def _answer(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass
