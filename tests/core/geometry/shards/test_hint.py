"""What readers do is said by numbers, or by what JAX and torch call a sharding."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from torch.distributed.tensor import Replicate, Shard

import xckpt
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.geometry.shards.hint import parts_of


def _sharding(*spec: Any) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    return NamedSharding(mesh, P(*spec))


MESH: Any = SimpleNamespace(shape=(4, 2))


@pytest.mark.parametrize(
    "given, parts",
    [
        (0, 0),
        (8, 8),
        ([1, 8], (1, 8)),
        ((), ()),
        (((4, 2), [Shard(0), Shard(1)]), (4, 2)),
        ((MESH, (Shard(1), Shard(1))), (1, 8)),
        ((MESH, [Replicate(), Shard(2)]), (1, 1, 2)),
        ((MESH, [Replicate(), Replicate()]), ()),
    ],
)
def test_numbers_and_placements(given: Any, parts: object) -> None:
    assert parts_of(given) == parts
    assert parts_of(parts_of(given)) == parts


def test_a_sharding_of_jax() -> None:
    assert parts_of(_sharding("data", "model")) == (2, 2)
    assert parts_of(_sharding(None, ("data", "model"))) == (1, 4)
    assert parts_of(_sharding(None, P.UNCONSTRAINED, "model")) == (1, 1, 2)


@pytest.mark.parametrize(
    "given, error, says",
    [
        ("8", TypeError, "the str '8'"),
        (True, TypeError, "the bool"),
        (2.0, TypeError, "the float"),
        (P(None, "model"), TypeError, "NamedSharding"),
        ((1, "x", 2), TypeError, "not the tuple"),
        ((4, [Shard(0)]), TypeError, "mesh, placements"),
        (((4, 2), [Shard(0)]), ValueError, "1 placements for a mesh of 2"),
        (((4,), [Shard(-1)]), ValueError, "from the first"),
        ((0, 8), ValueError, r"\[1, 1,048,576\]"),
        (-1, ValueError, r"\[0, 1,048,576\]"),
        (1 << 21, ValueError, "1,048,576"),
    ],
)
def test_others_are_refused(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        xckpt.SaveOptions(readers=given)


def test_options_hold_numbers() -> None:
    """So that ranks can compare them, and processes can be handed them."""
    options = xckpt.SaveOptions(readers=_sharding(None, "model"))
    assert options.readers == (1, 2)
    assert replace(options, threads=1).readers == (1, 2)
    assert pickle.loads(pickle.dumps(options)) == options


def test_the_dimensions_that_readers_cut_are_cut() -> None:
    rows = Boxes.of([((low, 0), (256, 4096)) for low in range(0, 1024, 256)])

    def chunk(readers: Any) -> list[int]:
        return choose_grid((1024, 4096), 4, rows, GridOptions(readers=readers)).chunks[0].tolist()

    assert chunk(()) == chunk((1, 1)) == chunk((4, 1)) == chunk(0) == [256, 4096]
    assert chunk((1, 4)) == [256, 1024]
    assert chunk((1, 2, 9)) == [256, 2048]
    assert chunk((16,)) == [64, 4096]


def test_a_hint_is_stored(tmp_path: Path) -> None:
    array = np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    hint: Any = ((4,), [Shard(1)])
    xckpt.save(tmp_path / "c", {"w": array}, options=xckpt.SaveOptions(readers=hint))
    stored = xckpt.open(tmp_path / "c")
    assert stored.array("w").chunks == (512, 256)
    np.testing.assert_array_equal(stored.array("w")[:, 256:512], array[:, 256:512])
    assert stored.chunk_source.bytes_read == 512 * 256 * 4
