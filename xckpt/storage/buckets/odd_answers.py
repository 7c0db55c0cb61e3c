"""Answers of a bucket that no such storage gives: of a proxy, a cache or a sign-in page in between.

They say nothing about an object. TensorStore takes some of them for an object that is not there, or
is too short: a run would look empty, or a step damaged, and a training continue from an older one.

1. What answers a read is neither an object nor that there is none: HTTP 304 or 412, which answer a
   condition, and none was asked for.
2. An object of Google's storage has no generation, or one of S3 no ETag.
3. Another range came than was asked for, and the object does not end there (`is_odd`). A whole
   object that came instead is taken: some storages know no ranges.
"""

from __future__ import annotations

import re
from typing import Final

import tensorstore as ts

from xckpt.errors import StorageError
from xckpt.storage.refusals import NO_SUCH_ANSWER

NO_GENERATION: Final = bytes(9)
"""What TensorStore has for the generation of an object whose answer names none, which is 0."""

_ODD: Final = re.compile(r"etag not found|Content-Range header")
_RANGE: Final = re.compile(
    r"byte range \[(?P<asked>\d+), .* range \[(?P<start>\d+), (?P<stop>\d+)\) "
    r"and total size (?P<size>\S+)"
)


def check_read(said: object, where: object) -> None:
    """Refuse what answers a read and says nothing about the object.

    Args:
        said: the answer of a bucket to any request.
        where: for errors.

    Raises:
        StorageError: it is 1 or 2 of the above.

    Example:
        >>> stamp = ts.KvStore.TimestampedStorageGeneration(b"", 0.0)
        >>> check_read(ts.KvStore.ReadResult("missing", b"", stamp), "gs://bucket/run")
        >>> check_read(ts.KvStore.ReadResult("unspecified", b"", stamp), "gs://bucket/run")
        Traceback (most recent call last):
        xckpt.errors.StorageError: gs://bucket/run: a read was answered as if it had a condition \
(HTTP 304 or 412); this is no answer of such a storage: check what is in between, a proxy that \
asks to sign in perhaps, and AWS_ENDPOINT_URL (for gs://, TENSORSTORE_GCS_HTTP_URL)
    """
    if not isinstance(said, ts.KvStore.ReadResult) or said.state == "missing":
        return
    if said.state != "value":
        what = "a read was answered as if it had a condition (HTTP 304 or 412)"
        raise StorageError(f"{where}: {what}; {NO_SUCH_ANSWER}")
    if said.stamp.generation == NO_GENERATION:
        what = "the answer to a read names no generation of the object"
        raise StorageError(f"{where}: {what}; {NO_SUCH_ANSWER}")


def is_odd(said: str) -> bool:
    """Whether TensorStore's message about a read is of an odd answer, and not of a short object.

    Example:
        >>> text = "OUT_OF_RANGE: Requested byte range [0, 16) was not satisfied by response with "
        >>> is_odd(f"{text}byte range [0, 9) and total size 10")
        True
        >>> is_odd(f"{text}byte range [5, 10) and total size 10")
        True
        >>> is_odd(f"{text}byte range [0, 10) and total size 10"), is_odd("OUT_OF_RANGE: [0, 16)")
        (False, False)
    """
    if _ODD.search(said):
        return True
    range_ = _RANGE.search(said)
    return range_ is not None and (
        range_["start"] != range_["asked"] or range_["stop"] != range_["size"]
    )
