"""Ranks of a group convert and load together: the same bytes, each rank reading its own part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

import xckpt
from conformance.implementations.threads import ThreadGroup, run_ranks
from tests.convert.test_run import (
    HIDDEN,
    LAYERS,
    MAPPING,
    WIDTH,
    files,
    flax_like,
    same,
    torch_like,
)
from tests.support import jax_jobs
from tests.support.ranks import Ranks
from tests.support.sharded_arrays import Wanted
from xckpt.convert import Mapping, Rule
from xckpt.convert.mapped_load import MappedLoadPlanner
from xckpt.convert.run import Converted, convert
from xckpt.convert.units import run as units_run
from xckpt.core.geometry.box import Boxes
from xckpt.core.plan.report import Strictness
from xckpt.engine.load import load_state
from xckpt.errors import XckptError
from xckpt.formats.xckpt import XckptSource
from xckpt.mapping.operations import Transpose
from xckpt.storage import ZarrStorageReader
from xckpt.storage.budget import Pool

OPTIONS = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "source"
    xckpt.save(path, torch_like(), options=OPTIONS)
    return path


def converted(rank: int, source: str, target: str) -> Converted:
    """On a rank of a gloo group."""
    return convert(source, target, mapping=MAPPING, options=OPTIONS)


@pytest.mark.parametrize("name", ["checkpoint", "model.safetensors"])
def test_ranks_write_the_same_bytes(
    source: Path, tmp_path: Path, two_ranks: Ranks, name: str
) -> None:
    alone = tmp_path / "alone" / name
    alone.parent.mkdir()
    done = convert(source, alone, mapping=MAPPING, options=OPTIONS)
    assert two_ranks.run(converted, str(source), str(tmp_path / name)) == [done, done]
    if name == "checkpoint":
        assert files(tmp_path / name) == files(alone)
    else:
        assert (tmp_path / name).read_bytes() == alone.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"alone", name}


def converted_while_another_does_not(rank: int, source: str, target: str) -> list[int]:
    group: Any = dist.new_group()  # no other call can begin on it afterwards
    if rank == 1:
        time.sleep(2.0)
        return []
    with pytest.raises(xckpt.RanksFailedError) as caught:
        convert(source, target, group=group, timeout=0.5)
    return [failure.rank for failure in caught.value.failures]


def test_a_silent_rank_is_named_within_the_timeout(
    source: Path, tmp_path: Path, two_ranks: Ranks
) -> None:
    at = str(source), str(tmp_path / "never")
    assert two_ranks.run(converted_while_another_does_not, *at) == [[1], []]
    assert not list(tmp_path.iterdir())


def sharded_there_and_back(rank: int, source: str) -> None:
    """A sharded target of the mapping, and a sharded target of its inverse from what that saved."""
    mesh = init_device_mesh("cpu", (2,))
    expected = flax_like(torch_like())
    like = blank(expected, mesh)
    loaded = xckpt.load(source, like, mapping=MAPPING)
    same(whole(loaded), expected)
    path = f"{source}-flax"
    xckpt.save(path, loaded, options=OPTIONS)
    back = blank(torch_like(), mesh)
    xckpt.load_into(path, back, mapping=MAPPING.inverse())
    same(whole(back), torch_like())


def blank(tree: Any, mesh: Any) -> Any:
    """Targets like the arrays of a tree, each sharded along the axis that suits its size."""
    if isinstance(tree, dict):
        return {key: blank(value, mesh) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray):
        return 0
    axis = next((axis for axis, size in enumerate(tree.shape) if size % 5), None)
    placement = Replicate() if axis is None else Shard(axis)
    return zeros(tree.shape, device_mesh=mesh, placements=[placement])


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor().numpy() if isinstance(tree, DTensor) else tree


def test_dtensors_there_and_back(source: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    path = tmp_path / "source"
    two_ranks.run(save_sharded, str(path))
    two_ranks.run(sharded_there_and_back, str(path))


def save_sharded(rank: int, path: str) -> None:
    """The model as FSDP over two ranks holds it."""
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: distribute_tensor(torch.from_numpy(value), mesh, [Shard(0)])
        if isinstance(value, np.ndarray)
        else value
        for name, value in torch_like().items()
    }
    xckpt.save(path, state, options=OPTIONS)


def jax_ranks(source: str, target: str) -> list[float]:
    """On a process of jax.distributed: convert, and load into an array over all its devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    convert(source, target, mapping=MAPPING, options=OPTIONS)
    mesh = jax.make_mesh((4,), ("model",))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    shape = jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), np.float32, sharding=sharding)
    like: Any = {"layers": {"up": {"kernel": shape}}}
    loaded = xckpt.load(source, like, mapping=MAPPING, strict=False)
    found = loaded["layers"]["up"]["kernel"]
    expected = flax_like(torch_like())["layers"]["up"]["kernel"]
    return [
        float(np.abs(np.asarray(shard.data) - expected[shard.index]).max())
        for shard in found.addressable_shards
    ]


def test_processes_of_jax(source: Path, tmp_path: Path) -> None:
    answers = jax_jobs.run(jax_ranks, 2, str(source), str(tmp_path / "jax"), devices=2)
    assert answers == [[0.0, 0.0], [0.0, 0.0]]
    convert(source, tmp_path / "alone", mapping=MAPPING, options=OPTIONS)
    assert files(tmp_path / "jax") == files(tmp_path / "alone")


def test_other_ranks_go_on_with_what_some_have_left(source: Path, tmp_path: Path) -> None:
    def fail(group: ThreadGroup) -> Converted:
        def tell(progress: xckpt.Progress) -> None:
            if group.rank == 2 and progress.done > progress.total / 2:
                raise RuntimeError("rank 2 has had enough")

        options = xckpt.SaveOptions(chunk_bytes=2048, memory_bytes=1 << 15, progress=tell)
        return convert(source, tmp_path / "target", mapping=MAPPING, options=options, group=group)

    for outcome in run_ranks(3, fail):
        assert isinstance(outcome.error, XckptError)
        assert "rank 2 has had enough" in str(outcome.error)
    assert not (tmp_path / "target").exists()

    def go_on(group: ThreadGroup) -> Converted:
        return convert(source, tmp_path / "target", mapping=MAPPING, options=OPTIONS, group=group)

    done = [outcome.result for outcome in run_ranks(2, go_on)]
    assert sum(each.bytes_before for each in done) > done[0].bytes / 3
    convert(source, tmp_path / "alone", mapping=MAPPING, options=OPTIONS)
    assert files(tmp_path / "target") == files(tmp_path / "alone")
    assert {path.name for path in tmp_path.iterdir()} == {"target", "alone"}


@pytest.mark.parametrize("name", ["target", "model.safetensors"])
def test_the_ranks_of_a_host_share_its_memory(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[int] = []

    class Noted(Pool):
        def __init__(self, *, threads: int | None, budget: int) -> None:
            budgets.append(budget)
            super().__init__(threads=threads, budget=budget)

    monkeypatch.setattr(units_run, "Pool", Noted)
    for outcome in run_ranks(
        4, lambda group: convert(source, tmp_path / name, options=OPTIONS, group=group)
    ):
        assert outcome.error is None
    assert budgets and set(budgets) == {OPTIONS.memory_bytes // 4}


def test_a_mapping_that_does_not_fit_fails_on_every_rank(source: Path, tmp_path: Path) -> None:
    def fail(group: ThreadGroup) -> None:
        mapping = Mapping([Rule("embed.weight", "embed")])
        convert(source, tmp_path / "target", mapping=mapping, group=group)

    for outcome in run_ranks(2, fail):
        assert isinstance(outcome.error, XckptError)
        assert "layers.0.norm.weight" in str(outcome.error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_shard_reads_just_what_it_needs(tmp_path: Path, parts: int) -> None:
    weights = np.arange(256 * 64, dtype=np.float32).reshape(256, 64)
    xckpt.save(tmp_path / "w", {"w": weights}, options=xckpt.SaveOptions(chunk_bytes=4096))
    width = 256 // parts
    for part in range(parts):
        # Columns of the transposed matrix are rows of the stored one.
        boxes = Boxes.of([((0, part * width), (64, width))])
        reader = ZarrStorageReader(tmp_path / "w")
        planner = MappedLoadPlanner(
            Mapping([Rule("w", "kernel", [Transpose((1, 0))])]),
            lambda: XckptSource(tmp_path / "w"),
            strictness=Strictness(),
        )
        like: Any = {"kernel": Wanted((64, 256), "float32", boxes)}
        group = run_ranks(1, lambda group: group)[0].result
        load_state(like, reader, group=group, planner=planner)
        loaded: Any = planner.result()
        [found] = loaded["kernel"].parts
        np.testing.assert_array_equal(found, weights.T[:, part * width : (part + 1) * width])
        assert reader.source.bytes_read == found.nbytes
