"""The server that holds requests, for Google Cloud Storage: a version is an object's generation."""

from __future__ import annotations

from conformance.bucket import Objects
from tests.conformance.holding import Holding
from tests.storage.gcs_server import GCSServer


class HoldingGCS(Holding, GCSServer):
    """The server of the tests of buckets, which asks for a turn before it changes something."""

    def __init__(self, seed: int) -> None:
        Holding.__init__(self, seed)
        GCSServer.__init__(self, "bucket")
        self.url = "gs://bucket"

    def environment(self) -> dict[str, str]:
        return {"TENSORSTORE_GCS_HTTP_URL": self.address, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def everything(self) -> Objects:
        bucket = self.buckets["bucket"]
        with bucket.lock:
            return dict(bucket.objects)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
