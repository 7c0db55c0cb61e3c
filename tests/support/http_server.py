"""A server whose connections end with it."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from http.server import ThreadingHTTPServer
from typing import Any


class EndingServer(ThreadingHTTPServer):
    """Closed, it answers nobody: also those that had kept a connection open.

    A thread of `ThreadingHTTPServer` serves its connection for as long as the client keeps it, so
    that a client with an old address would go on talking to a server that a test has closed.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread."""
        with self._guard:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Listen no more, and cut all connections."""
        super().server_close()
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that was cut is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
