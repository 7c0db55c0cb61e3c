"""torch's distributed checkpoints (DCP), through its own planner and storage.

One process plays the ranks in turn: each makes a local plan of its boxes, the coordinator's global
step deduplicates and validates, each writes its share to files. That is what `dcp.save` does over
collectives; the plans' items are those that any sharded tensor hands to DCP (`WriteItem`).
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from conformance.implementation import Array, Box, Held, Refused, Wanted
from conformance.implementations.meshes import by_name
from conformance.implementations.torch_arrays import from_torch, to_torch, torch_dtype, unloaded

__all__ = ["IMPLEMENTATION", "TorchDCP"]

Data = NDArray[np.generic]


# What it warns of, it raises too.
logging.getLogger("torch.distributed.checkpoint.default_planner").setLevel(logging.ERROR)


class _Saver(DefaultSavePlanner):
    """DCP's planner, over a rank's boxes."""

    def __init__(self, state: Mapping[str, Held]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state = state
        self.data: dict[tuple[str, Box], torch.Tensor] = {}
        self.asked: list[tuple[str, Box]] = []

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for name, held in self.state.items():
            properties = TensorProperties(torch_dtype(held.array.dtype))
            for number, shard in enumerate(held.shards):
                chunk = _chunk(shard.box)
                index = MetadataIndex(name, chunk.offsets, number)
                data = TensorWriteData(chunk, properties, torch.Size(held.array.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.data[name, shard.box] = to_torch(shard.data, held.array.dtype)
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        self.asked.append((write_item.index.fqn, box))
        return self.data[write_item.index.fqn, box]


class _Loader(DefaultLoadPlanner):
    """DCP's plan of reads, into a rank's boxes."""

    def __init__(self, wanted: Mapping[str, Wanted], metadata: Metadata) -> None:
        super().__init__()
        self.wanted = wanted
        self.stored = metadata
        self.boxes = {
            name: [unloaded(wish.array, box.sizes) for box in wish.boxes]
            for name, wish in wanted.items()
        }

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, wish in self.wanted.items():
            stored = self.stored.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [_chunk(box) for box in wish.boxes]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        tensor = self.boxes[read_item.dest_index.fqn][number]
        for dim, (low, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            tensor = tensor.narrow(dim, low, size)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The boxes are written in place."""

    def loaded(self) -> dict[str, list[Data]]:
        return {
            name: [from_torch(tensor, wish.array.dtype) for tensor in self.boxes[name]]
            for name, wish in self.wanted.items()
        }


class TorchDCP:
    """DCP with its defaults, except that the caller chooses whether to overwrite."""

    # Without the build, +cpu or +cu130: it judges the same.
    name = f"torch DCP {torch.__version__.split('+')[0]}"
    limits: Sequence[str] = (
        "dtypes that torch lacks (int4, float4_e2m1fn)",
        "sound plans that its validation takes for faulty",
        "verify: its files carry no checksums",
        "saving the same again for the same files: each save has its own identity",
    )

    def __init__(self) -> None:
        self._asked: list[list[tuple[str, Box]]] = []

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        planners = [_Saver(state) for state in ranks]
        writers = [FileSystemWriter(path, overwrite=overwrite) for _ in ranks]
        plans: list[SavePlan] = []
        for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
            planner.set_up_planner({}, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(planner.create_local_plan())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it overwrites, as it should
            plans = [w.prepare_local_plan(plan) for w, plan in zip(writers, plans, strict=True)]
        try:
            plans, metadata = planners[0].create_global_plan(plans)
        except ValueError as error:
            if not _make_up_arrays(ranks):
                raise
            raise Refused(f"its validation says of a sound plan: {_complaint(error)}") from error
        plans = writers[0].prepare_global_plan(plans)
        results: list[Any] = []
        for planner, writer, plan in zip(planners, writers, plans, strict=True):
            future = writer.write_data(planner.finish_plan(plan), planner)
            results.append(future.wait())
        writers[0].finish(metadata, results)
        self._asked = [planner.asked for planner in planners]

    def load(
        self, path: Path, ranks: Sequence[Mapping[str, Wanted]]
    ) -> list[dict[str, list[Data]]]:
        loaded: list[dict[str, list[Data]]] = []
        for rank, wanted in enumerate(ranks):
            reader = FileSystemReader(path)
            metadata = reader.read_metadata()
            planner = _Loader(wanted, metadata)
            reader.set_up_storage_reader(metadata, rank == 0)
            (plan,) = reader.prepare_global_plan(
                [reader.prepare_local_plan(planner.create_local_plan())]
            )
            reader.read_data(planner.finish_plan(plan), planner).wait()
            loaded.append(planner.loaded())
        return loaded

    def list(self, path: Path) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, stored in FileSystemReader(path).read_metadata().state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            found[name] = Array(tuple(stored.size), dtype)
        return found

    def delete(self, path: Path) -> None:
        shutil.rmtree(path)

    def verify(self, path: Path) -> Sequence[str]:
        raise Refused("verify: its files carry no checksums")

    def written(self, path: Path) -> dict[str, Sequence[tuple[int, Box]]]:
        found: dict[str, Sequence[tuple[int, Box]]] = {}
        for rank, asked in enumerate(self._asked):
            for name, box in asked:
                found[name] = [*found.get(name, ()), (rank, box)]
        return found


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _make_up_arrays(ranks: Sequence[Mapping[str, Held]]) -> bool:
    """Whether the boxes, each taken once, hold every element of every array once."""
    for held in by_name(ranks).values():
        times = np.zeros(held[0].array.shape, np.int64)
        for box in {shard.box for each in held for shard in each.shards}:
            times[(*box.region, ...)] += 1
        if (times != 1).any() or len({each.array for each in held}) > 1:
            return False
    return True


def _complaint(error: ValueError) -> str:
    known = ("out of bounds", "overlapping", "invalid fill")
    return next((words for words in known if words in str(error)), str(error))


IMPLEMENTATION = TorchDCP()
