"""torch tensors and NumPy arrays over one memory, for all dtypes and strides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.dtypes import DTYPES, numpy_dtype
from xckpt.torch.leaf import (
    format_dtype,
    from_numpy,
    reachable,
    to_numpy,
    torch_dtype,
    writable_numpy,
)

SHARED = [name for name in DTYPES if torch_dtype(name) is not None]
EXPECTED = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    """A tensor of every bit pattern that comes (booleans are 0 or 1)."""
    item = numpy_dtype(dtype).itemsize
    generator = np.random.default_rng(len(dtype))
    raw = generator.integers(0, 2 if dtype == "bool" else 256, (*shape, item), np.uint8)
    raw_tensor = torch.from_numpy(raw)
    made = torch_dtype(dtype)
    assert made is not None
    return raw_tensor.view(made).reshape(shape)


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_torch_has_the_types_that_both_worlds_share() -> None:
    assert set(SHARED) >= EXPECTED
    assert all(format_dtype(dtype) == name for name in SHARED if (dtype := torch_dtype(name)))


@pytest.mark.parametrize("dtype", SHARED)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[1:, ::2],
        lambda t: t[2, 3],
        lambda t: t[:0],
        lambda t: t[None, :, None],
        lambda t: t[0].expand(3, 7),
    ],
    ids=["whole", "transposed", "strided", "scalar", "empty", "unsqueezed", "expanded"],
)
def test_memory_is_shared_and_bits_are_kept(dtype: str, view) -> None:
    tensor = random_bits(dtype, 5, 7)
    array = to_numpy(view(tensor))
    assert array.dtype == numpy_dtype(dtype)
    assert array.shape == tuple(view(tensor).shape)
    whole = writable_numpy(tensor)
    assert bits(array) == bits(view_of(whole, view))
    if array.size:
        assert np.shares_memory(array, whole)
        whole[...] = np.zeros_like(whole)
        assert bits(array) == bytes(array.nbytes)


def view_of(array: np.ndarray, view) -> np.ndarray:
    """The same view, taken by torch of the elements' positions and by NumPy of the elements."""
    positions = torch.arange(array.size).reshape(array.shape)
    return array.reshape(-1)[view(positions).numpy()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32", "bool", "complex64"])
def test_writes_reach_the_tensor(dtype: str) -> None:
    tensor = torch.zeros(4, 6, dtype=torch_dtype(dtype)).T
    writable_numpy(tensor)[1:3, ::2] = np.ones((2, 2), numpy_dtype(dtype))
    expected = torch.zeros(6, 4)
    expected[1:3, ::2] = 1
    assert torch.equal(tensor.to(torch.complex64), expected.to(torch.complex64))


def test_autograd_stays_out() -> None:
    tensor = torch.nn.Parameter(torch.ones(3))
    assert np.shares_memory(to_numpy(tensor), tensor.detach().numpy())
    assert tensor.requires_grad


def test_bits_of_conjugation_and_negation_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    conjugate = tensor.conj()
    negative = conjugate.imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    np.testing.assert_array_equal(to_numpy(conjugate), np.array([1 - 2j, 3 + 4j], np.complex64))
    np.testing.assert_array_equal(to_numpy(negative), np.array([-2, 4], np.float32))
    assert reachable(tensor)
    assert not reachable(conjugate)
    assert not reachable(negative)
    assert not reachable(torch.empty(2, device="meta"))


@pytest.mark.parametrize("dtype", SHARED)
def test_from_numpy_shares_memory(dtype: str) -> None:
    tensor = random_bits(dtype, 3, 4)
    array = to_numpy(tensor)[:, 1:]
    again = from_numpy(array)
    assert again.dtype == tensor.dtype
    assert again.data_ptr() == tensor[:, 1:].data_ptr()
    assert again.stride() == (4, 1)


@given(st.integers(0, 5), st.integers(0, 5), st.sampled_from(["<", ">"]), st.booleans())
def test_from_numpy_copies_what_torch_cannot_look_at(
    rows: int, columns: int, order: str, writable: bool
) -> None:
    array = np.arange(rows * columns, dtype=f"{order}i4").reshape(rows, columns)
    array.flags.writeable = writable
    np.testing.assert_array_equal(from_numpy(array[::-1]).numpy(), array[::-1])
    frozen = np.ones((rows, columns), ml_dtypes.bfloat16)[:, ::-1]
    frozen.flags.writeable = writable
    assert torch.equal(from_numpy(frozen), torch.ones(rows, columns, dtype=torch.bfloat16))


def test_a_type_that_torch_lacks() -> None:
    with pytest.raises(KeyError, match="float8_e3m4"):
        from_numpy(np.ones(2, ml_dtypes.float8_e3m4))
