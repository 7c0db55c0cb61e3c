"""Positions of data loaders in a checkpoint: on the same ranks, and on more or fewer.

Eight files of ten numbers each; rank r of n reads the files r, r + n, r + 2 n, ... What was read
before a save, and what after a load, is together each number once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import pytest
import torch
from grain.experimental import ElasticIterator, InterleaveIterDataset
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import xckpt
from conformance.implementations.threads import ThreadGroup, results

FILES, LENGTH = 8, 10
RESHARDED = pytest.mark.parametrize("before, after", [(4, 4), (4, 2), (2, 4)])


def files_of(rank: int, ranks: int) -> range:
    return range(rank, FILES, ranks)


def by_file(positions: dict[str, Sequence[Any]]) -> list[Any]:
    """What each file's position is, from those of all ranks that saved, each in its order."""
    return [positions[f"rank{n % len(positions)}"][n // len(positions)] for n in range(FILES)]


class Files(IterableDataset[int]):
    """Files in turns; its state is where it is in each."""

    def __init__(self, files: Sequence[int], positions: Sequence[int] | None = None) -> None:
        self.files = files
        self.positions = list(positions or [0] * len(files))

    def __iter__(self) -> Iterator[int]:
        while min(self.positions) < LENGTH:
            for n, file in enumerate(self.files):
                if self.positions[n] < LENGTH:
                    self.positions[n] += 1
                    yield file * LENGTH + self.positions[n] - 1

    def state_dict(self) -> dict[str, Any]:
        return {"positions": list(self.positions)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.positions = list(state["positions"])


@RESHARDED
def test_stateful_data_loaders(tmp_path: Path, before: int, after: int) -> None:
    def train(group: ThreadGroup) -> list[int]:
        data = Files(files_of(group.rank, group.size))
        loader = StatefulDataLoader(data, batch_size=2)
        seen = [next(batches) for batches in [iter(loader)] for _ in range(3)]
        state = {"step": 3, "data": xckpt.PerRank(loader.state_dict())}
        xckpt.save(tmp_path, state, group=group)
        return torch.cat(seen).tolist()

    def resume(group: ThreadGroup) -> list[int]:
        files = files_of(group.rank, group.size)
        if before == after:
            loader = StatefulDataLoader(Files(files), batch_size=2)
            like = {"step": 0, "data": xckpt.PerRank(loader.state_dict())}
            loader.load_state_dict(xckpt.load(tmp_path, like, group=group)["data"].value)
        else:
            like = {"step": 0, "data": xckpt.PerRank.all}
            saved: Any = xckpt.load(tmp_path, like, group=group)["data"]
            where = by_file({rank: _positions(state) for rank, state in saved.items()})
            data = Files(files, [where[file] for file in files])
            loader = StatefulDataLoader(data, batch_size=2)
        return torch.cat(list(loader)).tolist()

    seen = [number for part in results(before, train) for number in part]
    left = [number for part in results(after, resume) for number in part]
    assert len(seen) == 6 * before and sorted([*seen, *left]) == list(range(FILES * LENGTH))


def _positions(loader_state: Any) -> list[int]:
    """The data set's own state in that of its loader, which holds it once or more often."""
    found: list[list[int]] = []

    def look(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else ():
            if key == "positions":
                found.append(list(value))
            look(value)

    look(loader_state)
    assert found and all(each == found[0] for each in found)
    return found[0]


def grain_files(rank: int, ranks: int) -> Any:
    files = [grain.MapDataset.range(n * LENGTH, (n + 1) * LENGTH) for n in files_of(rank, ranks)]
    return iter(InterleaveIterDataset(files, cycle_length=2))


@RESHARDED
def test_shard_states_of_grain(tmp_path: Path, before: int, after: int) -> None:
    def train(group: ThreadGroup) -> list[int]:
        data = grain_files(group.rank, group.size)
        seen = [int(next(data)) for _ in range(6)]
        xckpt.save(tmp_path, {"data": xckpt.PerRank(list(data.get_shard_states()))}, group=group)
        return seen

    def resume(group: ThreadGroup) -> list[int]:
        saved = xckpt.load(tmp_path, {"data": xckpt.PerRank.all}, group=group)["data"]
        states = by_file(saved)
        data = grain_files(group.rank, group.size)
        data.set_shard_states([states[file] for file in files_of(group.rank, group.size)])
        return [int(number) for number in data]

    seen = [number for part in results(before, train) for number in part]
    left = [number for part in results(after, resume) for number in part]
    assert len(seen) == 6 * before and sorted([*seen, *left]) == list(range(FILES * LENGTH))


@RESHARDED
def test_elastic_iterators_of_grain(tmp_path: Path, before: int, after: int) -> None:
    """Their state is the same on all ranks: a plain value."""

    def data_of(group: ThreadGroup) -> Any:
        shard = grain.sharding.ShardOptions(shard_index=group.rank, shard_count=group.size)
        return iter(ElasticIterator(grain.MapDataset.range(80), 8, shard))

    def train(group: ThreadGroup) -> list[int]:
        data = data_of(group)
        seen = [number for _ in range(3) for number in next(data).tolist()]
        xckpt.save(tmp_path, {"data": data.get_state()}, group=group)
        return seen

    def resume(group: ThreadGroup) -> list[int]:
        data = data_of(group)
        data.set_state(xckpt.load(tmp_path, {"data": data.get_state()}, group=group)["data"])
        return [number for batch in data for number in batch.tolist()]

    seen = [number for part in results(before, train) for number in part]
    left = [number for part in results(after, resume) for number in part]
    assert sorted(seen) == list(range(24)) and sorted([*seen, *left]) == list(range(80))
