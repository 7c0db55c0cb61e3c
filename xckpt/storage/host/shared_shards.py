"""Chunks in zarr shards of a bucket that a rank reads for others too.

1. `ShardReads` asks for those that lie close together in one request, and goes by the place where a
   writer of this package puts a chunk: no request asks for the index of the shard.
2. Each chunk is verified, and handed over.
3. Where one cannot be read, this rank stops waiting for the others, and they for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from xckpt.errors import XckptError
from xckpt.storage.chunks.requests import ChunkRequest
from xckpt.storage.chunks.shards.reads import ShardReads
from xckpt.storage.chunks.window import ChunkWindow

Publish = Callable[[ChunkRequest, NDArray[np.generic]], None]


class SharedShards(ShardReads):
    """Reads chunks of zarr shards for this rank and for others.

    Args:
        window: has the budget.
        publish: takes each chunk that was read and verified.
        fail: takes the error of one that was not.
    """

    def __init__(
        self, window: ChunkWindow, publish: Publish, fail: Callable[[BaseException], None]
    ) -> None:
        super().__init__(window)
        self._publish, self._fail = publish, fail

    def land(self, request: ChunkRequest, data: NDArray[np.generic]) -> None:
        """Hand a verified chunk over."""
        try:
            self._publish(request, data)
        except BaseException as error:
            self._fail(error)
            raise

    def refuse(self, error: XckptError) -> None:
        """Take the error of a chunk."""
        self._fail(error)
        super().refuse(error)
