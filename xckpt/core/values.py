"""Python values as text, so that they come back as they were.

None, bool, int, float, complex, str and bytes are leaves. Each is one JSON string beside its type's
name, exact for every value: ``repr`` of a float round-trips, an int may have any length, and
characters that UTF-8 cannot encode are escaped.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable
from typing import Final

from xckpt.core.text.arguments import named
from xckpt.errors import CorruptCheckpointError, ManifestError, UnsupportedLeafError

Deserialise = Callable[[bytes], object]
"""The inverse of a caller's serialiser."""

Value = None | bool | int | float | complex | str | bytes


def _escape(text: str) -> str:
    """A text with backslashes and lone surrogates escaped."""
    return re.sub(
        r"[\\\ud800-\udfff]",
        lambda match: "\\\\" if match[0] == "\\" else f"\\u{ord(match[0]):04x}",
        text,
    )


def _unescape(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        if not match[1]:
            raise ValueError("a backslash that begins no escape")
        return "\\" if match[1] == "\\" else chr(int(match[1][1:], 16))

    return re.sub(r"\\(\\|u[0-9a-f]{4}|)", plain, text)


def _nothing(_: None) -> str:
    return ""


def _both_parts(value: complex) -> str:
    return f"{value.real!r},{value.imag!r}"


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


_ENCODE: Final[dict[type, tuple[str, Callable[..., str]]]] = {
    type(None): ("None", _nothing),
    bool: ("bool", str),
    int: ("int", hex),
    float: ("float", repr),
    complex: ("complex", _both_parts),
    str: ("str", _escape),
    bytes: ("bytes", _base64),
}

_DECODE: Final[dict[str, Callable[[str], Value]]] = {
    "None": lambda text: None,
    "bool": lambda text: {"True": True, "False": False}[text],
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda text: complex(*(float(part) for part in text.split(","))),
    "str": _unescape,
    "bytes": lambda text: base64.b64decode(text, validate=True),
}

_NUMBER = r"(?:nan|-?inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"

_FORMS: Final = {
    "int": re.compile("-?0x[0-9a-f]+"),
    "float": re.compile(_NUMBER),
    "complex": re.compile(f"{_NUMBER},{_NUMBER}"),
    "None": re.compile(""),
}
"""The spelling of a type's text, where Python would accept more (``" 1_0"``)."""

KINDS: Final = frozenset(_DECODE)
"""Names of the types that the format carries."""


class ValueText(io.BytesIO):
    """The text of a value whose kind is only known when it is written.

    Args:
        value: a Python value that the format carries.

    Example:
        >>> ValueText(7).kind, ValueText(7).getvalue()
        ('int', b'0x7')
    """

    def __init__(self, value: object) -> None:
        self.kind: str = str(value_kind(value))
        super().__init__(encode_content("", self.kind, value))


def value_kind(leaf: object) -> str | None:
    """The name of a Python value's type if the format carries it, else None.

    Subclasses (an IntEnum, a library's own str) are refused, since they would not come back.

    Example:
        >>> value_kind(True), value_kind(b"x"), value_kind({1, 2})
        ('bool', 'bytes', None)
    """
    codec = _ENCODE.get(type(leaf))
    return codec[0] if codec else None


def encode_value(value: object) -> str:
    """The text of a Python value.

    Raises:
        UnsupportedLeafError: the format does not carry its type.

    Example:
        >>> encode_value(255), encode_value(float("-inf")), encode_value(b"hi")
        ('0xff', '-inf', 'aGk=')
    """
    codec = _ENCODE.get(type(value))
    if codec is None:
        raise UnsupportedLeafError(f"the format carries no {type(value).__qualname__}")
    _, encode = codec
    return encode(value)


def decode_value(kind: str, text: str) -> Value:
    """The Python value of a kind and its text; inverse of `encode_value`.

    Raises:
        ManifestError: the text does not spell a value of this kind.

    Example:
        >>> decode_value("complex", "1.5,-0.0")
        (1.5-0j)
    """
    try:
        if kind in _FORMS and not _FORMS[kind].fullmatch(text):
            raise ValueError(text)
        return _DECODE[kind](text)
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise ManifestError(f"{text[:40]!r} is not {named(kind[:40])} value") from error


def shown_value(value: object) -> str:
    """A value as Python writes it; an int that Python refuses to write in decimal, in hex.

    Example:
        >>> shown_value("a"), len(shown_value(1 << 100_000))
        ("'a'", 25003)
    """
    try:
        return repr(value)
    except ValueError:
        return hex(value) if isinstance(value, int) else object.__repr__(value)


def encode_content(
    name: str, kind: str, value: object, serialise: Callable[[object], bytes] | None = None
) -> bytes:
    """The text of a value as UTF-8, or what ``serialise`` makes of an opaque object.

    Raises:
        UnsupportedLeafError: ``serialise`` failed; names the leaf.
        TypeError: it gave no bytes; names the leaf.

    Example:
        >>> encode_content("step", "int", 7), encode_content("years", "opaque", {3}, repr)
        Traceback (most recent call last):
        TypeError: years: serialise gave a str, not bytes
    """
    if kind != "opaque" or serialise is None:
        return encode_value(value).encode("utf-8", "surrogatepass")
    try:
        content = serialise(value)
    except Exception as error:
        raise UnsupportedLeafError(
            f"{name or 'the root'}: serialise failed on its {type(value).__name__} with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(content, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        given = type(content).__name__
        raise TypeError(f"{name or 'the root'}: serialise gave {named(given)}, not bytes")
    return content


def decode_content(
    name: str, kind: str, content: bytes, deserialise: Deserialise | None = None
) -> object:
    """The value of a leaf whose text is stored as UTF-8, or the object of one that was serialised.

    Without ``deserialise`` opaque bytes come back as they are, so nothing is unpickled unasked.

    Raises:
        CorruptCheckpointError: the content does not spell a value of this kind.
        UnsupportedLeafError: ``deserialise`` failed; names the leaf.

    Example:
        >>> decode_content("step", "int", b"0x7"), decode_content("blob", "opaque", b"0x7")
        (7, b'0x7')
        >>> decode_content("year", "opaque", b"2024", int)
        2024
    """
    if kind == "opaque":
        return content if deserialise is None else _object(name, content, deserialise)
    try:
        return decode_value(kind, content.decode())
    except (UnicodeDecodeError, ManifestError) as error:
        raise CorruptCheckpointError(
            f"{name or 'the root'}: its {len(content):,} bytes are not {named(kind)} value"
        ) from error


def _object(name: str, content: bytes, deserialise: Deserialise) -> object:
    try:
        return deserialise(content)
    except Exception as error:
        raise UnsupportedLeafError(
            f"{name or 'the root'}: deserialise failed on its {len(content):,} bytes with "
            f"{type(error).__name__}: {error}; load without deserialise= to get the bytes"
        ) from error
