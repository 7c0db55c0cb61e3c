"""Python values as text, so that they come back as they were.

None, bool, int, float, complex, str and bytes are leaves of their own. Each is one JSON string next
to its type's name, exact for every value (``repr`` of a float round-trips; an int has any length).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Final

from xckpt.errors import ManifestError, UnsupportedLeafError

__all__ = ["Value", "decode_value", "encode_value", "value_kind"]

Value = None | bool | int | float | complex | str | bytes

_ENCODE: Final[dict[type, tuple[str, Callable[..., str]]]] = {
    type(None): ("None", lambda value: ""),
    bool: ("bool", str),
    int: ("int", hex),
    float: ("float", repr),
    complex: ("complex", lambda value: f"{value.real!r},{value.imag!r}"),
    str: ("str", str),
    bytes: ("bytes", lambda value: base64.b64encode(value).decode("ascii")),
}

_DECODE: Final[dict[str, Callable[[str], Value]]] = {
    "None": lambda text: None,
    "bool": lambda text: {"True": True, "False": False}[text],
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda text: complex(*(float(part) for part in text.split(","))),
    "str": str,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}


def value_kind(leaf: object) -> str | None:
    """The name of a Python value's type if the format carries it, else None.

    Subclasses (an IntEnum, a str of some library) are not the type itself and would not come back.

    Example:
        >>> value_kind(True), value_kind(b"x"), value_kind({1, 2})
        ('bool', 'bytes', None)
    """
    found = _ENCODE.get(type(leaf))
    return found[0] if found else None


def encode_value(value: object) -> str:
    """The text of a Python value.

    Raises:
        UnsupportedLeafError: it is none of the types that the format carries.

    Example:
        >>> encode_value(255), encode_value(float("-inf")), encode_value(b"hi")
        ('0xff', '-inf', 'aGk=')
    """
    found = _ENCODE.get(type(value))
    if found is None:
        raise UnsupportedLeafError(f"a {type(value).__qualname__} is no value of the format")
    return found[1](value)


def decode_value(kind: str, text: str) -> Value:
    """The Python value of a kind and its text; inverse of `encode_value`.

    Raises:
        ManifestError: the text is no such value.

    Example:
        >>> decode_value("complex", "1.5,-0.0")
        (1.5-0j)
    """
    try:
        return _DECODE[kind](text)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ManifestError(f"{text[:40]!r} is no {kind} value") from error
