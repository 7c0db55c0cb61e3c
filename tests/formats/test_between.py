"""Every format into every other, by `convert` and by `load`: the same bits, values and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import xckpt
from tests.formats.arrays import check_source
from xckpt.convert import Mapping, Rule, convert
from xckpt.formats.detect import SINKS, detect, open_source
from xckpt.mapping.operations import Transpose

FORMATS = ("xckpt", *SINKS)
ARRAYS = {
    "layers.0.weight": np.arange(4000, dtype=np.float32).reshape(50, 80),
    "layers.0.bias": np.ones(3, np.float16),
    "mask": np.array([True, False, True]),
    "count": np.array(3),
    "empty": np.zeros((0, 3), np.int8),
}
VALUES = {"step": 7, "rate": 0.5, "name": "run"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state in every format; not to be changed."""
    root = tmp_path_factory.mktemp("originals")
    xckpt.save(root / "xckpt", {**ARRAYS, **VALUES}, options=xckpt.SaveOptions(chunk_bytes=2000))
    for name in SINKS:
        convert(root / "xckpt", root / name, format=name)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items()}
    torch.save({**tensors, **VALUES}, root / "torch")
    return root


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", [*FORMATS, "torch"])
def test_from_each_to_each(originals: Path, tmp_path: Path, source: str, target: str) -> None:
    assert detect(originals / source) == source
    options = xckpt.SaveOptions(memory_bytes=5000)
    done = convert(originals / source, tmp_path / "out", format=target, options=options)
    assert done.tensors == len(ARRAYS)
    assert detect(tmp_path / "out") == target
    found = open_source(tmp_path / "out")
    check_source(found, ARRAYS)
    assert found.values == VALUES


MAPPING = Mapping(
    [
        Rule("layers.{n}.weight", "layers/{n}/kernel", [Transpose((1, 0))]),
        Rule("layers.{n}.bias", "layers/{n}/bias"),
        Rule("mask", "mask"),
        Rule("count", "count"),
        Rule("empty", "empty"),
        *(Rule(name, name) for name in VALUES),
    ]
)


@pytest.mark.parametrize("source", [*FORMATS, "torch"])
def test_each_is_loaded_into_another_model(originals: Path, tmp_path: Path, source: str) -> None:
    """Straight into a sharded jax.Array of another layout, and through a file."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y", "x"))
    like: Any = {
        "layers": {
            "0": {
                "kernel": jax.ShapeDtypeStruct((80, 50), np.float32, sharding=sharding),
                "bias": np.zeros(3, np.float16),
            }
        },
        "mask": torch.zeros(3, dtype=torch.bool),
        "count": np.array(0),
        "empty": np.zeros((0, 3), np.int8),
        **VALUES,
    }
    loaded = xckpt.load(originals / source, like, mapping=MAPPING)
    kernel = loaded["layers"]["0"]["kernel"]
    assert kernel.sharding == sharding
    assert np.array_equal(kernel, ARRAYS["layers.0.weight"].T)
    assert loaded["mask"].tolist() == [True, False, True]
    assert loaded["step"] == 7
    convert(originals / source, tmp_path / "out.safetensors", mapping=MAPPING)
    convert(tmp_path / "out.safetensors", tmp_path / "back", mapping=flat().inverse())
    check_source(open_source(tmp_path / "back"), ARRAYS)


def flat() -> Mapping:
    """`MAPPING` into safetensors' flat names."""
    rules = [
        Rule("layers.{n}.weight", "layers.{n}.kernel", [Transpose((1, 0))]),
        Rule("layers.{n}.bias", "layers.{n}.bias"),
    ]
    return Mapping([*rules, *(Rule(n, n) for n in ("mask", "count", "empty", *VALUES))])


@pytest.mark.parametrize("source", [*FORMATS, "torch"])
def test_each_is_loaded_as_it_is(originals: Path, source: str) -> None:
    """A foreign file is loaded by the same call as an xckpt checkpoint."""
    loaded = xckpt.load(originals / source)
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype and np.array_equal(loaded[name], array)
    assert {name: loaded[name] for name in VALUES} == VALUES
