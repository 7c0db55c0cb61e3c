"""From torch to JAX and back, bit for bit: meshes, dtypes, shapes and placements at random.

torch lives in four ranks of a gloo group, JAX in the test's process with eight host devices; the
NumPy array that both were made from is the oracle. Contents are random bits: NaNs of any payload,
-0.0 and subnormals included.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.distributed.tensor import DTensor, distribute_tensor

import xckpt
from tests.support.examples import examples
from tests.support.jax_meshes import meshes as jax_meshes
from tests.support.jax_meshes import same, specs, ways
from tests.support.ranks import Ranks
from tests.support.torch_meshes import Case, cases, on_rank_mesh, on_rank_placements
from tests.torch.sharded.test_dtensor import held_by
from xckpt.core.dtypes import numpy_dtype
from xckpt.torch.adapter import ADAPTER
from xckpt.torch.leaf import from_numpy, torch_dtype

DTYPES = [
    *("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "float32", "bfloat16", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
"""What torch and JAX both have without JAX's 64-bit mode."""


@pytest.fixture(scope="module")
def torch_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def random_bits(case: Case) -> np.ndarray:
    """The same for the same case, in any process."""
    kind = numpy_dtype(case.dtype)
    count = int(np.prod(case.shape, dtype=np.int64))
    most = 2 if case.dtype == "bool" else 256
    raw = np.random.default_rng(count).integers(0, most, count * kind.itemsize, np.uint8)
    return raw.view(kind).reshape(case.shape)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Case, NamedSharding]:
    """A tensor on a torch mesh, and a sharding of it on a JAX mesh."""
    rank = draw(st.integers(0, 3))
    mesh = draw(jax_meshes())
    sharding = NamedSharding(mesh, draw(specs(mesh, rank)))
    parts = ways(sharding, rank)
    # JAX divides evenly; torch need not, and rarely does here.
    shape = tuple(part * draw(st.sampled_from([0, 1, 1, 2, 3, 7])) for part in parts)
    return draw(cases(shape=shape, dtype=draw(st.sampled_from(DTYPES)))), sharding


def on_rank_distribute(case: Case) -> DTensor:
    mesh, placements = on_rank_mesh(case.mesh), on_rank_placements(case)
    return distribute_tensor(from_numpy(random_bits(case)), mesh, placements, src_data_rank=None)


def on_rank_save(rank: int, path: Path, chosen: list[Case]) -> None:
    leaves = {f"leaf {i}": on_rank_distribute(case) for i, case in enumerate(chosen)}
    xckpt.save(path, {"params": leaves, "step": 12})


def on_rank_load(rank: int, path: Path, chosen: list[Case], in_place: bool) -> None:
    """Load onto torch meshes and compare this rank's boxes."""
    expected = [on_rank_distribute(case) for case in chosen]
    device = None if in_place else "meta"
    likes = {f"leaf {i}": torch.empty_like(e, device=device) for i, e in enumerate(expected)}
    state: Any = {"params": likes, "step": 0}
    if in_place:
        xckpt.load_into(path, state)
    else:
        state = xckpt.load(path, state)
    assert state["step"] == 12
    for leaf, wanted in zip(state["params"].values(), expected, strict=True):
        assert leaf.placements == wanted.placements
        found, source = ADAPTER.describe(leaf, "w"), ADAPTER.describe(wanted, "w")
        assert found is not None
        assert source is not None
        assert found.boxes == source.boxes
        for (*_, a), (*_, b) in zip(held_by(found), held_by(source), strict=True):
            same(a, b)


JOURNEYS = st.lists(journeys(), min_size=1, max_size=4)


def example_journey() -> list[tuple[Case, NamedSharding]]:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model", "data"))
    return [(Case((14, 12), "bfloat16", "2x2", (0, 0)), sharding)]


@examples(4, 150)
@given(journeys=JOURNEYS)
@example(journeys=example_journey())
def test_torch_saves_and_jax_loads(
    torch_ranks: Ranks, folders: Iterator[Path], journeys: list[tuple[Case, NamedSharding]]
) -> None:
    path = next(folders)
    torch_ranks.run(on_rank_save, path, [case for case, _ in journeys])
    likes = {
        f"leaf {i}": jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype), sharding=sharding)
        for i, (case, sharding) in enumerate(journeys)
    }
    loaded: Any = xckpt.load(path, {"params": likes, "step": 0})
    assert loaded["step"] == 12
    for (case, sharding), leaf in zip(journeys, loaded["params"].values(), strict=True):
        assert isinstance(leaf, jax.Array)
        assert leaf.sharding == sharding
        same(leaf, random_bits(case))


@examples(4, 150)
@given(journeys=JOURNEYS, in_place=st.booleans())
@example(journeys=example_journey(), in_place=True)
def test_jax_saves_and_torch_loads(
    torch_ranks: Ranks,
    folders: Iterator[Path],
    journeys: list[tuple[Case, NamedSharding]],
    in_place: bool,
) -> None:
    path = next(folders)
    leaves = {
        f"leaf {i}": jax.device_put(random_bits(case), sharding)
        for i, (case, sharding) in enumerate(journeys)
    }
    xckpt.save(path, {"params": leaves, "step": 12})
    torch_ranks.run(on_rank_load, path, [case for case, _ in journeys], in_place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_common_dtype_in_one_process(tmp_path: Path, dtype: str) -> None:
    """torch to JAX to torch, 0-d and empty leaves too."""
    for number, shape in enumerate([(6, 5), (), (0, 3)]):
        bits = random_bits(Case(shape, dtype, "one", (None,)))
        there, back = tmp_path / f"there {number}", tmp_path / f"back {number}"
        xckpt.save(there, {"w": from_numpy(bits)})
        array: Any = xckpt.load(there, {"w": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))})
        same(array["w"], bits)
        xckpt.save(back, array)
        like = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
        tensor: Any = xckpt.load(back, {"w": like})
        assert tensor["w"].dtype == like.dtype
        same(ADAPTER.to_numpy(tensor["w"]), bits)


def mixed(seed: int) -> dict[str, Any]:
    """A tree whose leaves are of three frameworks and of none."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((4, 6), np.float32)
    return {
        "torch": [torch.from_numpy(numbers), torch.tensor(seed)],
        "jax": {"mu": jnp.asarray(numbers + 1), "key": jax.random.key(seed)},
        "numpy": (numbers + 2, np.float64(seed)),
        "python": {"name": "mixed", "none": None, "seed": seed, "rate": 0.5},
    }


def assert_equal_trees(found: Any, expected: Any) -> None:
    assert found["python"] == expected["python"]
    for a, b in zip(found["torch"], expected["torch"], strict=True):
        assert isinstance(a, torch.Tensor)
        assert torch.equal(a, b)
    same(found["jax"]["mu"], expected["jax"]["mu"])
    same(
        jax.random.key_data(found["jax"]["key"]),
        jax.random.key_data(expected["jax"]["key"]),
    )
    for a, b in zip(found["numpy"], expected["numpy"], strict=True):
        same(a, b)


def test_one_tree_of_all_frameworks(tmp_path: Path) -> None:
    saved = mixed(3)
    xckpt.save(tmp_path / "ckpt", saved)
    assert_equal_trees(xckpt.load(tmp_path / "ckpt", mixed(4)), saved)
    whole: Any = xckpt.load(tmp_path / "ckpt")
    for framework in ("torch", "numpy"):
        for a, b in zip(whole[framework], saved[framework], strict=True):
            same(a, b)
    same(whole["jax"]["mu"], saved["jax"]["mu"])


def test_leaves_change_their_framework(tmp_path: Path) -> None:
    """What is loaded is what ``like`` says, whichever framework saved it."""
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    makers = {
        "torch": torch.from_numpy,
        "jax": jnp.asarray,
        "numpy": np.array,
    }
    xckpt.save(tmp_path / "ckpt", {name: make(numbers) for name, make in makers.items()})
    for name, make in makers.items():
        likes = {other: make(np.zeros_like(numbers)) for other in makers}
        loaded: Any = xckpt.load(tmp_path / "ckpt", likes)
        for other in makers:
            assert type(loaded[other]) is type(likes[other]), name
            same(loaded[other], numbers)


def test_a_dtype_that_the_other_has_not_is_refused_by_name(tmp_path: Path) -> None:
    import ml_dtypes

    xckpt.save(tmp_path / "ckpt", {"a": jnp.ones(3, ml_dtypes.float8_e4m3b11fnuz)})
    with pytest.raises(xckpt.TreeMismatchError, match=r"a: .*float8_e4m3b11fnuz"):
        xckpt.load(tmp_path / "ckpt", {"a": torch.zeros(3)})
