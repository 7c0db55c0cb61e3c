"""The server that holds requests, for S3: moto's, which judges the conditions itself.

1. A version is an object's ETag, read as a number: it comes from the content, so that equal
   contents have equal versions, and what a write makes of an object is known before it happens.
2. ``If-None-Match: *`` asks that there is no object, ``If-Match`` that it has an ETag; what does
   not hold is answered 412. Before a conditional DELETE TensorStore asks, with HEAD, and then
   deletes whatever is there: what is recorded is a DELETE without a condition.
3. A copy writes what its source holds when it is made.
4. Each deletion is a request of its own. One of several objects (``POST ?delete``) and an upload in
   parts are refused, since the recording would miss them.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from conformance.crash.bucket import Objects
from tests.conformance.crash.holding import Holding
from tests.support.counted_bucket import environment_of
from tests.support.s3_server import buckets_with, s3_app, s3_server

BUCKET = "held"
"""The bucket has a name of its own: what moto's other servers hold in this process stays there."""

Environ = dict[str, Any]
Start = Callable[..., Any]


def version_of(etag: str) -> int:
    """An ETag as a number."""
    return int(etag.strip('"'), 16)


class HoldingS3(Holding):
    """Moto's server behind a gate."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._moto = s3_app()
        self._one_change = threading.Lock()
        self._server = s3_server(self._answer)
        self._backend = buckets_with(BUCKET)
        self.url = f"s3://{BUCKET}"

    def environment(self) -> dict[str, str]:
        return environment_of(self._server.server_port)

    def everything(self) -> Objects:
        keys = self._backend.buckets[BUCKET].keys
        found = {name: keys[name] for name in tuple(keys)}
        return {name: (version_of(key.etag), key.value) for name, key in found.items()}

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        self._server.serve_forever(poll_interval)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._backend.reset()

    def _answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"])
        if method in ("GET", "HEAD"):
            return self._moto(environ, start)
        name = path.removeprefix(f"/{BUCKET}/")
        if method not in ("PUT", "DELETE") or environ["QUERY_STRING"]:
            start("400 Bad Request", [("Content-Length", "0")])
            return []
        content = None
        if copied := environ.get("HTTP_X_AMZ_COPY_SOURCE"):
            content = self.everything()[unquote(copied).partition("/")[2]][1]
        elif method == "PUT":
            content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(content)
        return self._changed(environ, start, name, content)

    def _changed(
        self, environ: Environ, start: Start, name: str, content: bytes | None
    ) -> Iterable[bytes]:
        only_if = None
        if "HTTP_IF_NONE_MATCH" in environ:
            assert environ["HTTP_IF_NONE_MATCH"] == "*"
            only_if = 0
        elif "HTTP_IF_MATCH" in environ:
            only_if = version_of(environ["HTTP_IF_MATCH"])
        if refused := self.refused(name, content):
            start(f"{refused} Refused", [("Content-Length", "0")])
            return []
        version = 0 if content is None else int(hashlib.md5(content).hexdigest(), 16)
        number = self.began(name, content, only_if, version)
        with self._one_change:
            begun: list[tuple[Any, ...]] = []
            answer = list(self._moto(environ, lambda *given: begun.append(given)))
            lost = self.ended(number, name, version)
        if lost:
            start(f"{lost} Lost", [("Content-Length", "0")])
            return []
        start(*begun[0])
        return answer
