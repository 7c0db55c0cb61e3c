"""The door of these tests to torch_xla: eight CPU devices, random meshes and specs over them.

Importing this module makes the devices one SPMD device, which must happen before any tensor.
"""

# torch_xla has an environment of its own; where the types are checked, it isn't installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "8")
# XLA warns at each compilation that its partitioner will be replaced.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime
from hypothesis import strategies as st
from numpy.typing import NDArray

from xckpt.torch.leaf import from_numpy, to_numpy

# Left behind for the workers of pytest-xdist by the process that started them; it earns a warning.
os.environ.pop("XLA_USE_SPMD", None)
torch_xla.runtime.use_spmd()

DEVICES = torch_xla.runtime.global_runtime_device_count()
SHAPES = [(8,), (2, 4), (4, 2), (8, 1), (2, 2, 2)]
DTYPES = ["float32", "bfloat16", "int8", "int32", "int64", "uint8", "bool", "complex64"]
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 11, 13, 16])

Array = NDArray[np.generic]
Spec = tuple[int | tuple[int, ...] | None, ...]


def device() -> torch.device:
    """The one device that stands for all."""
    return torch_xla.device()


def sync() -> None:
    """Compute what was recorded."""
    torch_xla.sync()


@dataclass(frozen=True)
class Layout:
    """A mesh of all devices, and which of its axes cut each dimension."""

    order: tuple[int, ...]
    mesh: tuple[int, ...]
    spec: Spec

    def put(self, array: Array) -> Any:
        """The array as an `XLAShardedTensor`."""
        return mark(from_numpy(array.copy()).to(device()), self.mesh, self.spec, order=self.order)


def mark(
    tensor: torch.Tensor,
    mesh: Sequence[int],
    spec: Sequence[Any],
    *,
    order: Sequence[int] = range(DEVICES),
    names: tuple[str, ...] | None = None,
) -> Any:
    """`mark_sharding` of a tensor on the device."""
    over = spmd.Mesh(np.array(order), tuple(mesh), names)
    return spmd.mark_sharding(tensor, over, tuple(spec))


@st.composite
def layouts(draw: st.DrawFn, rank: int) -> Layout:
    """Each mesh axis cuts one dimension or none; a dimension may have several axes."""
    mesh = draw(st.sampled_from(SHAPES))
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(range(len(mesh)))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    spec = tuple(tuple(axes) if len(axes) > 1 else (axes[0] if axes else None) for axes in dims)
    straight = tuple(range(DEVICES))
    return Layout(draw(st.just(straight) | st.permutations(straight).map(tuple)), mesh, spec)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Up to three dimensions; primes, 0 and 0-d among them."""
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    if 0 in shape:
        # torch_xla cannot pad a tensor without elements.
        return tuple(8 if size else 0 for size in shape)
    return shape


def inner(tensor: Any) -> torch.Tensor:
    """What an `XLAShardedTensor` wraps."""
    return tensor.global_tensor if isinstance(tensor, spmd.XLAShardedTensor) else tensor


def sharding(tensor: Any) -> str:
    """XLA's own text of a tensor's sharding."""
    return torch_xla._XLAC._get_xla_sharding_spec(inner(tensor))


def assert_holds(tensor: Any, array: Array) -> None:
    """Every device's shard, padding aside, is the part of the array that its indices name."""
    assert tuple(tensor.shape) == array.shape
    whole = to_numpy(inner(tensor))
    assert whole.dtype == array.dtype
    assert whole.tobytes() == np.ascontiguousarray(array).tobytes()
    if not sharding(tensor):
        return
    shards = spmd.XLAShardedTensor(inner(tensor)).local_shards
    assert len(shards) == DEVICES
    for shard in shards:
        wanted = array if shard.indices is Ellipsis else array[tuple(shard.indices)]
        found = to_numpy(shard.data)[tuple(slice(0, size) for size in wanted.shape)]
        assert np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted).tobytes()


def stager_of_torch_xla(state: dict[str, Any]) -> dict[str, Any]:
    """What torch_xla's own checkpoint manager makes of a state before it saves in a thread."""
    from torch_xla.experimental.distributed_checkpoint import _helpers

    return _helpers._sharded_cpu_state_dict(state)


class Transfers:
    """Counts calls of torch_xla's transfers; each is made as ever."""

    TO_HOST = "_get_local_shards"
    TO_DEVICES = "_load_local_shards"
    NEW = "_global_tensor_from_cpu_shards"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        self._patch = monkeypatch
        self._watchers: list[Callable[[Any], None]] = []
        for name in (self.TO_HOST, self.TO_DEVICES, self.NEW):
            self._count(torch_xla._XLAC, name)

    def _count(self, module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any) -> Any:
            self.counts[name] += 1
            result = real(*args)
            for watcher in self._watchers if name == self.TO_HOST else []:
                watcher(result)
            return result

        self.counts[name] = 0
        self._patch.setattr(module, name, counted)

    def watch(self, watcher: Callable[[Any], None]) -> None:
        """Show ``watcher`` what each transfer to the host returns."""
        self._watchers.append(watcher)

    @property
    def to_host(self) -> int:
        return self.counts[self.TO_HOST]

    @property
    def to_devices(self) -> int:
        return self.counts[self.TO_DEVICES] + self.counts[self.NEW]


def numbers(shape: tuple[int, ...], dtype: str) -> Array:
    """Small numbers of any dtype, distinct as far as it goes."""
    from xckpt.core.dtypes import numpy_dtype

    count = math.prod(shape)
    values = np.arange(count) % {"bool": 2, "int8": 127, "bfloat16": 251}.get(dtype, 251)
    return values.astype(numpy_dtype(dtype)).reshape(shape)
