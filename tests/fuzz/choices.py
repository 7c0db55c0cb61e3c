"""A fuzzer's bytes as a row of choices, and what such choices do to JSON and to bytes.

libFuzzer changes bytes and keeps those that reach new code. Read as choices, a few of them say
which part of a right document is changed and how, so that what comes out is still nearly right:

1. `Choices` hands out numbers, slices and texts from the front of the bytes, zeros at their end.
2. `edit_json` puts a strange value for one of a document's parts, doubles it, takes it away, or
   exchanges it with another part, several times.
3. `edit_bytes` does the like to bytes without structure.
"""

from __future__ import annotations

import copy
from typing import Any

from conformance.twins.manifests import encoded

__all__ = ["Choices", "edit_bytes", "edit_json", "spelled"]

MOST_EDITS = 8

# fmt: off
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 255, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 53,
    1 << 56, (1 << 56) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1, 1 << 64,
    1 << 80, 10**400, "@digits", "@deep", "@nan", "@large", 0.5, -0.0, 1e308, 5e-324, 1.0,
    "", "x", "0", "1", "a/b", "..", ".", "/", "%", "%25", "%2F", "%2f", "%30", "%zz", "a//b", "/a",
    "a/", "\0", "\n", "\ud800", "naïve", "zarr.json", "c", "n" * 200, "/".join("a" * 70), "%root",
    "tensor", "value", "bytes", "opaque", "int", "bool", "float", "complex", "str", "None",
    "list", "tuple", "dict", "namedtuple:P:a,b", "namedtuple:P:", "namedtuple::a", "pytree:m.C",
    "int8", "uint8", "float32", "bfloat16", "int4", "bool", "complex64", "object", "crc32c",
    "0x1f", "-0x0", "nan", "inf", "1.5,-0.0", "True", "aGk=", "\\u00e9", "\\", "Shard(dim=0)",
    [], [0], [1], [-1], [0, 0], [1, 1], [1 << 62, 1 << 62], [1] * 32, [1] * 33, [[]], [None], [""],
    {}, {"": 0}, {"kind": "tensor"}, {"kind": "value", "name": "x", "type": "int", "value": "0x1"},
    {"kind": "bytes", "name": "x", "type": "str", "size": 1, "chunk": 1},
    {"kind": "tensor", "name": "x", "dtype": "int8", "shape": [0], "chunk": [1]},
    {"kind": "tensor", "name": "x", "dtype": "int8", "shape": [4], "chunk": [2], "shard": [4]},
    {"kind": "tensor", "name": "x", "dtype": "int8", "shape": [2], "pieces": 0},
    {"rank": 1, "offset": "AAAAAAAAAAABAAAAAAAAAA==", "shape": "AQAAAAAAAAABAAAAAAAAAA==",
     "chunk": "AQAAAAAAAAABAAAAAAAAAA=="},
    {"axes": [["x", 2]], "placements": ["Replicate()"]}, {"axes": [["x", 2]], "spec": [["x"], []]},
)
KEYS = (
    "", "x", "name", "kind", "type", "value", "dtype", "shape", "chunk", "shard", "pieces", "cuts",
    "offset", "size", "sharding", "annotation", "leaves", "digests", "root", "codecs", "containers",
    "user", "planner", "axes", "spec", "placements", "format", "version", "digest", "checkpoint",
)
# fmt: on
SPELLED = {
    "@digits": b"1" + b"0" * 5000,
    "@deep": b"[" * 3000 + b"]" * 3000,
    "@nan": b"NaN",
    "@large": b"1e999",
}
"""What Python's own JSON writer would not write."""


class Choices:
    """Bytes that are used up from the front.

    Example:
        >>> choices = Choices(bytes([7, 2, 65, 66, 67]))
        >>> choices.below(5), choices.take(), choices.rest(), choices.below(9)
        (2, b'AB', b'C', 0)
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self.data) - self.at

    def number(self, size: int) -> int:
        """A number of so many bytes."""
        found = int.from_bytes(self.data[self.at : self.at + size], "little")
        self.at = min(len(self.data), self.at + size)
        return found

    def below(self, bound: int) -> int:
        """A number from 0 to below a bound."""
        return self.number(1 if bound <= 256 else 2) % max(1, bound)

    def take(self) -> bytes:
        """Some bytes, as many as the next one says."""
        size = self.number(1)
        start, self.at = self.at, min(len(self.data), self.at + size)
        return self.data[start : self.at]

    def rest(self) -> bytes:
        """All that are left."""
        start, self.at = self.at, len(self.data)
        return self.data[start:]

    def value(self) -> Any:
        """A JSON value."""
        kind = self.below(4)
        if kind == 0:
            return self.number(8) - (1 << 63) * self.below(2)
        if kind == 1:
            return self.take().decode("utf-8", "surrogateescape")
        return copy.deepcopy(STRANGE[self.below(len(STRANGE))])


Slot = tuple[Any, Any]
"""A container and the key or index of one of its parts."""


def _slots(node: Any) -> list[Slot]:
    found: list[Slot] = []
    waiting = [node]
    while waiting:
        at = waiting.pop(0)
        inside = at.items() if isinstance(at, dict) else enumerate(at)
        for key, child in inside:
            found.append((at, key))
            if isinstance(child, dict | list):
                waiting.append(child)
    return found


def edit_json(document: Any, choices: Choices) -> None:
    """Change a JSON document, which must be a dict or a list, in place."""
    for _ in range(MOST_EDITS):
        if not choices.left:
            return
        slots = _slots(document)
        if not slots:
            return
        _edit(slots, choices)


def spelled(document: Any) -> bytes:
    """A changed document as JSON, without spaces."""
    found = encoded(document)
    for sign, spelling in SPELLED.items():
        found = found.replace(f'"{sign}"'.encode(), spelling)
    return found


def _edit(slots: list[Slot], choices: Choices) -> None:
    owner, key = slots[choices.below(len(slots))]
    how = choices.below(9)
    old = owner[key]
    if how == 0:
        del owner[key]
    elif how == 1 and type(old) is int:
        owner[key] = old + choices.number(1) - 128
    elif how == 2 and type(old) is int:
        owner[key] = old * choices.number(1) // 8
    elif how in (1, 2) and isinstance(old, str):
        owner[key] = edit_bytes(old.encode("utf-8", "surrogatepass"), choices).decode(
            "utf-8", "surrogateescape"
        )
    elif how == 3:
        _add(owner, key, copy.deepcopy(old), choices)
    elif how == 4:
        other, there = slots[choices.below(len(slots))]
        owner[key], other[there] = copy.deepcopy(other[there]), copy.deepcopy(old)
    elif how == 5:
        other, there = slots[choices.below(len(slots))]
        owner[key] = copy.deepcopy(other[there])
    elif how == 6:
        _add(owner, key, choices.value(), choices)
    else:
        owner[key] = choices.value()


def _add(owner: Any, key: Any, value: Any, choices: Choices) -> None:
    """Put a new part beside another."""
    if isinstance(owner, list):
        owner.insert(key, value)
        return
    known = choices.below(len(KEYS) + 1)
    new = KEYS[known] if known < len(KEYS) else choices.take().decode("utf-8", "surrogateescape")
    owner[new] = value


def edit_bytes(content: bytes, choices: Choices, other: bytes = b"") -> bytes:
    """Bytes with some changes.

    Args:
        content: the bytes.
        choices: what to change.
        other: bytes from which ranges may come.
    """
    data = bytearray(content)
    for _ in range(MOST_EDITS):
        if not choices.left:
            break
        how, at, size = choices.below(8), choices.below(len(data) + 1), choices.below(64) + 1
        if how == 0:
            data[at : at + 1] = bytes([choices.number(1)])
        elif how == 1 and at < len(data):
            data[at] ^= 1 << size % 8
        elif how == 2:
            data[at:at] = choices.take()
        elif how == 3:
            del data[at : at + size]
        elif how == 4:
            del data[at:]
        elif how == 5:
            data[at:at] = data[at : at + size]
        elif how == 6:
            there = choices.below(len(other) + 1)
            data[at : at + size] = other[there : there + size]
        else:
            replacement = choices.take()
            data[at : at + len(replacement)] = replacement
    return bytes(data)
