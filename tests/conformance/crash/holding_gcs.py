"""The server that holds requests, for Google Cloud Storage: a version is an object's generation."""

from __future__ import annotations

from conformance.crash.bucket import Objects
from tests.conformance.crash.holding import Holding
from tests.support.gcs_server import Bucket, GCSServer


class HoldingGCS(Holding, GCSServer):
    """The server of the tests of buckets, which asks for a turn before it changes something."""

    def __init__(self, seed: int) -> None:
        Holding.__init__(self, seed)
        # TensorStore keeps a bucket's endpoint for as long as a store of that bucket is open:
        # under a name of another server's it would go on talking to that one.
        GCSServer.__init__(self)
        self.name = f"held-{self.server_port}"
        self.buckets[self.name] = Bucket()
        self.url = f"gs://{self.name}"

    def environment(self) -> dict[str, str]:
        return {"TENSORSTORE_GCS_HTTP_URL": self.address, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def everything(self) -> Objects:
        bucket = self.buckets[self.name]
        with bucket.lock:
            return dict(bucket.objects)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
