"""LocalShardsWrapper tables: column-wise, row-wise, table-wise, on grids; saved, moved, loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.tilings import Shape, chunk_edges, region
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.sharded.test_dtensor import Held, assert_holds, held_by
from tests.torch.test_save_load import load
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.errors import PlanError, UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.leaf import from_numpy

Box = tuple[Shape, Shape]


@dataclass(frozen=True)
class Table:
    """A table, and for each rank the boxes that it has."""

    shape: Shape
    dtype: str
    held: tuple[tuple[Box, ...], ...]

    def array(self) -> np.ndarray:
        values = np.arange(int(np.prod(self.shape))) % 251
        return values.astype(numpy_dtype(self.dtype)).reshape(self.shape)

    def on_rank_tensor(self, rank: int, *, fill: bool = True, device: str = "cpu") -> DTensor:
        full = from_numpy(self.array())
        shards = [full[region(box)].clone() for box in self.held[rank]]
        if not fill:
            shards = [torch.zeros_like(shard, device=device) for shard in shards]
        wrapper = LocalShardsWrapper(shards, [offsets for offsets, _ in self.held[rank]])
        return wrapped(wrapper, self.shape)


def wrapped(wrapper: LocalShardsWrapper, shape: Shape, placements: Any = None) -> DTensor:
    """As TorchRec makes them; the placements say nothing that is true of every table."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        wrapper,
        on_rank_mesh("4"),
        placements or [Shard(0)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def pieces(size: int, parts: int) -> list[tuple[int, int]]:
    return [(a, b - a) for a, b in itertools.pairwise(chunk_edges(size, parts)) if b > a]


@st.composite
def tables(draw: st.DrawFn, shape: Shape | None = None, dtype: str | None = None) -> Table:
    """Row-wise, column-wise, or both; every piece on any rank, so on one rank or none as well."""
    shape = shape or (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    dtype = dtype or draw(st.sampled_from(["float32", "float16", "int8"]))
    rows, columns = (pieces(n, draw(st.sampled_from([1, 2, 4, 5]))) for n in shape)
    held: list[list[Box]] = [[], [], [], []]
    homes = st.sampled_from(draw(st.sampled_from([(0, 1, 2, 3), (2,), (0, 3)])))
    for (top, height), (left, width) in itertools.product(rows, columns):
        held[draw(homes)].append(((top, left), (height, width)))
    return Table(shape, dtype, tuple(map(tuple, held)))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[Table], list[Table]]:
    saved = draw(st.lists(tables(), min_size=1, max_size=3))
    return saved, [draw(tables(table.shape, table.dtype)) for table in saved]


def on_rank_save(rank: int, path: Path, saved: list[Table]) -> None:
    xckpt.save(path, {f"t{i}": table.on_rank_tensor(rank) for i, table in enumerate(saved)})


def on_rank_load(rank: int, path: Path, loaded: list[Table], how: str) -> list[Held]:
    device = "meta" if how == "meta" else "cpu"
    state: dict[str, Any] = {
        f"t{i}": table.on_rank_tensor(rank, fill=False, device=device)
        for i, table in enumerate(loaded)
    }
    result = state
    if how == "in place":
        xckpt.load_into(path, state)
    else:
        result = load(path, state)
    held: list[Held] = []
    for like, new, table in zip(state.values(), result.values(), loaded, strict=True):
        assert isinstance(new, DTensor)
        assert (new is like) == (how == "in place")
        assert new.shape == table.shape
        assert new.placements == like.placements
        with torch.no_grad():
            local = new.to_local()
        assert isinstance(local, LocalShardsWrapper)
        assert len(local.local_shards()) == len(table.held[rank])
        if local.local_shards():
            boxes = zip(
                map(tuple, local.local_offsets()), map(tuple, local.local_sizes()), strict=True
            )
            assert tuple(boxes) == table.held[rank]
        assert all(shard.device.type == "cpu" for shard in local.local_shards())
        source = ADAPTER.describe(new, "w")
        assert source is not None
        held.append(held_by(source))
    return held


def columns(shape: Shape, dtype: str, homes: tuple[int, ...]) -> Table:
    """A column-wise table with these ranks for its parts."""
    held: list[list[Box]] = [[], [], [], []]
    for home, (left, width) in zip(homes, pieces(shape[1], len(homes)), strict=True):
        held[home].append(((0, left), (shape[0], width)))
    return Table(shape, dtype, tuple(map(tuple, held)))


COLUMNS = columns((5, 8), "float16", (1, 1, 3, 0))
ON_ONE = Table((5, 8), "float16", ((), (), (((0, 0), (5, 8)),), ()))


@examples(4, 150)
@given(journey=journeys(), how=st.sampled_from(["new", "meta", "in place"]))
@example(journey=([COLUMNS], [ON_ONE]), how="new")
@example(journey=([ON_ONE], [COLUMNS]), how="in place")
def test_any_table_to_any_other(
    four_ranks: Ranks, folders: Iterator[Path], journey: tuple[list[Table], list[Table]], how: str
) -> None:
    saved, loaded = journey
    path = next(folders)
    four_ranks.run(on_rank_save, path, saved)
    here = load(path)
    for i, table in enumerate(saved):
        assert here[f"t{i}"].dtype == table.dtype
        np.testing.assert_array_equal(here[f"t{i}"], table.array())
    answers = four_ranks.run(on_rank_load, path, loaded, how)
    for i, table in enumerate(loaded):
        assert_holds([answers[rank][i] for rank in range(4)], table.array())


def on_rank_others(rank: int, path: Path) -> bool:
    """From a table to a plain DTensor, and from it to another table."""
    full = from_numpy(COLUMNS.array())
    expected = distribute_tensor(full, on_rank_mesh("2x2"), [Shard(1), Replicate()])
    xckpt.save(path / "1", {"t0": COLUMNS.on_rank_tensor(rank)})
    found = load(path / "1", {"t0": torch.zeros_like(expected)})
    xckpt.save(path / "2", found)
    return torch.equal(found["t0"].to_local(), expected.to_local())


def test_to_dtensor_to_jax_and_back(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    assert four_ranks.run(on_rank_others, path) == [True] * 4
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    like = jax.ShapeDtypeStruct((5, 8), "float16", sharding=sharding)
    for number in ("1", "2"):
        loaded = load(path / number, {"t0": like})
        np.testing.assert_array_equal(np.asarray(loaded["t0"]), COLUMNS.array())
        xckpt.save(path / f"{number} from jax", loaded)
        held = four_ranks.run(on_rank_load, path / f"{number} from jax", [ON_ONE], "new")
        assert_holds([ranks[0] for ranks in held], COLUMNS.array())


def on_rank_save_async(rank: int, path: Path) -> None:
    tables = {"t0": COLUMNS.on_rank_tensor(rank), "t1": ON_ONE.on_rank_tensor(rank)}
    future = xckpt.save_async(path, tables)
    future.staged()
    for table in tables.values():
        with torch.no_grad():
            local: Any = table.to_local()
        for shard in local.local_shards():
            shard.zero_()
    future.result()


def test_a_save_in_the_background(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    four_ranks.run(on_rank_save_async, path)
    for array in load(path).values():
        np.testing.assert_array_equal(array, COLUMNS.array())


def on_rank_replicated(rank: int, path: Path) -> list[Any]:
    """Two replicas of a table that two ranks share, and its optimizer's row-wise state."""
    mesh = on_rank_mesh("2x2")
    half = rank % 2
    full, rates = torch.arange(24.0).reshape(6, 4), torch.arange(6.0)

    def tensor(values: torch.Tensor) -> DTensor:
        part = values[half * 3 : half * 3 + 3].clone()
        offset = (half * 3,) + (0,) * (values.ndim - 1)
        return DTensor.from_local(
            LocalShardsWrapper([part], [offset]),
            mesh,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=values.shape,
            stride=values.stride(),
        )

    saved = xckpt.save(path, {"table": tensor(full), "rates": tensor(rates)})
    table = saved.state_dict_metadata["table"]
    assert isinstance(table, TensorStorageMetadata)
    loaded = load(path, {"table": tensor(full * 0), "rates": tensor(rates * 0)})
    parts = [leaf.to_local().local_shards()[0] for leaf in loaded.values()]
    rows = slice(half * 3, half * 3 + 3)
    return [
        str(table.sharding),
        torch.equal(parts[0], full[rows]),
        torch.equal(parts[1], rates[rows]),
    ]


def test_replicas_of_a_table(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    expected = ["Replicate(), Shard(dim=0) on dp=2 x tp=2", True, True]
    with torch.no_grad():
        assert four_ranks.run(on_rank_replicated, path) == [expected] * 4
    np.testing.assert_array_equal(load(path)["rates"], np.arange(6))


def on_rank_spoil(rank: int, path: Path, fault: str) -> str:
    tensor = COLUMNS.on_rank_tensor(rank)
    with torch.no_grad():
        local: Any = tensor.to_local()
    shards = local.local_shards()
    if fault == "sparse" and rank == 3:
        shards[0] = shards[0].to_sparse()
    if fault == "meta" and rank == 3:
        shards[0] = shards[0].to("meta")
    if fault == "dtype" and rank == 3:
        shards[0] = shards[0].float()
    if fault == "shape" and rank == 3:
        shards[0] = shards[0][:, :1]
    if fault == "no holder":
        tensor = wrapped(LocalShardsWrapper([], []), (5, 8))
    if fault == "gap" and rank == 3:
        tensor = wrapped(LocalShardsWrapper([], []), (5, 8))
    if fault == "partial":
        tensor = wrapped(local, (5, 8), [Partial()])
    state: Any = {"tables": {"t": local if fault == "bare" else tensor}}
    kind = PlanError if fault in ("dtype", "no holder", "gap") else UnsupportedLeafError
    with pytest.raises(kind) as caught:
        xckpt.save(path, state)
    return str(caught.value)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("sparse", ["rank 3", "[0, 5) x [4, 6)", "sparse", "to_dense"]),
        ("meta", ["rank 3", "[0, 5) x [4, 6)", "meta device"]),
        ("dtype", ["float32", "float16", "rank 3"]),
        ("shape", ["rank 3", "[0, 5) x [4, 6)", "(5, 1)", "(5, 2)"]),
        ("no holder", ["no rank has a part", "(5, 8)"]),
        ("gap", ["[0, 5) x [4, 6)"]),
        ("partial", ["Partial", "redistribute"]),
        ("bare", ["LocalShardsWrapper", "DTensor"]),
    ],
)
def test_what_is_no_whole_table_is_refused_by_name(
    four_ranks: Ranks, folders: Iterator[Path], fault: str, words: list[str]
) -> None:
    path = next(folders)
    for text in four_ranks.run(on_rank_spoil, path, fault):
        for word in ["tables/t", *words]:
            assert word in text, text
    assert not path.exists()


class Hooked(torch.Tensor):
    """Some other class with torch's hooks: the two rows of a rank, one by one."""

    @staticmethod
    def of(rows: torch.Tensor, first: int) -> Hooked:
        made = rows.as_subclass(Hooked)
        made.first = first
        return made

    first: int

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        size = torch.Size((1, self.shape[1]))
        return [ChunkStorageMetadata(torch.Size((self.first + i, 0)), size) for i in range(2)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        row = index.offset[0] - self.first
        return self.as_subclass(torch.Tensor)[row : row + 1]


def on_rank_hooked(rank: int, path: Path) -> tuple[str, bool]:
    full = torch.arange(24.0).reshape(8, 3)
    local = Hooked.of(full[2 * rank : 2 * rank + 2].clone(), 2 * rank)
    tensor = DTensor.from_local(local, on_rank_mesh("4"), [Shard(0)], run_check=False)
    # DTensor makes a view of it, which forgets everything but the class.
    with torch.no_grad():
        seen: Any = tensor.to_local()
    seen.first = 2 * rank
    xckpt.save(path, {"w": tensor})
    local.zero_()
    xckpt.load_into(path, {"w": tensor})
    with pytest.raises(UnsupportedLeafError) as caught:
        ADAPTER.target_for(tensor, "w", in_place=False)
    return str(caught.value), torch.equal(local.as_subclass(torch.Tensor), full[2 * rank :][:2])


def test_any_class_with_the_hooks_is_filled_in_place(
    four_ranks: Ranks, folders: Iterator[Path]
) -> None:
    path = next(folders)
    for text, equal in four_ranks.run(on_rank_hooked, path):
        assert equal
        assert text == "w: a DTensor over a Hooked can only be filled in place; use load_into"
    np.testing.assert_array_equal(load(path)["w"], np.arange(24).reshape(8, 3))
