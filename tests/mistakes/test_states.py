"""More rows of `test_mistakes.py`: leaves, keys and trees that cannot be saved, and damage.

A full disk is in `test_bad_input.py`.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import xckpt
from tests.support import jax_jobs


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    A = "a"


@dataclasses.dataclass
class Config:
    rate: float = 0.1


@dataclasses.dataclass
class Network:
    """As a module of Flax's Linen."""

    width: int = 3

    def init(self, key: object) -> None: ...
    def apply(self, params: object) -> None: ...


class Meter:
    """Its state can be taken and not given back, so that it does not stand for it."""

    def state_dict(self) -> dict[str, float]:
        return {"total": 1.0}


def said(kind: type[BaseException], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def refused(tmp_path: Path, state: object) -> str:
    """What is said of a state that cannot be saved, without the first line; nothing is written."""
    text = said(xckpt.UnsupportedLeafError, lambda: xckpt.save(tmp_path / "c", state))
    assert list(tmp_path.iterdir()) == []
    return text.split("\n", 1)[1]


ISO = "save its .isoformat(), of which {}.fromisoformat makes it again, remove it"
VALUE = "save its .value, of which {}(value) makes it again, remove it"
TEXT = "save str(...) of it, remove it"
OTHER = "remove it, convert it"


@pytest.mark.parametrize(
    "leaf, name, advice",
    [
        pytest.param(lambda: 0, "builtins.function", OTHER, id="a lambda"),
        pytest.param(object(), "builtins.object", OTHER, id="an object"),
        pytest.param(datetime.date(2026, 1, 1), "datetime.date", ISO.format("date"), id="a date"),
        pytest.param(
            datetime.datetime(2026, 1, 1), "datetime.datetime", ISO.format("datetime"), id="a time"
        ),
        pytest.param(
            datetime.timedelta(1),
            "datetime.timedelta",
            "save its .total_seconds(), remove it",
            id="a duration",
        ),
        pytest.param(Colour.RED, f"{__name__}.Colour", VALUE.format("Colour"), id="an Enum"),
        pytest.param(Level.LOW, f"{__name__}.Level", VALUE.format("Level"), id="an IntEnum"),
        pytest.param(Kind.A, f"{__name__}.Kind", VALUE.format("Kind"), id="a StrEnum"),
        pytest.param({1}, "builtins.set", "save sorted(...), a list, remove it", id="a set"),
        pytest.param(
            Config(),
            f"{__name__}.Config",
            "save dataclasses.asdict(...), a dict, remove it",
            id="a dataclass",
        ),
        pytest.param(
            Network(),
            f"{__name__}.Network",
            "save the parameters that its init() makes, remove it",
            id="a module of Flax",
        ),
        pytest.param(
            Meter(), f"{__name__}.Meter", "save its state_dict(), remove it", id="an object's state"
        ),
        pytest.param(
            deque([1]), "collections.deque", "save list(...) of it, remove it", id="a deque"
        ),
        pytest.param(
            bytearray(b"x"), "builtins.bytearray", "save bytes(...) of it, remove it", id="a buffer"
        ),
        pytest.param(torch.float32, "torch.dtype", TEXT, id="a torch.dtype"),
        pytest.param(torch.device("cpu"), "torch.device", TEXT, id="a torch.device"),
    ],
)
def test_an_object_that_is_no_value(tmp_path: Path, leaf: object, name: str, advice: str) -> None:
    assert refused(tmp_path, {"x": leaf}) == (
        f"  - x: a {name} is neither a tensor nor a plain Python value; {advice}, "
        "or turn it into bytes by options=xckpt.SaveOptions(serialise=...)"
    )


def fake() -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.ones(2))


def byte_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, dtype=torch.uint8).view(dtype)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "tensor, advice",
    [
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "int_repr(), q_scale()",
            id="quantised",
        ),
        pytest.param(lambda: torch.eye(2).to_sparse(), "indices and values", id="sparse"),
        pytest.param(lambda: torch.eye(2).to_sparse_csr(), "or to_dense()", id="compressed rows"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(1)]), "to_padded_tensor()", id="nested"
        ),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
            "values() and offsets()",
            id="jagged",
        ),
        pytest.param(lambda: torch.ones(2, device="meta"), "nn.Module.to_empty", id="meta"),
        pytest.param(fake, "a FakeTensor has no elements; use a tensor on the meta", id="fake"),
        pytest.param(lambda: torch.nn.LazyLinear(3).weight, "first forward pass", id="lazy"),
        pytest.param(
            lambda: masked_tensor(torch.ones(2), torch.tensor([True, False])),
            "store the plain tensors inside it",
            id="masked",
        ),
        pytest.param(
            lambda: torch.ones(2, dtype=torch.complex32), "complex32 to complex64", id="complex32"
        ),
        pytest.param(lambda: byte_tensor(torch.bits8), "to uint8 by .view", id="bits8"),
        pytest.param(
            lambda: byte_tensor(torch.float4_e2m1fn_x2), "to uint8 by .view", id="float4_x2"
        ),
    ],
)
def test_a_tensor_without_plain_elements(
    tmp_path: Path, tensor: Callable[[], torch.Tensor], advice: str
) -> None:
    text = refused(tmp_path, {"model": {"x": tensor()}})
    assert text.startswith("  - model/x: ") and advice in text


@pytest.mark.parametrize(
    "key, kind",
    [
        (1.5, "a float"),
        ((1,), "a tuple"),
        (None, "a NoneType"),
        (True, "a bool"),
        (np.int64(3), "an int64"),
    ],
)
def test_a_key_that_is_no_name(tmp_path: Path, key: object, kind: str) -> None:
    text = refused(tmp_path, {"m": {key: 1}})
    assert text == f"  - m: dict key {key!r} is {kind}; use str or int keys"


def test_keys_that_look_odd_come_back(tmp_path: Path) -> None:
    keys = ["a/b", "..", ".", "", "zarr.json", "a\0b", "x" * 300, "A", "a", "0", 0, "é", " "]
    state = {key: np.full(2, number) for number, key in enumerate(keys)} | {
        "v": dict.fromkeys(keys)
    }
    xckpt.save(tmp_path / "c", state)
    loaded = xckpt.load(tmp_path / "c")
    assert list(loaded) == list(state) and list(loaded["v"]) == keys
    assert all(loaded[key].tolist() == [number] * 2 for number, key in enumerate(keys))


def test_a_tree_without_end(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {}
    cycle["me"] = cycle
    assert refused(tmp_path, cycle) == "  - me: the tree contains itself"
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    assert refused(tmp_path, deep).endswith("...: more than 64 containers deep")


def test_a_donated_array_and_a_tracer(tmp_path: Path) -> None:
    array = jnp.ones(3)
    array.delete()
    text = refused(tmp_path, {"x": array})
    assert "x: this jax.Array was deleted or donated (donate_argnums)" in text
    assert text.endswith("save the array that the computation returned")

    def step(x: jax.Array) -> jax.Array:
        xckpt.save(tmp_path / "c", {"x": x})
        return x

    text = said(xckpt.UnsupportedLeafError, lambda: jax.jit(step)(jnp.ones(2)))
    assert "cannot run inside jit, grad, vmap or scan; call them outside" in text


def test_a_number_and_an_array_that_do_not_fit(tmp_path: Path) -> None:
    """TrainState.step, and others: what fits is loaded, for the rest there is a way."""
    xckpt.save(tmp_path / "c", {"step": jnp.int32(3), "rate": np.float64(0.5), "n": 3})
    like = {"step": 0, "rate": 0.0, "n": np.zeros((), np.int32)}
    assert xckpt.load(tmp_path / "c", like)["step"] == 3
    wrong = {"step": 0.0, "rate": 0, "n": np.zeros(2, np.int32)}
    assert said(xckpt.TreeMismatchError, lambda: xckpt.load(tmp_path / "c", wrong)).splitlines()[
        1:
    ] == [
        "  - step: a 0-d int32 array in the checkpoint, a Python float wanted (cast=True converts)",
        "  - rate: a 0-d float64 array in the checkpoint, a Python int wanted (cast=True converts)",
        "  - n: the checkpoint holds a Python int, not a tensor",
    ]


def on_a_mesh(path: str) -> str:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    like = {"w": NamedSharding(mesh, PartitionSpec(None, "d"))}
    return said(xckpt.UnsupportedLeafError, lambda: xckpt.load(path, like))


def test_a_mesh_that_does_not_divide(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"w": np.zeros((64, 7), np.float32)})
    (text,) = jax_jobs.run(on_a_mesh, 1, str(tmp_path / "c"), devices=4)
    assert "  - w: NamedSharding(mesh=Mesh('d': 4" in str(text)
    assert "does not fit the shape (64, 7); JAX says: " in str(text)
    assert "axis 1 is partitioned 4 times, but the dimension size is 7" in str(text)


def test_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert said(xckpt.CheckpointExistsError, lambda: xckpt.save(tmp_path, {"n": 1})) == (
        f"{tmp_path} is not empty and holds no checkpoint; nothing there was touched: choose "
        "another path, or pass overwrite=True to save there and keep the files"
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_scheme_of_the_web() -> None:
    for call in (lambda: xckpt.load("https://a/b"), lambda: xckpt.save("https://a/b", {"n": 1})):
        assert said(xckpt.StorageError, call) == (
            "https://a/b: the scheme 'https' is not supported; download it and give a local path, "
            "or give file://, memory://, s3:// or gs://"
        )


def test_damage_is_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c"
    xckpt.save(path, {"w": np.arange(6.0).reshape(2, 3)})
    chunk, manifest = path / "w" / "c" / "0" / "0", path / "xckpt.json"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    assert said(xckpt.CorruptCheckpointError, lambda: xckpt.load(path)) == (
        f"w: [0, 2) x [0, 3) in {chunk}: its digest differs from the one saved; "
        "restore it from a copy of the checkpoint, or load an older one"
    )
    chunk.unlink()
    assert said(xckpt.CorruptCheckpointError, lambda: xckpt.load(path)) == (
        f"w: [0, 2) x [0, 3) in {chunk}: the chunk is missing; "
        "restore it from a copy of the checkpoint, or load an older one"
    )
    manifest.write_bytes(manifest.read_bytes()[:50])
    text = said(xckpt.ManifestError, lambda: xckpt.load(path))
    assert text.startswith(f"{path}: the manifest is truncated, or it is not a manifest: ")


def test_dicts_of_other_classes(tmp_path: Path) -> None:
    """They come back as dicts, and as what they were where a target says so."""
    state = {"o": OrderedDict(b=1, a=2), "d": defaultdict(int, {"a": 1}), "m": Counter({30: 1})}
    xckpt.save(tmp_path / "c", state)
    plain = xckpt.load(tmp_path / "c")
    assert plain == state and {type(value) for value in plain.values()} == {dict}
    like = xckpt.load(tmp_path / "c", state)
    assert [type(value) for value in like.values()] == [OrderedDict, defaultdict, Counter]
    assert list(like["o"]) == ["b", "a"] and like["m"] == Counter({30: 1})
