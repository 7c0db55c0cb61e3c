"""The packs of a base: which of their chunks are unchanged in a save, and which packs are shared.

1. A rank compares digests before it packs a chunk. A chunk that is equal in the base waits here,
   with its place in the base's pack (`EqualChunks.note`); its elements are not kept.
2. In the end (`EqualChunks.packs`) a pack of which at least half of the bytes are still used is
   shared: it is a pack of the new checkpoint too. Its name is the digest of its content, so that
   several ranks may do so.
3. The chunks of any other pack are packed again: a checkpoint never takes more than twice the bytes
   of its small chunks, however long a chain of bases grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.plan.items import WriteItem
from xckpt.storage.array import digest_bytes


class EqualChunk(NamedTuple):
    """A chunk that the base has in a pack, as it is."""

    item: WriteItem
    """Makes its elements, if they are needed after all."""
    array: ZarrArray
    number: int
    """Its number in the array."""
    nbytes: int
    digest: bytes
    offset: int
    """Its first byte in the base's pack."""


class EqualPack(NamedTuple):
    """A pack that is worth sharing."""

    key: str
    nbytes: int
    chunks: list[EqualChunk]

    @property
    def leaf(self) -> str:
        """One that it holds a chunk of."""
        return self.chunks[0].array.leaf


class BasePacks(Protocol):
    """The packs of a base."""

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of packs; 0 of one that is not there."""
        ...

    def read(self, key: str, offset: int, nbytes: int) -> bytes:
        """A part of a pack; empty if it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class EqualChunks:
    """The unchanged packed chunks of one rank."""

    _by_pack: dict[str, list[EqualChunk]] = field(default_factory=dict[str, list[EqualChunk]])

    def note(self, pack: str, chunk: EqualChunk) -> None:
        """A chunk is equal in a pack of the base."""
        self._by_pack.setdefault(pack, []).append(chunk)

    def packs(self, base: BasePacks) -> tuple[list[EqualPack], list[EqualChunk]]:
        """The packs that are worth sharing, and the chunks that must be packed again."""
        worth: list[EqualPack] = []
        rest: list[EqualChunk] = []
        sizes = base.sizes(list(self._by_pack))
        for (key, chunks), size in zip(self._by_pack.items(), sizes, strict=True):
            used = {chunk.offset: chunk.nbytes for chunk in chunks}
            ends = max(offset + nbytes for offset, nbytes in used.items())
            if ends > size or 2 * sum(used.values()) < size:
                rest += chunks
            else:
                worth.append(EqualPack(key, size, chunks))
        return worth, rest


def is_sound(pack: EqualPack, base: BasePacks) -> bool:
    """Whether a pack holds the elements that it should."""
    return all(
        digest_bytes(base.read(pack.key, chunk.offset, chunk.nbytes)) == chunk.digest
        for chunk in pack.chunks
    )


def by_item(
    chunks: Iterable[tuple[WriteItem, ZarrArray, int]],
) -> list[tuple[WriteItem, ZarrArray, set[int]]]:
    """The numbers of chunks, or of other units, by the item that makes them."""
    wanted: dict[int, tuple[WriteItem, ZarrArray, set[int]]] = {}
    for item, array, number in chunks:
        wanted.setdefault(id(item), (item, array, set[int]()))[2].add(number)
    return list(wanted.values())
