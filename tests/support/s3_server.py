"""S3 on the loopback address: moto's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.models import S3Backend, s3_backends
from werkzeug.serving import BaseWSGIServer, make_server

REGION = "us-east-1"
ACCOUNT = "123456789012"
"""Moto's own, whatever the credentials."""


@functools.cache
def s3_app() -> Any:
    """What answers requests, for any number of servers.

    Moto's own server has an application for each of 175 services, and goes through a folder of them
    twice for each request, which is half of the processor time of a request.
    """
    return create_backend_app("s3")


def s3_server(answer: Callable[..., Any] | None = None) -> BaseWSGIServer:
    """A server at a free port, which is to serve; ``answer`` stands before moto's application."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    return make_server(
        "127.0.0.1", 0, answer or s3_app(), threaded=True, request_handler=MotoRequestHandler
    )


def buckets_with(name: str) -> S3Backend:
    """What all servers of this process hold, a bucket of that name among it."""
    backend = s3_backends[ACCOUNT]["aws"]
    if name not in backend.buckets:
        backend.create_bucket(name, REGION)
    return backend
