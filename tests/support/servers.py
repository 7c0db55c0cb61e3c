"""Buckets to test with, as fixtures: S3 is moto's server, GCS is `GCSServer`."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.counted_bucket import CountedBucket, counted_in_thread, environment_of
from tests.support.faulty_bucket import FaultyBucket, in_front_of, never
from tests.support.gcs_server import GCSServer
from tests.support.s3_server import buckets_with, s3_server
from xckpt.storage.location import forget_contexts

__all__ = ["bucket", "environment", "faulty_gcs", "faulty_s3", "gcs", "new_place", "s3"]

_numbers = itertools.count()


def new_place(request: pytest.FixtureRequest) -> str:
    """A path or URL where nothing is, of the kind that a fixture's parameter names.

    That is "folder", "memory", or the name of a fixture of a bucket.
    """
    if request.param == "folder":
        folder: Path = request.getfixturevalue("tmp_path")
        return str(folder / "place")
    bucket = "memory:/" if request.param == "memory" else request.getfixturevalue(request.param)
    return f"{bucket}/place-{next(_numbers)}"


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedBucket]:
    """A bucket that notes what it is asked; s3:// leads to it."""
    with counted_in_thread() as (bucket, port):
        for name, value in environment_of(port).items():
            monkeypatch.setenv(name, value)
        yield bucket


@pytest.fixture(scope="module")
def s3(environment: pytest.MonkeyPatch) -> Iterator[str]:
    buckets_with("bucket")
    server = s3_server()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    for name, value in environment_of(server.server_port).items():
        environment.setenv(name, value)
    yield "s3://bucket"
    server.shutdown()
    thread.join()
    server.server_close()


def lead_to_gcs(environment: pytest.MonkeyPatch, address: str) -> None:
    """Have gs:// lead to a server.

    TensorStore asks for the address when it opens a bucket, and gives who opens it again the same
    store, address and all, for as long as anything holds that: what an earlier test has left would
    lead a later one to the earlier server. Stores of another context are others.
    """
    environment.setenv("TENSORSTORE_GCS_HTTP_URL", address)
    forget_contexts()


@pytest.fixture(scope="module")
def gcs(environment: pytest.MonkeyPatch) -> Iterator[str]:
    server = GCSServer("bucket")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    lead_to_gcs(environment, server.address)
    environment.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    yield "gs://bucket"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def faulty_s3(s3: str, environment: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with in_front_of(os.environ["AWS_ENDPOINT_URL"]) as server:
        server.url = s3
        environment.setenv("AWS_ENDPOINT_URL", server.address)
        yield server


@pytest.fixture(scope="module")
def faulty_gcs(gcs: str, environment: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with in_front_of(os.environ["TENSORSTORE_GCS_HTTP_URL"]) as server:
        server.url = gcs
        lead_to_gcs(environment, server.address)
        yield server


@pytest.fixture(params=["faulty_s3", "faulty_gcs"])
def faulty_bucket(request: pytest.FixtureRequest) -> Iterator[FaultyBucket]:
    """Each of the two that fail as asked; neither does before or after a test."""
    server: FaultyBucket = request.getfixturevalue(request.param)
    server.fault = never
    yield server
    server.fault = never
