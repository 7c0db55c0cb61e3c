"""The file of a mapping: a TOML document."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import tomli_w

from xckpt.core.text.arguments import wrong_argument
from xckpt.errors import MappingError

Parsed = TypeVar("Parsed")

MAX_FILE_BYTES: Final = 1 << 26
"""No mapping is so long, but a device that is named by mistake never ends."""


def read_file(path: object, parse: Callable[[Mapping[str, Any]], Parsed]) -> Parsed:
    """What ``parse`` makes of the document in a file; its errors name the file.

    Raises:
        MappingError: the file is not TOML, longer than 64 MiB, or no mapping.
        OSError: it cannot be read.
        TypeError: it is not a path.
    """
    place = _path("Mapping.from_file", path)
    with open(place, "rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise MappingError(f"{place} is longer than 64 MiB: it is no mapping file")
    try:
        return parse(tomllib.loads(text.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MappingError(f"{place} is not TOML: {error}") from error
    except MappingError as error:
        raise MappingError(f"{place}: {error}", error.problems) from error


def write_file(path: object, document: Mapping[str, Any]) -> None:
    """Write a mapping's file.

    Raises:
        MappingError: UTF-8 cannot carry a name; nothing was written.
        OSError: it cannot be written.
        TypeError: it is not a path.
    """
    place = _path("Mapping.to_file", path)
    try:
        text = tomli_w.dumps(document).encode()
    except UnicodeEncodeError as error:
        name = error.object[max(0, error.start - 40) : error.end]
        raise MappingError(f"{name!r} holds half a character (a lone surrogate)") from error
    with open(place, "wb") as file:
        file.write(text)


def _path(call: str, given: object) -> str | bytes:
    """A path; a number would be an open file of the process."""
    if not isinstance(given, str | bytes | os.PathLike):
        raise wrong_argument(call, "path", "a str or a PathLike", given)
    path: str | bytes = os.fspath(given)
    return path
