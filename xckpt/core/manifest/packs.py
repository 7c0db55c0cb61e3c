"""Packs: objects that hold many small chunks, one behind another.

A store takes as long for an object of a few bytes as for one of a megabyte, and a state has many
small leaves. Where a checkpoint has a ``pack_bytes``, each array of chunks up to that size is
*packed*: its chunks have no objects of their own, and it has no zarr.json.

1. A rank appends its packed chunks to a pack, elements in C order, neither padded nor encoded, and
   begins another when it has `PACK_BYTES`. A pack is named by the digest of its content, so that
   ranks need not agree on names.
2. Where each chunk lies is its *place*: the number of its pack, and its first byte there. The
   table of places has the names of all packs, 16 bytes each, and then a place for each packed chunk
   in the order of the digests (`encode_places`). A table of up to `INLINE_BYTES` stands in the
   manifest, so that no reader waits for it; a longer one is the file `PLACES`.
3. A reader joins what lies close together into one request (`runs`), and verifies each chunk.

Two places of one pack are equal or do not meet (`overlap`): ranks may have packs of equal content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from xckpt.core.manifest.entries import Manifest

PACKS: Final = "xckpt.packs"
"""The folder of the packs and of their places."""
PLACES: Final = f"{PACKS}/places"
"""Key of a table of places that is too long for the manifest."""
INLINE_BYTES: Final = 1 << 16
"""A table of places up to this long, bytes, stands in the manifest (`spec/decisions/0014`)."""
PACK_BYTES: Final = 1 << 24
"""A pack gets no further chunk once it has this many bytes."""
NAME_BYTES: Final = 16
"""Bytes of a pack's name in the table of places."""
PLACE: Final = np.dtype([("pack", "<u8"), ("offset", "<u8")])
"""A place as it is stored."""
PACKED: Final = (
    "small arrays lie together in xckpt.packs and are not listed here: xckpt.open reads them, and "
    "a save with SaveOptions(pack_bytes=0) stores each as a zarr array"
)
"""What the root group of a checkpoint with packs says to other readers."""


class ChunkPlace(NamedTuple):
    """Where a packed chunk lies."""

    pack: str
    """Key of the pack, in the root."""
    offset: int
    """Its first byte there."""


class PackRange(NamedTuple):
    """Bytes of a pack that are read at a time."""

    start: int
    stop: int
    members: NDArray[np.int64]
    """The numbers of the chunks that lie there, in the order of their bytes."""


def pack_key(name: bytes) -> str:
    """The key of a pack, from the digest of its content.

    Example:
        >>> pack_key(bytes(15) + b"a")
        'xckpt.packs/00000000000000000000000000000061'
    """
    return f"{PACKS}/{name.hex()}"


def encode_places(names: Sequence[bytes], places: NDArray[np.void]) -> bytes:
    """The table of places: the packs' names, and the places of the chunks.

    Example:
        >>> len(encode_places([bytes(16)], np.zeros(3, PLACE)))
        64
    """
    return b"".join(names) + places.tobytes()


def places_problems(manifest: Manifest, placed: int) -> Iterator[str]:
    """What is wrong with what a manifest says of packs and places.

    Args:
        manifest: one that names packs or places.
        placed: how many chunks lie in packs.
    """
    packs, inline = manifest.packs, manifest.inline_places
    if packs > placed:
        yield f"{packs:,} packs of {placed:,} chunks"
    elif not packs:
        yield "places, but no packs"
    elif inline and manifest.places:
        yield "places in the manifest and the digest of a file of places"
    elif len(inline) > INLINE_BYTES:
        yield f"{len(inline):,} bytes of places in the manifest; at most {INLINE_BYTES:,}"
    elif inline and len(inline) != packs * NAME_BYTES + placed * PLACE.itemsize:
        yield f"{len(inline):,} bytes of places for {packs:,} packs and {placed:,} chunks in them"


def overlap(places: NDArray[np.void], lengths: NDArray[np.int64]) -> int | None:
    """A place that shares some bytes, but not all, with another one of its pack; None if none does.

    Args:
        places: of dtype `PLACE`.
        lengths: bytes of each chunk.

    Example:
        >>> some = np.array([(0, 0), (0, 8), (0, 0), (0, 12)], PLACE)
        >>> overlap(some, np.array([8, 8, 8, 4])), overlap(some[:3], np.array([8, 8, 8]))
        (3, None)
    """
    ends = places["offset"] + lengths.astype(np.uint64)
    order = np.lexsort((ends, places["offset"], places["pack"]))
    pack, low, high = places["pack"][order], places["offset"][order], ends[order]
    same = (pack[1:] == pack[:-1]) & (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    apart = (pack[1:] != pack[:-1]) | (low[1:] >= high[:-1])
    wrong = np.flatnonzero(~(same | apart))
    return int(order[wrong[0] + 1]) if len(wrong) else None


def runs(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], *, gap: int, most: int
) -> Iterator[PackRange]:
    """What to read at a time of one pack, for some chunks of it.

    Args:
        offsets: first byte of each chunk, (n,).
        lengths: bytes of each, (n,), at least 1.
        gap: bytes that may be read needlessly between two chunks.
        most: bytes of a run, but for a longer chunk.

    Example:
        >>> found = runs(np.array([20, 0, 10]), np.array([5, 10, 5]), gap=4, most=100)
        >>> [(each.start, each.stop, each.members.tolist()) for each in found]
        [(0, 15, [1, 2]), (20, 25, [0])]
    """
    order = np.lexsort((lengths, offsets))
    low, high = offsets[order], (offsets + lengths)[order]
    first = 0
    while first < len(low):
        start = int(low[first])
        near = int(np.searchsorted(low, start + most))  # what begins later is not within it
        reach = np.maximum.accumulate(high[first : max(near, first + 1)])
        apart = (low[first + 1 : near] > reach[:-1] + gap) | (reach[1:] > start + most)
        count = int(apart.argmax()) + 1 if apart.any() else len(reach)
        yield PackRange(start, int(reach[count - 1]), order[first : first + count])
        first += count
