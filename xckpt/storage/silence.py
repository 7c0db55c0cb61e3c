"""A storage that gives no answer: is it slow, or is it dead?

`wait_on` goes on where `xckpt.storage.location.answer` has waited for half of `request_timeout`.

1. When the time of the call is over, that is an error.
2. A bucket is asked for a byte of something small, by a request that waits behind no other and is
   not made again. If that is not answered either within the other half, and no other request of
   the call, the bucket counts as dead. Any answer will do, a refusal too.
3. Else it is only slow: many large requests share a thin line.
"""

from __future__ import annotations

import functools
import time

import tensorstore as ts

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.errors import StorageError
from xckpt.storage.location import Answer, Answered, Location, check_process


def wait_on(asked: Answer[Answered], where: Location) -> Answered:
    """Wait further for an answer.

    Raises:
        StorageError: the time of the call is over, or the storage is dead.
        OSError | ValueError | RuntimeError: the storage refused.
    """
    access = where.access
    while access.left > 0:
        since = time.monotonic()
        trial = _ask(where) if where.bucket else None
        seconds = access.request_timeout / 2 if where.bucket else access.left
        try:
            return asked.result(min(access.left, seconds))
        except TimeoutError:
            if trial is not None and not (_has_answered(trial) or access.heard > since):
                access.until = 0.0  # nothing more is asked of it in this call
                asked.cancel()
                raise StorageError(
                    f"{where}: the storage gave no answer for {access.request_timeout:g} s: check "
                    f"the endpoint and the network; request_timeout= of the options, or "
                    f"XCKPT_REQUEST_TIMEOUT, allows more"
                ) from None
    asked.cancel()
    raise StorageError(
        f"{where}: the time is over: the storage has not answered within the "
        f"{access.timeout:g} s that the call may take; timeout= of the options, or XCKPT_TIMEOUT, "
        f"allows more"
    )


def _ask(where: Location) -> ts.Future[ts.KvStore.ReadResult]:
    check_process()
    store = ts.KvStore.open(where.store_spec(), context=_impatient()).result()
    return store.read(MANIFEST, byte_range=slice(0, 1))


@functools.cache
def _impatient() -> ts.Context:
    once = {"max_retries": 0}
    return ts.Context({"s3_request_retries": once, "gcs_request_retries": once})


def _has_answered(trial: ts.Future[ts.KvStore.ReadResult]) -> bool:
    if not trial.done():
        return False
    error = trial.exception()
    return error is None or "http_response_code" in str(error) or "OUT_OF_RANGE" in str(error)
