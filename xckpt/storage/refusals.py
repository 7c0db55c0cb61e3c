"""Refusals of a storage, as errors that say where and what to do.

TensorStore's Python binding has two classes for its statuses: ``UNIMPLEMENTED`` is a
NotImplementedError, every other a ValueError. ``INVALID_ARGUMENT`` and ``UNIMPLEMENTED`` come
without their name, the others begin with it (``NOT_FOUND: ...``). A wait that ends is a
TimeoutError, which is an OSError; an exception of C++ becomes a RuntimeError.

1. `refusal` takes any of them. A bucket's answer is quoted without the XML or JSON around it
   (`_said`). What the system has said to TensorStore reads as if it had said it to Python, and a
   path that the place names already is not repeated.
2. `_advice` searches the whole answer for known messages, the most specific first. It differs
   between a bucket and a local folder.
3. A verification goes on behind what it cannot read, and lists it (`kind_of`) beside damage. Where
   nothing is damaged, that is an error of reading (`error_of_reading`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, TypeAlias

from xckpt.engine.limits import FILES, NO_THREAD, SYSTEM_FILES, THREADS
from xckpt.errors import (
    CheckpointReplacedError,
    LeafTooLargeError,
    Problem,
    StorageError,
    XckptError,
)

UNREADABLE: Final = "unreadable"
"""The kind of a problem that says nothing about what was saved: the storage refused it."""
TOO_LARGE: Final = "memory"
"""The kind of another that says nothing about it: this reader has too little memory."""

MOST_SAID: Final = 300
"""Characters of an answer that are quoted."""

StorageFailure: TypeAlias = OSError | ValueError | RuntimeError
"""What TensorStore and the system raise; NotImplementedError is a RuntimeError."""

_BODY: Final = re.compile(r"\s*\[http_response_body='((?:[^'\\]|\\.)*)'\]")
_STATUS: Final = re.compile(r"\s*\[http_response_code='(\d+)'\]")
_NAMED: Final = re.compile(r'<Code>(\w+)</Code>|\\*"reason\\*":\s*\\*"(\w+)')
"""S3's and Google's names of what went wrong."""
_BY_SYSTEM: Final = re.compile(
    r'(?:.*"(?P<path>/[^"]*?)(?:\\x00[^"]*)?")?(?:.*: )?(?P<reason>[^:]+) \[os_error_code=',
    re.DOTALL,
)
"""A local file's path and what the system said. TensorStore ends the path of a folder that it makes
by a NUL in the path of the file."""

NO_SUCH_ANSWER: Final = (
    "this is no answer of such a storage: check what is in between, a proxy that asks to sign in "
    "perhaps, and AWS_ENDPOINT_URL (for gs://, TENSORSTORE_GCS_HTTP_URL)"
)
_DENIED: Final = r"PERMISSION_DENIED|code='403'"
_UNKNOWN_REQUEST: Final = r"NotImplemented|UNIMPLEMENTED|code='501'"
_ANYWHERE: Final = (
    ("Too many open files in system", SYSTEM_FILES),
    ("Too many open files", FILES),
    (NO_THREAD, THREADS),
)
_IN_BUCKETS: Final = (
    *_ANYWHERE,
    (
        r"ExpiredToken|TokenRefreshRequired|invalid_grant|authError|UNAUTHENTICATED|code='401'",
        "the credentials have expired, or there are none: get new ones (`aws sso login`, "
        "`gcloud auth application-default login`, or a new AWS_SESSION_TOKEN) and start again",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|credentials",
        "the credentials are wrong: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
        "AWS_SESSION_TOKEN, or GOOGLE_APPLICATION_CREDENTIALS",
    ),
    (
        r"RequestTimeTooSkewed",
        "the clock of this machine is wrong: set it (the storage allows 15 minutes)",
    ),
    (
        r"PermanentRedirect|TemporaryRedirect|AuthorizationHeaderMalformed|IllegalLocation"
        r"|code='30\d'",
        "the bucket is in another region, or at another endpoint: set AWS_REGION and "
        "AWS_ENDPOINT_URL (for gs://, TENSORSTORE_GCS_HTTP_URL) to the bucket's own",
    ),
    (
        r"code='407'",
        "the proxy wants a name and a password: check HTTPS_PROXY and HTTP_PROXY",
    ),
    (
        r"NoSuchBucket|NOT_FOUND.*code='404'",  # Google's storage says the latter, to a write
        "there is no such bucket: check its name, or create it",
    ),
    (
        r"parse response metadata: *$",  # of a listing of Google's storage that came to nothing
        "there is no such bucket, or no answer came: check its name, the network and the proxy",
    ),
    (
        r"QuotaExceeded|code='507'|RESOURCE_EXHAUSTED|storageQuota",
        "the quota or the space is used up: free some, or save elsewhere",
    ),
    (
        _UNKNOWN_REQUEST,
        "the storage does not know this request; to save, xckpt needs conditional writes "
        "(If-None-Match and If-Match of PUT): save to a storage that has them",
    ),
    (
        r"code='409'",
        "another request for the same object came at the same time: try again",
    ),
    (
        _DENIED,
        "check what these credentials may do in the bucket: to save, xckpt lists, reads, writes "
        "and deletes (s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject; "
        "roles/storage.objectUser)",
    ),
    (
        r"etag not found|Malformed (?:List|StorageGeneration)|[Ff]ailed to parse|Error parsing"
        r"|Content-Range header|not satisfied by response|content unencoding|Weird server reply"
        r"|Expected object",
        NO_SUCH_ANSWER,
    ),
    (
        r"connect|resolve|CURL|UNAVAILABLE|DEADLINE_EXCEEDED",
        "the storage cannot be reached: check the network, and AWS_ENDPOINT_URL if it is set",
    ),
    (
        r"retry attempts failed",
        "the storage is overloaded: try again later, or allow more with retries= of the options "
        "(XCKPT_RETRIES)",
    ),
)
_IN_FOLDERS: Final = (
    *_ANYWHERE,
    (
        r"RESOURCE_EXHAUSTED|No space left|Disk quota|quota exceeded",
        "the disk is full: free space or save elsewhere",
    ),
    (
        r"PERMISSION_DENIED|Permission denied|Read-only",
        "check its permissions, and those of the folders above it",
    ),
    (
        r"Operation not permitted",
        "it is another user's, or marked as not to be changed: have its owner do it, or choose "
        "another path",
    ),
    (
        r"Function not implemented|No locks available|[Nn]ot supported|UNIMPLEMENTED",
        "this file system lacks what a save needs, file locks among others: mount it with locks, "
        "or save elsewhere",
    ),
    (r"Not a directory", "what lies above it is a file: choose another path"),
    (r"Too many levels", "the link leads back to itself: remove it, or choose another path"),
    (
        r"File too large",
        "files may not be as large here: raise the limit of this process (ulimit -f), or save "
        "smaller ones (chunk_bytes= and shard_bytes= of the options)",
    ),
    (r"File exists", "a file lies where a folder is needed: choose another path"),
    (r"Stale file handle", "the file was replaced on the server: try again"),
)


def refusal(where: str, error: StorageFailure) -> StorageError:
    """The error for what a storage refused at a place.

    Example:
        >>> print(refusal("/data/run", OSError(28, "No space left on device")))
        /data/run: No space left on device; the disk is full: free space or save elsewhere
        >>> text = 'PERMISSION_DENIED: Failed to open: "/data/run/w/c/0": Permission denied'
        >>> print(refusal("/data/run: w", ValueError(f"{text} [os_error_code='13']")))
        /data/run: w: Permission denied (/data/run/w/c/0); check its permissions, and those of the \
folders above it
        >>> denied = ValueError(
        ...     "PERMISSION_DENIED: ExpiredToken: old [http_response_code='403'] "
        ...     "[http_response_body='<Error><Code>ExpiredToken</Code></Error>']"
        ... )
        >>> print(refusal("s3://bucket/run", denied))
        s3://bucket/run: PERMISSION_DENIED: ExpiredToken: old (HTTP 403); the credentials have \
expired, or there are none: get new ones (`aws sso login`, `gcloud auth application-default login`,\
 or a new AWS_SESSION_TOKEN) and start again
    """
    advice = _advice(where, error)
    return StorageError(f"{where}: {_said(where, error)}{f'; {advice}' if advice else ''}")


def replaced(where: object, when: str) -> CheckpointReplacedError:
    """The error for a checkpoint that is not what its reader has opened.

    Example:
        >>> replaced("run/7", "while it was read")
        CheckpointReplacedError('run/7 was replaced while it was read; open it again to read what \
is there now')
    """
    return CheckpointReplacedError(
        f"{where} was replaced {when}; open it again to read what is there now"
    )


def said_of(where: str, error: Exception) -> XckptError:
    """An error of any kind as one of xckpt, for a text that goes on."""
    if isinstance(error, XckptError):
        return error
    known = isinstance(error, (OSError, ValueError, RuntimeError))
    return refusal(where, error if known else RuntimeError(f"{type(error).__name__}: {error}"))


def is_denied(error: StorageError) -> bool:
    """Whether the storage does not let this reader look, or cannot list at all.

    Example:
        >>> is_denied(refusal("w", OSError(13, "Permission denied"))), is_denied(StorageError("w"))
        (True, False)
    """
    said = f"{error} {error.__cause__}"
    return re.search(rf"{_DENIED}|Permission denied|{_UNKNOWN_REQUEST}", said) is not None


def kind_of(error: XckptError, damage: str) -> str:
    """The kind of the problem that an error is: `UNREADABLE`, `TOO_LARGE`, or that damage.

    Example:
        >>> kind_of(StorageError("w: Permission denied"), "chunk")
        'unreadable'
        >>> kind_of(XckptError("w: another digest"), "chunk")
        'chunk'
    """
    if isinstance(error, StorageError):
        return UNREADABLE
    return TOO_LARGE if isinstance(error, LeafTooLargeError) else damage


def error_of_reading(path: str, problems: Collection[Problem]) -> XckptError | None:
    """The error to raise for the problems of a checkpoint none of which is damage.

    Returns:
        A LeafTooLargeError if memory lacks for all of them, else a StorageError; None if one is
        damage, or there is none.

    Example:
        >>> print(error_of_reading("run/step-3", [Problem("w", kind=UNREADABLE, text="refused")]))
        run/step-3 cannot be read whole; nothing that was read is damaged
          - w: refused
        >>> error_of_reading("run/step-3", [Problem("w", kind="chunk", text="missing")]) is None
        True
    """
    kinds = {problem.kind for problem in problems}
    if not kinds or not kinds <= {UNREADABLE, TOO_LARGE}:
        return None
    error = LeafTooLargeError if kinds == {TOO_LARGE} else StorageError
    return error.listing(f"{path} cannot be read whole; nothing that was read is damaged", problems)


def is_permission(error: StorageFailure) -> bool:
    """Whether a bucket refused for lack of permissions."""
    text = str(error)
    return "PERMISSION_DENIED" in text and _advice("s3://", error) == _advice(
        "s3://", ValueError("PERMISSION_DENIED")
    )


def _said(where: str, error: StorageFailure) -> str:
    """What the storage said, in one line."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError):
        return _of_file(where, error.filename, error.strerror or text)
    if by_system := _BY_SYSTEM.match(text):
        return _of_file(where, *by_system.group("path", "reason"))
    body = _BODY.search(text)
    code = _NAMED.search(body[1]) if body else None
    text = _STATUS.sub(r" (HTTP \1)", _BODY.sub("", text))
    if len(text) > MOST_SAID:  # what is no answer is quoted as it is, a page or a listing
        text = f"{text[:MOST_SAID]} ..."
    name = next(filter(None, code.groups()), "") if code else ""
    return f"{text}: {name}" if name and name not in text else text


def _of_file(where: str, path: object, reason: str) -> str:
    """What the system said of a file; its path, if there is one and the place does not end with it.

    Example:
        >>> _of_file("w in /data/w/c/0", "/data/w/c/0", "Permission denied")
        'Permission denied'
        >>> _of_file("/data", "/data/w/c/0", "Permission denied")
        'Permission denied (/data/w/c/0)'
    """
    is_known = path is None or f" {where}".endswith(f" {path}")
    return reason if is_known else f"{reason} ({path})"


def _advice(where: str, error: StorageFailure) -> str:
    """What to do about it; empty if that is not known."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError):
        text += " UNIMPLEMENTED"
    table = _IN_BUCKETS if "s3://" in where or "gs://" in where else _IN_FOLDERS
    return next((advice for pattern, advice in table if re.search(pattern, text)), "")
