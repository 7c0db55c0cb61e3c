"""A bucket copies its own objects, and deletes many: requests for which TensorStore has no call.

1. `ServerSide` makes them through obstore, an optional package that is imported here alone, and
   only where such a request is to be made. It asks the endpoint, region and bucket of a `Location`,
   with the credentials that TensorStore takes, as often and as many at a time as its `Access` says.
2. All requests run in one thread of the process; each gives a future, which
   `xckpt.storage.location.answer` waits for.
3. Whatever is refused is a `StorageError`, and an object that is not there a `FileNotFoundError`:
   the caller then does without.
4. The first copy goes ahead: if it is refused, so are the others, and no request is made of them.
   A storage that knows no copies (501) is asked once; obstore would ask it again, as a busy one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from xckpt.errors import StorageError
from xckpt.storage.location import REQUESTS, Location, answer, check_process
from xckpt.storage.refusals import MOST_SAID

if TYPE_CHECKING:
    from obstore.store import (
        ClientConfig,
        GCSConfig,
        GCSStore,
        RetryConfig,
        S3CredentialProvider,
        S3Store,
    )

MISSING: Final = 'obstore is not installed: pip install "xckpt[buckets]"'
PROFILES: Final = "the credentials of an AWS profile are read by boto3: pip install boto3"
FOREVER: Final = timedelta(days=1)
"""No limit: `Access` has those that count."""
FIRST_DELAY, MOST_DELAY = timedelta(milliseconds=200), timedelta(seconds=2)
"""Between two tries, as TensorStore's."""
GIVEN_UP: Final = "given up"
UNKNOWN: Final = "status code: 501"
"""What an error says of a request that the storage does not know."""

Said = TypeVar("Said")


class ServerSide:
    """The requests of one call to one bucket.

    Args:
        where: any place in the bucket.

    Raises:
        StorageError: there is no such bucket, no obstore, or no way to its credentials.
    """

    def __init__(self, where: Location) -> None:
        check_process()
        self._where, self._store = where, _store(where)
        self._loop = _loop()
        self._first, self._is_tried = asyncio.Lock(), False
        self._refused = ""
        """Why no copy is asked for."""
        self._room = asyncio.Semaphore(where.access.concurrency or REQUESTS)
        self._under_way: set[Future[Any]] = set()
        self._ended = False

    def copy(self, source: str, target: str) -> Future[None]:
        """Begin to copy an object, by keys in the bucket; what has the new key is replaced."""
        return self._ask(source, lambda: self._copied(source, target))

    def size(self, key: str) -> Future[int]:
        """Begin to ask for the length of an object, bytes."""
        from obstore import head_async

        async def asked() -> int:
            return (await head_async(self._store, key))["size"]

        return self._ask(key, asked)

    def delete(self, keys: Sequence[str]) -> Future[None]:
        """Begin to delete objects of S3, a thousand by one request; others may go if one is left.

        A key where nothing is counts as deleted.
        """
        from obstore import delete_async

        return self._ask(keys[0], lambda: delete_async(self._store, keys))

    async def _copied(self, source: str, target: str) -> None:
        from obstore import copy_async

        async with self._first:
            if not self._is_tried:
                return await self._try(source, target)
        if self._refused:
            raise StorageError(self._refused)
        await copy_async(self._store, source, target)

    async def _try(self, source: str, target: str) -> None:
        """Make the first copy; if it is refused, so are all others."""
        from obstore import copy_async

        self._is_tried = True
        try:
            try:
                once = replace(self._where, access=replace(self._where.access, retries=0))
                await copy_async(_store(once), source, target)
            except Exception as error:
                if isinstance(error, FileNotFoundError) or UNKNOWN in str(error):
                    raise
                await copy_async(self._store, source, target)
        except FileNotFoundError:
            raise
        except Exception as error:
            self._refused = _brief(error)
            raise

    def close(self) -> None:
        """Begin no more requests, and wait for those under way."""
        self._ended, self._refused = True, self._refused or GIVEN_UP
        for asked in tuple(self._under_way):
            with contextlib.suppress(Exception):
                answer(asked, self._where)

    def _ask(self, key: str, request: Callable[[], Coroutine[Any, Any, Said]]) -> Future[Said]:
        asked = asyncio.run_coroutine_threadsafe(self._asked(key, request), self._loop)
        self._under_way.add(asked)
        asked.add_done_callback(self._under_way.discard)
        return asked

    async def _asked(self, key: str, request: Callable[[], Coroutine[Any, Any, Said]]) -> Said:
        async with self._room:
            if self._ended:
                raise StorageError(f"{key}: {GIVEN_UP}")
            try:
                return await request()
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None
            except Exception as error:  # obstore's have no class in common with any other
                raise StorageError(_brief(error)) from error


def _brief(error: Exception) -> str:
    """What an error says, without the structures that obstore prints below."""
    said = str(error).partition("\n\nDebug source")[0]
    return " ".join(said.split())[:MOST_SAID] or type(error).__name__


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all requests, in a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="xckpt-server-side", daemon=True).start()
    return loop


def _store(where: Location) -> S3Store | GCSStore:
    """Obstore's store of a bucket, whose keys are those of the bucket.

    Raises:
        StorageError: see `ServerSide`.
    """
    if where.driver not in ("s3", "gcs"):
        raise StorageError(f"{where}: only a bucket copies on its own side")
    try:
        return _s3(where) if where.driver == "s3" else _gcs(where)
    except ImportError as error:
        raise StorageError(error.msg if error.name == "boto3" else MISSING) from error
    except StorageError:
        raise
    except Exception as error:  # a key file that cannot be read, a profile that is not there
        raise StorageError(_brief(error)) from error


def _s3(where: Location) -> S3Store:
    from obstore.store import S3Store

    spec = where.store_spec()
    region, endpoint = str(spec.get("aws_region", "us-east-1")), spec.get("endpoint")
    by_host = endpoint is None and "." not in where.bucket
    if endpoint is None:
        # Said even so: obstore would look for one in variables that TensorStore does not know.
        suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        endpoint = f"https://{f'{where.bucket}.' if by_host else ''}s3.{region}.{suffix}"
    return S3Store(
        where.bucket,
        endpoint=str(endpoint).rstrip("/"),
        region=region,
        virtual_hosted_style_request=by_host,
        client_options=_client(where),
        retry_config=_retries(where),
        credential_provider=_of_profile(),
    )


def _of_profile() -> S3CredentialProvider | None:
    """The credentials of a profile, which obstore does not read; None where others come first.

    Raises:
        ImportError: there are profiles and no boto3.
    """
    before = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    files = {
        "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
        "AWS_CONFIG_FILE": "~/.aws/config",
    }
    paths = [Path(os.environ.get(name, usual)).expanduser() for name, usual in files.items()]
    if any(map(os.environ.get, before)) or not any(path.is_file() for path in paths):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ImportError(PROFILES, name="boto3") from error
    return Boto3CredentialProvider()


def _gcs(where: Location) -> GCSStore:
    from obstore.store import GCSStore

    # Said even where it is the usual one: see `_s3`.
    endpoint = os.environ.get("TENSORSTORE_GCS_HTTP_URL") or "https://storage.googleapis.com"
    config: GCSConfig = {"base_url": endpoint}
    if token := os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING"):  # TensorStore's variables, both
        config["bearer_token"] = token
    about = {"client_options": _client(where), "retry_config": _retries(where)}
    return GCSStore(where.bucket, config=config, **about)


def _client(where: Location) -> ClientConfig:
    silent = timedelta(seconds=where.access.request_timeout)
    return {"allow_http": True, "timeout": FOREVER, "read_timeout": silent}


def _retries(where: Location) -> RetryConfig:
    return {
        "max_retries": where.access.retries,
        "retry_timeout": FOREVER,
        "backoff": {"init_backoff": FIRST_DELAY, "max_backoff": MOST_DELAY, "base": 2},
    }
