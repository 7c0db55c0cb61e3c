"""The packs of a base: which of their chunks are unchanged in a save, and which packs are shared.

1. A rank compares digests before it packs a chunk. A chunk that is equal in the base waits here,
   with its place in the base's pack (`EqualChunks.note`); its elements are not kept.
2. In the end (`EqualChunks.share`) a pack of which at least half of the bytes are still used gets a
   second name, under which it is a pack of the new checkpoint too. Its name is the digest of its
   content, so that several ranks may do so.
3. The chunks of any other pack are packed again: a checkpoint never takes more than twice the bytes
   of its small chunks, however long a chain of bases grows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from xckpt.core.geometry.grid import ZarrArray
from xckpt.core.plan.items import WriteItem
from xckpt.storage.array import digest_bytes
from xckpt.storage.base.chunks import BaseChunks


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


@dataclass(frozen=True, slots=True)
class EqualChunks:
    """The unchanged packed chunks of one rank.

    Args:
        base: the base's chunks.
        folder: the root group of the save.
    """

    base: BaseChunks
    folder: str
    _by_pack: dict[str, list[EqualChunk]] = field(default_factory=dict[str, list[EqualChunk]])

    def note(self, pack: str, chunk: EqualChunk) -> None:
        """A chunk is equal in a pack of the base."""
        self._by_pack.setdefault(pack, []).append(chunk)

    def share(
        self, *, verify: bool, synced: bool, refuse: Callable[[str], None]
    ) -> Iterator[tuple[str, list[EqualChunk]]]:
        """Share packs.

        Args:
            verify: whether a pack's chunks are read first.
            synced: whether a copy is to be durable; see `BaseChunks.share`.
            refuse: called with the reason if a pack that is worth sharing is not shared.

        Yields:
            The key of each pack that is shared and its chunks; then an empty key, and all chunks
            that must be packed again.
        """
        rest: list[EqualChunk] = []
        for key, chunks in self._by_pack.items():
            size = self.base.size(key)
            used = {chunk.offset: chunk.nbytes for chunk in chunks}
            ends = max(offset + nbytes for offset, nbytes in used.items())
            if ends > size or 2 * sum(used.values()) < size:
                rest += chunks
                continue
            leaf = chunks[0].array.leaf
            damaged = verify and not self._is_sound(key, chunks)
            problem = f"{leaf}: the base's pack is damaged" if damaged else ""
            new = os.path.join(self.folder, key)
            problem = problem or self.base.share(leaf, key, new, size, synced=synced)
            if problem:
                refuse(problem)
                rest += chunks
            else:
                yield key, chunks
        yield "", rest

    def _is_sound(self, key: str, chunks: list[EqualChunk]) -> bool:
        """Whether a pack holds the elements that it should."""
        return all(
            digest_bytes(self.base.read(key, chunk.offset, chunk.nbytes)) == chunk.digest
            for chunk in chunks
        )
