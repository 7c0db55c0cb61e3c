"""Which paths are URLs: a rule without I/O, asked before TensorStore is imported."""

from __future__ import annotations

import re

from xckpt.errors import PathError

_SLIP = re.compile("(s3|gs|memory|hf|https?):/?(?!/)")  # it would be a local path


def url_parts(path: str) -> tuple[str, str] | None:
    """The scheme of a URL and what comes after ``://``; None for a local path.

    Raises:
        PathError: a slash of the URL is lost, as `pathlib.Path` loses it.

    Example:
        >>> url_parts("s3://bucket/run/7"), url_parts("/data/ckpt")
        (('s3', 'bucket/run/7'), None)
    """
    scheme, separator, rest = path.partition("://")
    if separator and "/" not in scheme:
        return scheme, rest
    if _SLIP.match(path):
        raise PathError(f"{path}: a URL has two slashes, as in s3://bucket/path")
    return None
