"""A storage that gives no answer: is it slow, or is it dead? `wait_on` takes over when
`xckpt.storage.location.answer` has waited for half of `request_timeout`.

1. When the time of the call is over, that is an error.
2. A bucket is asked for one byte of a small object, by a request that waits behind no other and is
   not retried. If neither that nor any other request of the call is answered within the other half,
   the bucket counts as dead. Any answer will do, a refusal too.
3. Else it is only slow: many large requests share a thin line.
"""

from __future__ import annotations

import math
import time

import tensorstore as ts

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.errors import StorageError
from xckpt.storage.location import (
    Answer,
    Answered,
    Location,
    Reading,
    check_process,
    forget_contexts,
)


def wait_on(asked: Answer[Answered], where: Location, over: float) -> Answered:
    """Continue to wait for an answer.

    Args:
        asked: what for.
        where: of what storage.
        over: until when, by `time.monotonic`.

    Raises:
        StorageError: the time of the call is over, or the storage is dead.
        OSError | ValueError | RuntimeError: the storage refused.
    """
    access = where.access
    while (since := time.monotonic()) < over and since < access.until:
        trial = _ask(where) if where.bucket else None
        half = access.request_timeout / 2 if where.bucket else over - since
        try:
            return asked.result(min(over - since, half))
        except TimeoutError:
            answered = trial is None or _has_answered(trial) or access.heard > since
            if not answered and time.monotonic() < over:
                access.until = 0.0  # nothing more is asked of it in this call
    _give_up(asked)
    if access.until == 0.0 or access.timeout == math.inf:
        raise StorageError(
            f"{where}: the storage gave no answer for {access.request_timeout:g} s: check the "
            f"endpoint and the network; request_timeout= of the options, or "
            f"XCKPT_REQUEST_TIMEOUT, allows more"
        )
    raise StorageError(
        f"{where}: the time is over: the storage has not answered within the "
        f"{access.timeout:g} s that the call may take; timeout= of the options, or XCKPT_TIMEOUT, "
        f"allows more"
    )


def _give_up(asked: Answer[Answered]) -> None:
    asked.cancel()
    forget_contexts()


def _ask(where: Location) -> Reading:
    check_process()
    spec: dict[str, object] = {}
    for kind in ("s3", "gcs"):
        spec[f"{kind}_request_retries"] = {"max_retries": 0}
        spec[f"{kind}_request_concurrency"] = {"limit": 1}
    store = ts.KvStore.open(where.store_spec(), context=ts.Context(spec)).result()
    return store.read(MANIFEST, byte_range=slice(0, 1))


def _has_answered(trial: Reading) -> bool:
    if not trial.done():
        return False
    error = trial.exception()
    return error is None or "http_response_code" in str(error) or "OUT_OF_RANGE" in str(error)
