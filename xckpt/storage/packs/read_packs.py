"""Reading packed chunks: those that lie close together in one request.

1. The chunks that are wanted are put in order by their places (`xckpt.storage.packs.places`).
2. Ranges of a pack (`xckpt.core.manifest.packs.runs`) are asked for, within the budget.
3. Each chunk of a range is verified, and its elements are handed over
   (`xckpt.storage.chunks.range_reads`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xckpt.core.manifest.packs import runs
from xckpt.errors import XckptError
from xckpt.storage.chunks.range_reads import GAP_BYTES, RANGE_BYTES, Placed, RangeReads
from xckpt.storage.chunks.requests import ChunkRequest


class PackReads(RangeReads):
    """Reads packed chunks for a window; their places are fetched already."""

    def read(self, requests: Iterable[ChunkRequest]) -> None:
        """Begin to read chunks, within the window's budget."""
        packs: dict[str, list[Placed]] = {}
        places, wanted = self.window.source.integrity.places, list(requests)
        chunks = [request.chunk for request in wanted]
        numbers = [places.first(chunk.array) + chunk.number for chunk in chunks]
        known = places.places(np.array(numbers, np.int64))
        for request, place in zip(wanted, known, strict=True):
            try:
                chunk = request.chunk
                place = place or places.place(chunk.array, chunk.number)
            except XckptError as error:
                self.window.refuse(error)
                continue
            packs.setdefault(place.pack, []).append(Placed(request, place.offset))
        for key, placed in packs.items():
            offsets = [offset for _, offset in placed]
            lengths = [request.nbytes for request, _ in placed]
            for each in runs(offsets, lengths, gap=GAP_BYTES, most=RANGE_BYTES):
                self.begin(key, each, [placed[number] for number in each.members])
