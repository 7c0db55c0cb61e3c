"""How much memory a manifest takes, before it takes it.

A few bytes of JSON become many of Python objects, up to thirty times as many.

1. `decoded_bytes` counts brackets, commas and quotes in the text, which is quick: each stands for
   an object, and none is made.
2. `described_bytes` counts what the decoded manifest lists, before it is checked and described: its
   leaves, pieces and containers, those that only names tell too.
3. `check_memory` refuses what is above the limit, and names the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from xckpt.core.manifest.entries import Manifest, TensorEntry
from xckpt.core.text.shown import readable_bytes
from xckpt.errors import ManifestError

LEAST_LIMIT: Final = 1 << 26
"""A manifest that takes so little (bytes) is always read."""

_TEXT_COSTS: Final[Mapping[bytes, int]] = {b"{": 100, b"[": 64, b",": 32, b'"': 32}
"""Sign -> bytes of the object that begins or ends with it; measured with CPython 3.11."""
COPIES: Final = 3
"""Of the text: as it is stored, spelled again, in strings."""
_LEAF: Final = 900
_GRID: Final = 1200
"""Of tensors that are alike but in name, once."""
_PIECE: Final = 550
_CONTAINER: Final = 800


def decoded_bytes(text: bytes) -> int:
    """An estimate of the memory that a JSON text takes when it is decoded, from above.

    Example:
        >>> decoded_bytes(b'{"a":[1,2]}')
        293
    """
    return COPIES * len(text) + sum(text.count(sign) * cost for sign, cost in _TEXT_COSTS.items())


def described_bytes(manifest: Manifest) -> int:
    """An estimate of the memory that a manifest takes once it is checked and described.

    Example:
        >>> described_bytes(Manifest((TensorEntry("a/b", "int8", (4,), (4,)),), ""))
        2900
    """
    tensors = [leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry)]
    regular = {hash((leaf.shape, leaf.chunk, leaf.shard)) for leaf in tensors}
    pieces = [len(leaf.pieces) for leaf in tensors if leaf.pieces is not None]
    return (
        len(manifest.leaves) * _LEAF
        + (len(regular) + len(pieces)) * _GRID
        + sum(pieces) * _PIECE
        + _count_containers(manifest) * _CONTAINER
    )


def _count_containers(manifest: Manifest) -> int:
    """How many containers there are, by the hashes of their names, which may be long."""
    seen: set[int] = set()
    parents = {leaf.name.rpartition("/")[0] for leaf in manifest.leaves}
    for name in (*parents, *manifest.containers):
        above = name
        while above and hash(above) not in seen:
            seen.add(hash(above))
            above = above.rpartition("/")[0]
    return len(seen)


def check_memory(size: int, what: str, memory_bytes: int) -> None:
    """Refuse what takes more memory than the caller allows.

    Raises:
        ManifestError: it does; the message names the limit and the option.

    Example:
        >>> check_memory(1 << 30, "the manifest of 9 leaves", 256 << 20)
        Traceback (most recent call last):
        ...
        xckpt.errors.ManifestError: the manifest of 9 leaves takes about 1.0 GiB of memory, more \
than memory_bytes (256.0 MiB); raise LoadOptions(memory_bytes=)
    """
    if size > max(memory_bytes, LEAST_LIMIT):
        raise ManifestError(
            f"{what} takes about {readable_bytes(size)} of memory, more than memory_bytes "
            f"({readable_bytes(memory_bytes)}); raise LoadOptions(memory_bytes=)"
        )
