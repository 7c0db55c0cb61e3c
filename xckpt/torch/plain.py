"""What a tensor must be to be read or written: plain elements in memory, of a known type.

1. `plain` waits for a collective under way, refuses what has no plain elements (`_FAULTS`) and
   leaves autograd.
2. `check_readable` refuses a tensor without values: on the meta device, or its storage freed.
3. `check_writable` refuses a tensor that cannot be filled in place.

Every refusal names the leaf and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from xckpt.errors import UnsupportedLeafError
from xckpt.torch.buffers import format_dtype


def plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The elements of a tensor that is no DTensor, outside autograd and at rest.

    Raises:
        UnsupportedLeafError: they are not plain elements in memory.
    """
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedLeafError(
            f"{name}: a lazy parameter has no shape yet; run the module's first forward pass before"
        )
    wait = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor has it, a tensor has not
    local = tensor if wait is None else wait()
    for unfit, advice in _FAULTS:
        if unfit(local):
            raise UnsupportedLeafError(f"{name}: {advice.format(kind=type(local).__name__)}")
    return local.detach()


def known_dtype(dtype: torch.dtype, name: str) -> str:
    """The format's name of a dtype.

    Raises:
        UnsupportedLeafError: the format has no such type.
    """
    known = format_dtype(dtype)
    if known is None:
        raise UnsupportedLeafError(
            f"{name}: dtype {dtype} cannot be stored; convert it first "
            f"(complex32 to complex64, packed types to uint8 by .view)"
        )
    return known


def check_readable(local: torch.Tensor, name: str) -> None:
    """Refuse a tensor that has no values to save.

    Raises:
        UnsupportedLeafError: it is on the meta device, or its storage was freed.
    """
    if local.is_meta:
        raise UnsupportedLeafError(
            f"{name}: a tensor on the meta device has no elements to save; give it memory and "
            f"values first (nn.Module.to_empty and an initialisation), or leave it out"
        )
    _check_storage(local, name)


def check_writable(local: torch.Tensor, name: str) -> None:
    """Refuse a tensor that cannot be filled in place.

    Raises:
        UnsupportedLeafError: it has no memory, or several of its elements are one in memory.
    """
    if local.is_meta:
        raise UnsupportedLeafError(
            f"{name}: a tensor on the meta device has no memory to load into; "
            f"use xckpt.load, which returns a new tensor, or Module.to_empty first"
        )
    _check_storage(local, name)
    steps = zip(local.shape, local.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise UnsupportedLeafError(
            f"{name}: several elements of this expanded tensor of shape {tuple(local.shape)} and "
            f"strides {local.stride()} are one in memory; load into a clone() of it"
        )


def _check_storage(local: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose memory was taken away (FSDP frees unsharded parameters so)."""
    if local.device.type not in ("cpu", "cuda") or local.numel() == 0:
        return
    if local.is_contiguous():
        last = local.storage_offset() + local.numel() - 1
    else:
        steps = zip(local.shape, local.stride(), strict=True)
        last = local.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if local.untyped_storage().nbytes() < (last + 1) * local.element_size():
        raise UnsupportedLeafError(
            f"{name}: the storage of this tensor of shape {tuple(local.shape)} was freed; save the "
            f"sharded parameter instead, or gather it before the save"
        )


def _is_wrapper(tensor: torch.Tensor) -> bool:
    plain = getattr(torch.Tensor, "__torch_dispatch__", None)
    return getattr(type(tensor), "__torch_dispatch__", None) is not plain


_FAULTS: tuple[tuple[Callable[[torch.Tensor], bool], str], ...] = (
    (
        lambda tensor: type(tensor).__name__ == "FakeTensor",
        "a FakeTensor has no elements; use a tensor on the meta device where only the shape counts",
    ),
    (
        lambda tensor: tensor.is_nested,
        "a nested tensor has rows of several lengths; store its values() and offsets() instead, "
        "or to_padded_tensor()",
    ),
    (
        lambda tensor: tensor.is_quantized,
        "a quantised tensor; store its int_repr(), q_scale() and q_zero_point() instead, "
        "or dequantize() it",
    ),
    (
        lambda tensor: tensor.layout is not torch.strided,
        "a sparse or otherwise packed tensor; store its indices and values, or to_dense(), instead",
    ),
    (
        _is_wrapper,
        "a tensor subclass ({kind}) that defines its own operations, so that its memory need not "
        "hold its elements; store the plain tensors inside it, or convert it to a DTensor",
    ),
)
"""What makes a tensor unfit, and what to do about it; the first that holds is reported."""
