"""Leaves that are neither tensors nor Python values: bytes to the checkpoint, objects to the caller.

A save's ``serialise`` makes the bytes. Only the caller's ``deserialise`` makes an object of them
again; without it they stay bytes, so nothing in a checkpoint is ever unpickled unasked.
"""

from __future__ import annotations

from collections.abc import Callable

from xckpt.core.metadata import BytesStorageMetadata, TensorStorageMetadata
from xckpt.core.values import decode_content
from xckpt.errors import UnsupportedLeafError

Deserialise = Callable[[bytes], object]

OPAQUE = BytesStorageMetadata("opaque")


def check_object_target(
    name: str,
    like: object,
    stored: TensorStorageMetadata | BytesStorageMetadata | None,
    deserialise: Deserialise | None,
) -> None:
    """Refuse an object of an unknown class as a target, but for one that is made of bytes.

    Raises:
        UnsupportedLeafError: names the leaf and says what to give.

    Example:
        >>> check_object_target("day", object(), OPAQUE, lambda content: content)
    """
    if stored == OPAQUE and deserialise is not None:
        return
    advice = "give an array, a tensor or a jax.ShapeDtypeStruct"
    if stored == OPAQUE:
        advice = (
            "the checkpoint holds the bytes that a serialiser made of it: pass "
            "options=LoadOptions(deserialise=...) to make it again, or b'' to take the bytes"
        )
    kind = f"{type(like).__module__}.{type(like).__qualname__}"
    raise UnsupportedLeafError(f"{name or 'the root'}: a {kind} is no target; {advice}")


def decode_object(name: str, kind: str, content: bytes, deserialise: Deserialise | None) -> object:
    """The value or object of a leaf that is stored as bytes.

    Raises:
        UnsupportedLeafError: ``deserialise`` failed; names the leaf.
        CorruptCheckpointError: the content does not spell a value of its kind.

    Example:
        >>> decode_object("day", "opaque", b"2024", int), decode_object("n", "int", b"0x7", int)
        (2024, 7)
    """
    if kind != OPAQUE.kind or deserialise is None:
        return decode_content(name, kind, content)
    try:
        return deserialise(content)
    except Exception as error:
        raise UnsupportedLeafError(
            f"{name or 'the root'}: deserialise failed on its {len(content):,} bytes with "
            f"{type(error).__name__}: {error}; load it without, to have the bytes"
        ) from error
