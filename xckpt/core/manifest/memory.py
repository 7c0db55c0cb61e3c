"""How much memory a manifest takes, before it takes it.

A few bytes of JSON become many of Python objects: of leaves five times as many, of the caller's own
values up to thirty times.

1. `leaves_bytes` and `json_bytes` count brackets, commas and quotes in the text, which is quick:
   each stands for an object, and none is made.
2. `described_bytes` counts what the decoded manifest lists, before it is checked and described:
   pieces, and containers, including those that only names imply.
3. `maybe_small` makes few objects of arrays where only those of small chunks are asked for.
4. `check_memory` refuses what is above the limit, and names the option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.manifest.entries import Manifest, TensorEntry, leaf_arrays
from xckpt.core.text.shown import readable_bytes
from xckpt.core.tree import DEEPEST
from xckpt.errors import MemoryLimitError

LEAST_LIMIT: Final = 1 << 26
"""A manifest that takes no more than this (bytes) is always read."""

RAISE: Final = "raise LoadOptions(memory_bytes=), to convert SaveOptions(memory_bytes=)"
"""What to do."""

_JSON_COSTS: Final[Mapping[bytes, int]] = {b"{": 100, b"[": 64, b",": 32, b'"': 32}
"""Sign -> bytes of the object that begins or ends with it; measured with CPython 3.11."""
COPIES: Final = 3
"""Copies of the text that there are at a time: as it is stored, spelled again, in strings."""
_LEAF: Final = 240
"""Bytes of a leaf's entry, and of the tables in which its name is looked up."""
_LIST: Final = 64
_NUMBER: Final = 40
_STRING: Final = 56
_PIECE: Final = 250
"""Bytes of a piece besides its numbers, while it is checked and described; leaves share them."""
_CONTAINER: Final = 800
"""Bytes of a container, when a load makes the tree."""
REQUEST_BYTES: Final = 1 << 8
"""Memory of a requested chunk, without its elements: its row and its digest."""
DESTINATION_BYTES: Final = 1 << 10
"""Memory of a destination, without its elements: the target, its name, its stored metadata."""


def json_bytes(text: bytes) -> int:
    """An estimate of the memory that a JSON text takes as Python objects, from above.

    Example:
        >>> json_bytes(b'{"a":[1,2]}')
        293
    """
    return COPIES * len(text) + sum(text.count(sign) * cost for sign, cost in _JSON_COSTS.items())


def leaves_bytes(text: bytes) -> int:
    """An estimate of the memory that the leaves of a manifest take, from above, by their text.

    Example:
        >>> leaves_bytes(b'[{"kind":"value","name":"step","type":"int","value":"0x7"}]')
        705
    """
    keys = text.count(b'":') - text.count(b'\\":')
    strings = max(0, (text.count(b'"') - text.count(b'\\"')) // 2 - keys)
    numbers = text.count(b",") - text.count(b',"') - text.count(b",{")
    counted = text.count(b"{") * _LEAF + text.count(b"[") * _LIST
    return COPIES * len(text) + counted + strings * _STRING + numbers * _NUMBER


def described_bytes(manifest: Manifest) -> int:
    """An estimate of the memory that checking and describing a manifest takes beside its entries.

    Example:
        >>> described_bytes(Manifest((TensorEntry("a/b", "int8", (4,), (4,)),), ""))
        800
    """
    pieces = {
        id(leaf.pieces): len(leaf.pieces)
        for leaf in manifest.leaves
        if isinstance(leaf, TensorEntry) and leaf.pieces is not None
    }
    return sum(pieces.values()) * _PIECE + _count_containers(manifest) * _CONTAINER


def maybe_small(manifest: Manifest, most: int) -> Iterator[ZarrArray]:
    """The tensors' arrays, but for leaves in pieces whose chunks all have more bytes than that."""
    for leaf in manifest.leaves:
        if not isinstance(leaf, TensorEntry):
            continue
        if leaf.pieces is None or leaf.pieces.least_chunk * item_size(leaf.dtype) <= most:
            yield from leaf_arrays(leaf)


def _count_containers(manifest: Manifest) -> int:
    """How many containers there are, by the hashes of their names, which may be long.

    Names that are too deep count none: they are refused, and to take each of a hundred thousand
    levels off a name is quadratic.
    """
    seen: set[int] = set()
    parents = (leaf.name.rpartition("/")[0] for leaf in manifest.leaves)
    for name in chain(parents, manifest.containers):
        above = name if name.count("/") < DEEPEST else ""
        while above and hash(above) not in seen:
            seen.add(hash(above))
            above = above.rpartition("/")[0]
    return len(seen)


def check_memory(size: int, what: str, memory_bytes: int) -> None:
    """Refuse what takes more memory than the caller allows.

    Raises:
        MemoryLimitError: it does; the message names the limit and the option.

    Example:
        >>> check_memory(1 << 30, "the manifest of 9 leaves", 256 << 20)
        Traceback (most recent call last):
        ...
        xckpt.errors.MemoryLimitError: the manifest of 9 leaves takes about 1.0 GiB of memory, \
more than memory_bytes (256.0 MiB); raise LoadOptions(memory_bytes=), to convert \
SaveOptions(memory_bytes=)
    """
    if size > max(memory_bytes, LEAST_LIMIT):
        raise MemoryLimitError(
            f"{what} takes about {readable_bytes(size)} of memory, more than memory_bytes "
            f"({readable_bytes(memory_bytes)}); {RAISE}"
        )
