"""The object stores that the tests of buckets save to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.conformance.crash.holding_gcs import HoldingGCS
from tests.conformance.crash.holding_s3 import HoldingS3


@pytest.fixture(scope="module", params=[HoldingGCS, HoldingS3])
def bucket(request: pytest.FixtureRequest) -> Iterator[HoldingGCS | HoldingS3]:
    """A server with one bucket, which xckpt is led to."""
    made: HoldingGCS | HoldingS3 = request.param(seed=3)
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in made.environment().items():
            environment.setenv(name, value)
        yield made
    made.stop()
    thread.join()
