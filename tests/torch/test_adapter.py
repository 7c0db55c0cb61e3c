"""The adapter for plain tensors: described, aimed at, filled and refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import xckpt
from xckpt.core.adapter import Adapters
from xckpt.core.leaf import SourceLeaf, TargetLeaf
from xckpt.errors import UnsupportedLeafError
from xckpt.torch.adapter import ADAPTER, JOINED, MOST_JOINED
from xckpt.torch.leaf import _NAMES, TensorLeaf, to_numpy
from xckpt.torch.target import PlainTarget, TensorTarget


def source_of(leaf: torch.Tensor) -> TensorLeaf:
    return ADAPTER.describe(leaf, "w")


def target_of(like: torch.Tensor, *, in_place: bool) -> PlainTarget | TensorTarget:
    return ADAPTER.target_for(like, "w", in_place=in_place)


def filled(target: PlainTarget | TensorTarget, values: np.ndarray) -> torch.Tensor:
    """Write a target as the engine does: box by box, through NumPy where that is possible."""
    for index, box in enumerate(target.boxes):
        region = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        buffer = target.buffer(index)
        memory = ADAPTER.writable_numpy(buffer)
        assert memory is not None
        memory[...] = values[region]
        target.commit(index)
    return target.result()


def test_sources_and_targets_are_leaves() -> None:
    assert ADAPTER.children({}) is None
    assert ADAPTER.rebuild({}, []) is None
    assert isinstance(source_of(torch.ones(2)), SourceLeaf)
    assert isinstance(target_of(torch.ones(2), in_place=True), TargetLeaf)


@pytest.mark.parametrize("leaf", [1.5, np.ones(2), torch.float32, torch.Size([2]), None, "text"])
def test_what_is_not_torch_is_left_to_others(leaf: object) -> None:
    alone = Adapters((ADAPTER,))
    assert not ADAPTER.owns(leaf)
    assert alone.describe(leaf, "w") is None
    assert alone.copyable(leaf, "w") is None
    assert alone.target_for(leaf, "w", in_place=False) is None


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.nn.Parameter(torch.ones(4)),
        torch.nn.Buffer(torch.ones(4)),
        torch.tensor(3),
        torch.ones(0, 5),
        torch.ones(3)[1].expand(2, 2),
        torch.ones(2, requires_grad=True) * 2,
    ],
    ids=["matrix", "transposed", "parameter", "buffer", "scalar", "empty", "expanded", "non-leaf"],
)
def test_a_plain_tensor_is_one_box(leaf: torch.Tensor) -> None:
    source = source_of(leaf)
    assert source.shape == tuple(leaf.shape)
    assert source.dtype == str(leaf.dtype).removeprefix("torch.")
    assert not source.sharded
    assert source.sharding is None
    assert source.annotation == ""
    assert [(box.offsets, box.sizes) for box in source.boxes] == [
        ((0,) * leaf.ndim, tuple(leaf.shape))
    ]
    data = source.data(0)
    assert not data.requires_grad
    assert data.data_ptr() == leaf.data_ptr()
    array = ADAPTER.to_numpy(data)
    assert array is not None
    np.testing.assert_array_equal(array, leaf.detach().numpy())


def test_a_collective_under_way_is_waited_for() -> None:
    source = source_of(AsyncCollectiveTensor(torch.arange(3.0)))
    assert type(source.data(0)) is torch.Tensor
    assert source.data(0).tolist() == [0, 1, 2]


class Tagged(torch.Tensor):
    """A subclass that only carries a name."""


class Wrapped(torch.Tensor):
    """A subclass whose own memory holds nothing."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's own, of types that it gives up
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    "make, advice",
    [
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "int_repr"),
        (nested, "values"),
        (fake, "FakeTensor"),
        (freed, "freed"),
        (torch.nn.UninitializedParameter, "first forward pass"),
        (lambda: torch.ones(2).as_subclass(Wrapped), "subclass"),
        (lambda: torch.empty(2, dtype=torch.complex32), "complex32"),
        (lambda: torch.empty(2, dtype=torch.bits8), "bits8"),
        (lambda: torch.nn.Linear(2, 2), "a Linear in the state of another object"),
        (lambda: torch.optim.SGD([torch.ones(2, requires_grad=True)]), "load_state_dict"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(make, advice: str) -> None:
    leaf, adapters = make(), Adapters((ADAPTER,))
    with pytest.raises(UnsupportedLeafError, match=f"model/wte: .*{advice}"):
        adapters.describe(leaf, "model/wte")
    with pytest.raises(UnsupportedLeafError, match=f"model/wte: .*{advice}"):
        adapters.target_for(leaf, "model/wte", in_place=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.functionalize])
def test_what_a_transformation_traces_is_refused_by_name(transform) -> None:
    def traced(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedLeafError, match=r"w: .*torch\.func.* call them outside"):
            ADAPTER.describe(tensor, "w")
        with pytest.raises(UnsupportedLeafError, match=r"w: .*torch\.func.* call them outside"):
            ADAPTER.target_for(tensor, "w", in_place=True)
        with pytest.raises(UnsupportedLeafError, match=r"w: .*torch\.func.* call them outside"):
            ADAPTER.copyable(tensor, "w")
        return tensor.sum()

    transform(traced)(torch.ones(3))


def jit_trace(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    torch.jit.trace(call, tensor, check_trace=False)


def fake_mode(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
    with FakeTensorMode():
        call(tensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch.jit
@pytest.mark.parametrize(
    "run, where", [(jit_trace, "torch.jit.trace"), (fake_mode, "a FakeTensorMode")]
)
def test_save_and_load_are_refused_where_torch_notes_calls(run, where: str, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "a", {"w": torch.ones(3)})
    calls = (
        lambda tensor: xckpt.save(tmp_path / "b", {"w": tensor}),
        lambda tensor: xckpt.save_async(tmp_path / "b", {"w": tensor}).result(),
        lambda tensor: xckpt.load(tmp_path / "a", {"w": tensor}),
        lambda tensor: xckpt.load_into(tmp_path / "a", {"w": tensor}),
        lambda _: xckpt.load(tmp_path / "a", framework="torch"),
    )

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        for call in calls:
            with pytest.raises(UnsupportedLeafError, match=f"w: .* inside {where}; call them out"):
                call(tensor)
        return tensor

    run(noted, torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_subclass_that_adds_no_operations_is_a_tensor() -> None:
    assert source_of(torch.ones(2).as_subclass(Tagged)).shape == (2,)


def test_an_expanded_view_cannot_be_filled_in_place() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"w: .*share memory.*clone"):
        ADAPTER.target_for(torch.ones(3, 1).expand(3, 4), "w", in_place=True)
    assert filled(target_of(torch.ones(3, 1).expand(3, 4), in_place=False), np.eye(3, 4)).sum() == 3


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(3, 4, dtype=torch.bfloat16),
        torch.zeros(4, 3).T,
        torch.nn.Parameter(torch.zeros(3, 4)),
        torch.zeros(3, 4, device="meta", dtype=torch.float8_e5m2),
        torch.zeros(3, 4, dtype=torch.complex64).conj(),
        torch.zeros(3, 8)[:, ::2],
    ],
    ids=["bfloat16", "transposed", "parameter", "meta", "conjugate", "strided"],
)
def test_a_new_tensor_like_the_given(like: torch.Tensor) -> None:
    values = np.arange(12).reshape(3, 4) % 5 / 4
    result = filled(target_of(like, in_place=False), values)
    assert type(result) is torch.Tensor
    assert result.dtype == like.dtype
    assert result.device == torch.device("cpu")
    assert result.requires_grad == like.requires_grad
    assert result.is_leaf
    assert torch.equal(result.detach().to(torch.complex128), torch.from_numpy(values + 0j))
    if not like.is_meta:
        assert result.data_ptr() != like.data_ptr()
        assert like.detach().abs().sum() == 0
        assert result.stride() == torch.empty_like(like).stride()


def test_nothing_is_allocated_before_it_is_asked_for() -> None:
    target = target_of(torch.empty(2**62, dtype=torch.int8, device="meta"), in_place=False)
    assert target.shape == (2**62,)
    with pytest.raises(RuntimeError):
        target.buffer(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, 4),
        lambda: torch.zeros(4, 3).T,
        lambda: torch.zeros(6, 8)[::2, ::2],
        lambda: torch.zeros(3, 4, dtype=torch.complex64).conj(),
        lambda: torch.zeros(3, 4, requires_grad=True),
        lambda: torch.zeros(3, 4, dtype=torch.float16),
    ],
    ids=["whole", "transposed", "strided", "conjugate", "requires grad", "float16"],
)
def test_in_place_fills_the_tensor_itself(make) -> None:
    like = make()
    version = like._version
    values = np.arange(12).reshape(3, 4) % 5 / 4
    target = target_of(like, in_place=True)
    assert (target.buffer(0).data_ptr() == like.data_ptr()) == (not like.is_conj())
    assert target.buffer(0).data_ptr() == target.buffer(0).data_ptr()
    assert not target.buffer(0).requires_grad
    result = filled(target, values)
    assert result is like
    assert torch.equal(like.detach().to(torch.complex128), torch.from_numpy(values + 0j))
    assert like._version > version


def test_a_backward_pass_notices_a_load_in_between() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    filled(target_of(weight, in_place=True), np.zeros(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("conjugate", [False, True])
def test_inference_tensors_in_place(conjugate: bool) -> None:
    with torch.inference_mode():
        like = torch.zeros(2, dtype=torch.complex64)
        like = like.conj() if conjugate else like
    filled(target_of(like, in_place=True), np.array([1, 2j]))
    assert like.tolist() == [1, 2j]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], in_place: bool) -> None:
    result = filled(target_of(torch.zeros(shape), in_place=in_place), np.full(shape, 7.0))
    assert result.shape == shape
    assert (result == 7).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_empty_box_is_committed_unasked(in_place: bool) -> None:
    target = target_of(torch.zeros(0, 3, dtype=torch.complex64).conj(), in_place=in_place)
    target.commit(0)
    assert target.result().shape == (0, 3)


def test_tied_weights_in_place() -> None:
    weight = torch.zeros(2)
    first, second = (target_of(w, in_place=True) for w in (weight, weight.view(2)))
    filled(first, np.array([1, 2]))
    filled(second, np.array([1, 2]))
    assert weight.tolist() == [1, 2]


def test_host_memory_is_let_go_at_commit() -> None:
    target = target_of(torch.zeros(2, dtype=torch.complex64).conj(), in_place=True)
    buffer = weakref.ref(target.buffer(0))
    target.commit(0)
    gc.collect()
    assert buffer() is None


def test_buffers_are_the_same_for_all_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            target = target_of(torch.empty(64, 64, device="meta"), in_place=False)
            buffers = list(pool.map(target.buffer, [0] * 8))
            assert len({id(buffer) for buffer in buffers}) == 1
            target.commit(0)
            assert target.result().data_ptr() == buffers[0].data_ptr()


def test_copy_into() -> None:
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    assert ADAPTER.writable_numpy(conjugate) is None
    ADAPTER.copy_into(conjugate, np.array([1, 2j], np.complex64))
    assert conjugate.tolist() == [1, 2j]
    with pytest.raises(ValueError, match="float64"):
        ADAPTER.copy_into(torch.zeros(2), np.ones(2))
    with pytest.raises(ValueError, match="shape"):
        ADAPTER.copy_into(torch.zeros(2), np.ones(1, np.float32))


def test_small_tensors_are_joined_whatever_their_dtype_and_strides() -> None:
    """The bytes are those of each tensor, types in the order of their first ones."""
    tensors: list[torch.Tensor] = []
    for dtype in _NAMES:
        raw = torch.arange(64, dtype=torch.uint8) % 2
        tensors += [raw.view(dtype)[:2], raw.view(dtype).reshape(2, -1).T]
    tensors += [torch.zeros(()), torch.zeros(0), torch.ones(1 << 14), torch.ones(2).conj()]
    tensors.append(torch.tensor([1 + 2j]).conj())
    expected: dict[object, bytes] = {}
    for number, tensor in enumerate(tensors):
        joins = tensor.dtype in JOINED and tensor.numel() <= MOST_JOINED
        key = tensor.dtype if joins else number
        expected[key] = expected.get(key, b"") + to_numpy(tensor).tobytes()
    assert sorted(array.tobytes() for array in ADAPTER.joined(tensors)) == sorted(expected.values())
    assert set(_NAMES) > JOINED and len(expected) < len(tensors) - len(JOINED)


def test_pinned_memory_is_the_hosts_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty: Any = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory, **how: empty(size, **how))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with torch.device("meta"):
        memory = ADAPTER.pinned_memory(8)
    assert memory is not None and memory.nbytes == 8
