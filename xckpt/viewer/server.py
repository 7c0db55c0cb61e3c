"""The page on the loopback address, with values, plans and differences when they are asked for.

Protection against other users and web pages on the same machine:

1. The server listens on 127.0.0.1 alone.
2. Every path begins with a random token, which only the user who started the server sees.
3. A request whose Host is another name is refused: a web page cannot point a name of its own here.
4. Only GET and HEAD are answered; answers may be framed, read or kept by no other site.

A page that is opened again shows what is there then; questions of an older page are refused.
"""

from __future__ import annotations

import hmac
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, unquote

from xckpt.core.text.printable import printable_lines
from xckpt.errors import CheckpointReplacedError, NotACheckpointError, XckptError
from xckpt.progress import Progress
from xckpt.viewer.model import ProgressShown, as_json
from xckpt.viewer.page import policy
from xckpt.viewer.values import text_of, values_of
from xckpt.viewer.view import CheckpointView

ADDRESS: Final = "127.0.0.1"
HTML, JSON, TEXT = "text/html", "application/json", "text/plain"
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Answer = tuple[int, str, str | bytes]
"""Status, type of the content, content."""


class PageServer(ThreadingHTTPServer):
    """Serves one view to this machine.

    Args:
        view: what is looked at.
        port: 0 for any that is free.

    Example:
        >>> import numpy as np, xckpt
        >>> _ = xckpt.save("memory://served", {"w": np.zeros(3)})
        >>> with PageServer(xckpt.view("memory://served")) as server:
        ...     print(server.url.rpartition(":")[0])
        http://127.0.0.1
    """

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted; with five, a sixth is tried again a second later."""

    def __init__(self, view: CheckpointView, port: int = 0) -> None:
        self.view: CheckpointView = view
        self.token: Final = secrets.token_urlsafe(24)
        self._comparing: dict[str, Progress] = {}
        """Path of another checkpoint -> how far the comparison with it is."""
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is, the token included."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def is_own_host(self, host: str) -> bool:
        """Whether a request's Host is this server, and no name that leads here too."""
        return host in (f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}")

    def answer(self, path: str) -> Answer:
        """The answer to a path."""
        place, _, query = path.partition("?")
        token, slash, what = place.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.token.encode()) or not slash:
            return 404, TEXT, "not found"
        try:
            if not what:
                self.view = self.view.again()
            return self._answer(self.view, what, parse_qs(query))
        except (ValueError, KeyError, NotACheckpointError) as error:
            return 400, TEXT, str(error)
        except CheckpointReplacedError as error:
            return 409, TEXT, f"{error}: reload the page"
        except (XckptError, OSError) as error:
            return 500, TEXT, str(error)

    def _answer(self, view: CheckpointView, what: str, query: dict[str, list[str]]) -> Answer:
        kind, _, below = what.partition("/")
        if kind == "steps":
            name, _, rest = below.partition("/")
            return self._answer(view.step(unquote(name), refresh=not rest), rest, query)
        if what == "":
            return 200, HTML, view.html(served=True)
        if query.get("token", [view.token]) != [view.token]:
            return 409, TEXT, "it was saved again since this page was opened: reload the page"
        if what == "values":
            return 200, JSON, as_json(values_of(view.checkpoint, *_plane(query)))
        if what == "text":
            return 200, JSON, as_json(text_of(view.checkpoint, int(query.get("leaf", ["-1"])[0])))
        if what == "plan":
            return 200, JSON, as_json(view.plan(query.get("text", [""])[0]))
        if what == "diff":
            return 200, JSON, self._compared(view, _other(query))
        if what == "progress":
            now = self._comparing.get(_other(query), Progress(0, 0))
            return 200, JSON, as_json(ProgressShown(now.done, now.total))
        return 404, TEXT, "not found"

    def _compared(self, view: CheckpointView, other: str) -> bytes:
        """What differs from another checkpoint; `_comparing` has the progress meanwhile."""

        def watch(now: Progress) -> None:
            self._comparing[other] = now

        try:
            return as_json(view.diff(other, watch))
        finally:
            self._comparing.pop(other, None)


def _other(query: dict[str, list[str]]) -> str:
    """The path that a question about differences names.

    Raises:
        ValueError: it names none.
    """
    [other] = query.get("other", [""])[:1]
    if not other.strip():
        raise ValueError("which other checkpoint? Give its path or URL")
    return other.strip()


def _plane(query: dict[str, list[str]]) -> tuple[int, int | None, int | None, list[int]]:
    """Leaf, the dimensions down and across, and the position, of a question about values.

    Raises:
        ValueError: they are not numbers.

    Example:
        >>> _plane({"leaf": ["3"], "down": ["-1"], "across": ["0"], "at": ["0,2"]})
        (3, None, 0, [0, 2])
    """
    leaf, down, across = (int(query.get(name, ["-1"])[0]) for name in ("leaf", "down", "across"))
    at = [int(part) for part in query.get("at", [""])[0].split(",") if part]
    return leaf, down if down >= 0 else None, across if across >= 0 else None, at


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer, or refuse."""
        if not self.server.is_own_host(self.headers.get("Host", "")):
            self._send(403, TEXT, "this is not the host of the page")
            return
        self._send(*self.server.answer(self.path))

    do_HEAD = do_GET  # the name by which the base class finds it

    def _send(self, status: int, kind: str, content: str | bytes) -> None:
        if isinstance(content, str):
            text = content if kind == HTML else printable_lines(content)
            content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header(
            "Content-Security-Policy", f"{policy(served=True)}; frame-ancestors 'none'"
        )
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Keep silent: requests of the server's own page are not logged."""
