"""torch's FileSystemWriter with several files a rank, so that its memory stays bounded.

torch keeps each tensor that it has written until the file is complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

__all__ = ["SplitWriter", "item_bytes"]


class SplitWriter(dcp.FileSystemWriter):
    """torch's writer, with as many files a rank as memory asks for."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(folder)
        self.file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of one file after the other's."""
        results: list[WriteResult] = []
        for number, items in enumerate(_files(plan.items, self.file_bytes)):
            own = dataclasses.replace(
                plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_"
            )
            part = dataclasses.replace(plan, items=items, storage_data=own)
            written = super().write_data(part, planner)
            results.extend(written.wait())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _files(items: Sequence[WriteItem], most: int) -> Iterator[list[WriteItem]]:
    """Items in runs of at most ``most`` bytes; a larger one is a run of its own."""
    run: list[WriteItem] = []
    size = 0
    for item in items:
        nbytes = item_bytes(item)
        if run and size + nbytes > most:
            yield run
            run, size = [], 0
        run.append(item)
        size += nbytes
    if run:
        yield run


def item_bytes(item: WriteItem) -> int:
    """Bytes of an item's box; 0 for a value."""
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
