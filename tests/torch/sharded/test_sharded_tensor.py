"""ShardedTensors of any sharding spec: saved, loaded elsewhere, and loaded from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.ranks import Ranks
from tests.support.tilings import Shape, Tiling, guillotine_tilings, region, shapes
from tests.support.torch_meshes import on_rank_mesh
from tests.torch.sharded.test_dtensor import Held, assert_holds, held_by
from tests.torch.test_save_load import GROUPS, load, on_rank_group
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.metadata import TensorStorageMetadata
from xckpt.errors import TreeMismatchError, UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.leaf import from_numpy, torch_dtype

DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e5m2", "complex64")


@dataclass(frozen=True)
class Cut:
    """An array and how it is cut: along one dimension, or into boxes, each on some rank."""

    shape: Shape
    dtype: str
    ranks: tuple[int, ...]
    """Of each part."""
    dim: int | None = None
    boxes: tuple[tuple[Shape, Shape], ...] = ()

    def array(self) -> np.ndarray:
        values = np.arange(int(np.prod(self.shape))) % 5
        return values.astype(numpy_dtype(self.dtype)).reshape(self.shape)

    def on_rank_spec(self, device: str = "cpu") -> ChunkShardingSpec | EnumerableShardingSpec:
        places: list[Any] = [f"rank:{rank}/{device}" for rank in self.ranks]
        if self.dim is not None:
            return ChunkShardingSpec(self.dim, places)
        return EnumerableShardingSpec(
            [
                ShardMetadata(list(offsets), list(sizes), place)
                for (offsets, sizes), place in zip(self.boxes, places, strict=True)
            ]
        )

    def on_rank_tensor(
        self, *, device: str = "cpu", fill: bool = True, group: Any = None, grad: bool = False
    ) -> ShardedTensor:
        """The tensor, with the array's values in it."""
        spec, dtype = self.on_rank_spec(device), torch_dtype(self.dtype)
        made = sharded_tensor.empty(
            spec, *self.shape, dtype=dtype, process_group=group, requires_grad=grad
        )
        full = self.array()
        for shard in made.local_shards():
            if device == "meta":
                continue
            part = full[
                region((tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)))
            ]
            values = from_numpy(np.ascontiguousarray(part))
            with torch.no_grad():
                shard.tensor.copy_(values if fill else torch.zeros_like(values))
        return made


def on_rank_held(tensor: ShardedTensor) -> Held:
    source = ADAPTER.describe(tensor, "w")
    assert source is not None
    return held_by(source)


def some_ranks(group: str, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """A rank for each part: any, so that some have several parts and some none."""
    ranks = st.sampled_from(GROUPS[group])
    return st.lists(ranks, min_size=count, max_size=count).map(tuple)


@st.composite
def cuts(draw: st.DrawFn, shape: Shape, dtype: str, group: str) -> Cut:
    if draw(st.booleans()):
        count = draw(st.integers(1, 6))
        dim = draw(st.integers(0, len(shape) - 1))
        return Cut(shape, dtype, draw(some_ranks(group, count)), dim=dim)
    boxes: Tiling = draw(guillotine_tilings(shape))
    return Cut(shape, dtype, draw(some_ranks(group, len(boxes))), boxes=tuple(boxes))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[list[Cut], str, list[Cut]]:
    """Tensors as four ranks save them, and as a group of ranks loads them."""
    group = draw(st.sampled_from(["four", "three", "two"]))
    saved: list[Cut] = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(shapes(max_rank=3, min_side=1).filter(len))
        saved.append(draw(cuts(shape, draw(st.sampled_from(DTYPES)), "four")))
    return saved, group, [draw(cuts(cut.shape, cut.dtype, group)) for cut in saved]


def on_rank_save(rank: int, path: Path, saved: list[Cut]) -> None:
    xckpt.save(path, {f"w{i}": cut.on_rank_tensor() for i, cut in enumerate(saved)})


@functools.cache
def on_rank_members(name: str) -> Any:
    """torch's own process group of these ranks, made once by all four together."""
    return dist.new_group(GROUPS[name])


def on_rank_load(rank: int, path: Path, name: str, loaded: list[Cut], how: str) -> list[Held]:
    group = on_rank_group(name)
    members = on_rank_members(name)
    if group is None:
        return []
    device = "meta" if how == "meta" else "cpu"
    state: dict[str, Any] = {
        f"w{i}": cut.on_rank_tensor(device=device, fill=False, group=members)
        for i, cut in enumerate(loaded)
    }
    result = state
    if how == "in place":
        xckpt.load_into(path, state, group=group)
    else:
        result = load(path, state, group=group)
    held: list[Held] = []
    for like, new, cut in zip(state.values(), result.values(), loaded, strict=True):
        assert isinstance(new, ShardedTensor)
        assert (new is like) == (how == "in place")
        assert new.sharding_spec() == cut.on_rank_spec()
        assert new.metadata().shards_metadata == cut.on_rank_tensor().metadata().shards_metadata
        assert [shard.metadata for shard in new.local_shards()] == [
            box
            for box in new.metadata().shards_metadata
            if box.placement.rank() == rank  # type: ignore[union-attr]
        ]
        held.append(on_rank_held(new))
    return held


FIVE_OVER_FOUR = Cut((5, 3), "float32", (0, 1, 2, 3), dim=0)
"""Its last shard is empty and begins at row 6."""


@examples(5, 200)
@given(journey=journeys(), how=st.sampled_from(["new", "meta", "in place"]))
@example(journey=([FIVE_OVER_FOUR], "four", [FIVE_OVER_FOUR]), how="new")
@example(
    journey=([FIVE_OVER_FOUR], "two", [Cut((5, 3), "float32", (3, 3, 3, 3, 1, 1), dim=-1)]),
    how="meta",
)
def test_any_spec_to_any_other(
    four_ranks: Ranks,
    folders: Iterator[Path],
    journey: tuple[list[Cut], str, list[Cut]],
    how: str,
) -> None:
    saved, group, loaded = journey
    path = next(folders)
    four_ranks.run(on_rank_save, path, saved)
    here = load(path)
    for i, cut in enumerate(saved):
        np.testing.assert_array_equal(here[f"w{i}"], cut.array())
    answers = four_ranks.run(on_rank_load, path, group, loaded, how)
    for i, cut in enumerate(loaded):
        assert_holds([answers[rank][i] for rank in GROUPS[group]], cut.array())


ROWS = Cut((7, 6), "bfloat16", (0, 1, 2, 3), dim=0)
QUARTERS = Cut(
    (7, 6),
    "bfloat16",
    (3, 0, 0, 2),
    boxes=(((0, 0), (3, 2)), ((0, 2), (3, 4)), ((3, 0), (4, 5)), ((3, 5), (4, 1))),
)


@pytest.mark.parametrize("cut", [ROWS, QUARTERS])
def test_to_jax_and_back(four_ranks: Ranks, folders: Iterator[Path], cut: Cut) -> None:
    there, back = next(folders), next(folders)
    four_ranks.run(on_rank_save, there, [cut])
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("x", "y"))
    sharding = NamedSharding(mesh, PartitionSpec(None, ("y", "x")))
    like = jax.ShapeDtypeStruct(cut.shape, cut.dtype, sharding=sharding)
    loaded = load(there, {"w0": like})
    assert loaded["w0"].sharding == sharding
    np.testing.assert_array_equal(np.asarray(loaded["w0"]), cut.array())
    xckpt.save(back, loaded)
    held = four_ranks.run(on_rank_load, back, "four", [cut], "new")
    assert_holds([ranks[0] for ranks in held], cut.array())


def on_rank_dtensor(rank: int, path: Path, cut: Cut) -> bool:
    """From a ShardedTensor to a DTensor, and back to a ShardedTensor."""
    mesh = on_rank_mesh("2x2")
    full = from_numpy(cut.array())
    expected = distribute_tensor(full, mesh, [Shard(1), Shard(0)], src_data_rank=None)
    xckpt.save(path / "1", {"w": cut.on_rank_tensor()})
    found = load(path / "1", {"w": torch.empty_like(expected, device="meta")})["w"]
    assert isinstance(found, DTensor)
    xckpt.save(path / "2", {"w": found})
    again = load(path / "2", {"w": cut.on_rank_tensor(fill=False)})["w"]
    same = all(
        torch.equal(a.tensor, b.tensor)
        for a, b in zip(again.local_shards(), cut.on_rank_tensor().local_shards(), strict=True)
    )
    return torch.equal(found.to_local(), expected.to_local()) and same


@pytest.mark.parametrize("cut", [ROWS, QUARTERS])
def test_to_dtensor_and_back(four_ranks: Ranks, folders: Iterator[Path], cut: Cut) -> None:
    path = next(folders)
    assert four_ranks.run(on_rank_dtensor, path, cut) == [True] * 4
    np.testing.assert_array_equal(load(path / "2")["w"], cut.array())


def on_rank_look(rank: int, path: Path) -> list[Any]:
    """What a save says of the tensor, and what the load keeps."""
    tensor = FIVE_OVER_FOUR.on_rank_tensor(grad=True)
    saved = xckpt.save(path, {"w": tensor}).state_dict_metadata["w"]
    assert isinstance(saved, TensorStorageMetadata)
    new = load(path, {"w": tensor})["w"]
    versions = [shard.tensor._version for shard in tensor.local_shards()]
    xckpt.load_into(path, {"w": tensor})
    changed = [
        shard.tensor._version > before
        for shard, before in zip(tensor.local_shards(), versions, strict=True)
    ]
    grads = [shard.tensor.requires_grad for shard in new.local_shards()]
    return [str(saved.sharding), new.metadata().tensor_properties.requires_grad, grads, changed]


def test_what_is_remembered_and_kept(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    looks = four_ranks.run(on_rank_look, next(folders))
    # The last shard has no elements that could change.
    assert [look[3] for look in looks] == [[True], [True], [True], [False]]
    for sharding, metadata_grad, grads, _ in looks:
        assert sharding == "ChunkShardingSpec(dim=0) on shards=4"
        assert metadata_grad
        assert grads == [True]


def on_rank_spoil(rank: int, path: Path, fault: str) -> str:
    tensor = Cut((4, 3), "float32", (0, 1, 2, 3), dim=0).on_rank_tensor()
    local = tensor.local_shards()[0]
    if rank == 2:
        local.tensor = {
            "sparse": lambda: local.tensor.to_sparse(),
            "quantised": lambda: torch.quantize_per_tensor(local.tensor, 0.1, 0, torch.qint8),
            "meta": lambda: local.tensor.to("meta"),
            "dtype": lambda: local.tensor.half(),
            "dimensions": lambda: local.tensor.reshape(-1),
        }[fault]()
    with pytest.raises(UnsupportedLeafError) as caught:
        xckpt.save(path, {"model": {"w": tensor}})
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "fault, words",
    [
        ("sparse", ["sparse", "to_dense"]),
        ("quantised", ["quantised", "int_repr"]),
        ("meta", ["meta device"]),
        ("dtype", ["float16", "float32"]),
        ("dimensions", ["shape (3,)", "(1, 3)"]),
    ],
)
def test_a_shard_that_cannot_be_saved_is_refused_by_name(
    four_ranks: Ranks, folders: Iterator[Path], fault: str, words: list[str]
) -> None:
    path = next(folders)
    for text in four_ranks.run(on_rank_spoil, path, fault):
        for word in ["model/w", "rank 2", "[2, 3)", *words]:
            assert word in text, text
    assert not path.exists()


def on_rank_misfit(rank: int, path: Path) -> list[str]:
    texts: list[str] = []
    wrong = Cut((4, 3), "float16", (0, 1, 2, 3), dim=0).on_rank_tensor()
    with pytest.raises(TreeMismatchError) as caught:
        xckpt.load_into(path, {"w": wrong})
    texts.append(str(caught.value))
    meta = FIVE_OVER_FOUR.on_rank_tensor(device="meta")
    with pytest.raises(UnsupportedLeafError) as refused:
        ADAPTER.target_for(meta, "w", in_place=True)
    texts.append(str(refused.value))
    return texts


def test_a_target_that_does_not_fit_is_refused(four_ranks: Ranks, folders: Iterator[Path]) -> None:
    path = next(folders)
    xckpt.save(path, {"w": FIVE_OVER_FOUR.array()})
    for rank, (wrong, meta) in enumerate(four_ranks.run(on_rank_misfit, path)):
        assert "(5, 3)" in wrong
        assert "float16" in wrong
        assert f"w: the shard [{rank * 2}, {min(rank * 2 + 2, max(5, rank * 2))})" in meta
        assert "meta device" in meta


def test_a_state_of_plain_tensors_imports_no_sharded_tensor() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch, xckpt\n"
        "xckpt.save('memory://plain', {'w': torch.ones(3)})\n"
        "xckpt.load_into('memory://plain', {'w': torch.ones(3)})\n"
        "print([name for name in sys.modules if name.startswith('torch.distributed._shard')"
        " or name.startswith('torch.distributed.tensor')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
