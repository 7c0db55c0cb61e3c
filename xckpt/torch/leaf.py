"""Tensors as leaves: their elements in memory, as NumPy sees them, and what a save reads.

1. **Dtypes**: a dtype of the format is torch's dtype of the same name (`format_dtype`,
   `torch_dtype`).
2. **Elements**: `plain` waits for a collective under way, refuses what has no plain elements in
   memory (`_FAULTS`) and leaves autograd. `check_readable` and `check_writable` refuse a tensor
   without values, or one that cannot be filled. A refusal names the leaf and says what to do.
3. **NumPy**: what NumPy has under the same name crosses by `Tensor.numpy`. What only ml_dtypes has
   (bfloat16, float8, ...) crosses as an integer of the same width: a view on torch's side, and
   another view on NumPy's (`to_numpy`, `writable_numpy`, `from_numpy`). No strides are lost and
   nothing is copied, but for what the host cannot reach: another device's memory, and tensors
   whose conjugation or negation torch has only noted down in a bit.
4. **Saving**: a `TensorLeaf` is boxes of a tensor, and a view of local memory for each. What a load
   fills is in `xckpt.torch.target`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES, dtype_name, numpy_dtype
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.spread import Spread
from xckpt.core.geometry.strides import is_one_to_one
from xckpt.core.metadata import Sharding
from xckpt.errors import UnsupportedLeafError

_TORCH: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in DTYPES
    if isinstance(getattr(torch, name, None), torch.dtype)
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _TORCH.items()}

PLAIN: Final = (torch.Tensor, torch.nn.Parameter)  # nearly all leaves of nearly all states
_CARRIED: Final = frozenset(name for name in _TORCH if DTYPES[name].isbuiltin != 1)
"""The types that ml_dtypes has added to NumPy."""
_FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
_OUTSIDE: Final = "call them outside"
_CARRIERS: Final = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
"""Bytes an element -> the integers that carry a dtype which `Tensor.numpy` does not know."""


def format_dtype(dtype: torch.dtype) -> str | None:
    """The format's name of a torch dtype, or None if the format has no such type.

    Example:
        >>> format_dtype(torch.bfloat16), format_dtype(torch.complex32)
        ('bfloat16', None)
    """
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype | None:
    """torch's dtype of a format name, or None if torch has no such type.

    Example:
        >>> torch_dtype("float8_e5m2"), torch_dtype("float8_e3m4")
        (torch.float8_e5m2, None)
    """
    return _TORCH.get(name)


def known_dtype(dtype: torch.dtype, name: str) -> str:
    """The format's name of a dtype.

    Raises:
        UnsupportedLeafError: the format has no such type.
    """
    known = format_dtype(dtype)
    if known is None:
        raise UnsupportedLeafError(f"{name}: dtype {dtype} cannot be stored; {advice_on(dtype)}")
    return known


def advice_on(dtype: torch.dtype) -> str:
    """What to do about a tensor of a dtype that cannot be stored.

    Example:
        >>> advice_on(torch.complex32)
        'convert it first (complex32 to complex64)'
    """
    if dtype is torch.complex32:
        return "convert it first (complex32 to complex64)"
    if str(dtype).startswith(("torch.q", "torch.uq")):
        return "store its int_repr(), or dequantize() it"
    return "bring its bytes to uint8 by .view(torch.uint8)"


def plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The elements of a tensor that is not a DTensor, outside autograd and at rest.

    Raises:
        UnsupportedLeafError: they are not plain elements in memory.
    """
    return at_rest(tensor, name).detach()


def at_rest(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """As `plain`, but perhaps a parameter or a part of an autograd graph."""
    _check_mode(name)
    if type(tensor) in PLAIN and is_strided(tensor):  # as most are
        return tensor
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedLeafError(
            f"{name}: a lazy parameter has no shape yet; run the module's first forward pass before"
        )
    local = awaited(tensor)
    for unfit, advice in () if type(local) in PLAIN and is_strided(local) else _FAULTS:
        if unfit(local):
            raise UnsupportedLeafError(f"{name}: {advice.format(kind=type(local).__name__)}")
    return local


def _check_mode(name: str) -> None:
    """Refuse any tensor where torch notes what is done with tensors, and does not do it."""
    if torch._C._get_tracing_state() is not None:
        where = "torch.jit.trace"
    elif torch._C._get_dispatch_mode(_FAKE) is not None:
        where = "a FakeTensorMode"
    else:
        return
    raise UnsupportedLeafError(f"{name}: save and load cannot run inside {where}; {_OUTSIDE}")


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether strides say where in memory each element is."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor, or the result of the collective that is making it."""
    wait = getattr(tensor, "wait", None)  # an AsyncCollectiveTensor has it, a tensor has not
    return tensor if wait is None else wait()


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
        UnsupportedLeafError: it has no memory, or several of its elements share memory.
    """
    if local.is_meta:
        raise UnsupportedLeafError(
            f"{name}: a tensor on the meta device has no memory to load into; "
            f"use xckpt.load, which returns a new tensor, or Module.to_empty first"
        )
    _check_storage(local, name)
    if not (local.is_contiguous() or is_one_to_one(local.shape, local.stride())):
        raise UnsupportedLeafError(
            f"{name}: several elements of this tensor of shape {tuple(local.shape)} and strides "
            f"{local.stride()} share memory; load into a clone() of it"
        )


def fillable(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements of a tensor that can be filled in place; None if it cannot."""
    try:
        local = plain(tensor, "")
        check_writable(local, "")
    except UnsupportedLeafError:
        return None
    return local


def _check_storage(local: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose memory was taken away (FSDP frees unsharded parameters so)."""
    # To ask for the device takes six times as long.
    if not (local.is_cpu or local.is_cuda) or local.numel() == 0:
        return
    if local.is_contiguous():
        last = local.storage_offset() + local.numel() - 1
    else:
        steps = zip(local.shape, local.stride(), strict=True)
        last = local.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    try:
        size = local.untyped_storage().nbytes()
        is_traced = torch._is_functional_tensor(local)  # its storage says a size, and has no memory
    except NotImplementedError:  # so says what torch.func.grad, jvp or vmap calls a function with
        size, is_traced = 0, True
    if is_traced:
        raise UnsupportedLeafError(
            f"{name}: a tensor that torch.func.grad, jvp, vmap or functionalize traces has no "
            f"memory of its own; save and load cannot run inside these, so {_OUTSIDE}"
        )
    if size < (last + 1) * local.element_size():
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


def reachable(tensor: torch.Tensor) -> bool:
    """Whether NumPy can look at the tensor's memory and see the tensor's values."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def to_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor as a NumPy array of its own dtype (ml_dtypes included) and strides.

    It shares the tensor's memory if that is `reachable`, else it is a copy on the host.

    Raises:
        KeyError: the format has no such dtype.

    Example:
        >>> tensor = torch.ones(2, 3, dtype=torch.bfloat16).T
        >>> array = to_numpy(tensor)
        >>> tensor[0, 1] = 5
        >>> array.dtype.name, array.shape, float(array[0, 1])
        ('bfloat16', (3, 2), 5.0)
    """
    if reachable(tensor):
        return writable_numpy(tensor)
    return writable_numpy(tensor.detach().resolve_conj().resolve_neg().cpu())


def writable_numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor's own memory as a NumPy array; the tensor must be `reachable`.

    Raises:
        KeyError: the format has no such dtype.
    """
    name = _NAMES[tensor.dtype]
    plain = tensor.detach() if tensor.requires_grad else tensor
    if name not in _CARRIED:
        return plain.numpy()
    dtype = numpy_dtype(name)
    carrier, _ = _CARRIERS[dtype.itemsize]
    return plain.view(carrier).numpy().view(dtype)


def from_numpy(array: NDArray[np.generic]) -> torch.Tensor:
    """A NumPy array as a tensor over the same memory.

    A copy if torch cannot look at it: read-only memory, foreign byte order, negative strides.

    Raises:
        KeyError: torch has no such dtype.

    Example:
        >>> import ml_dtypes
        >>> from_numpy(np.ones(2, ml_dtypes.float8_e4m3fn))
        tensor([1., 1.], dtype=torch.float8_e4m3fn)
    """
    name = dtype_name(array.dtype) or str(array.dtype)
    dtype = _TORCH[name]
    native = array.dtype.newbyteorder("=")
    if not array.flags.writeable or array.dtype != native or min(array.strides, default=0) < 0:
        array = array.astype(native, order="C", copy=True)
    if name not in _CARRIED:
        return torch.from_numpy(array)
    _, carrier = _CARRIERS[native.itemsize]
    return torch.from_numpy(array.view(carrier)).view(dtype)


class TensorLeaf(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor of any kind to be saved: boxes of it, and the local elements of each.

    A state has many, in each save anew: msgspec makes one in a tenth of a frozen dataclass's time.
    """

    shape: tuple[int, ...]
    dtype: str
    """Empty where this rank has no part of the tensor and does not know."""
    boxes: Boxes
    """The whole of a plain tensor; of a sharded one the boxes that this rank holds."""
    parts: Sequence[torch.Tensor]
    """The elements of each box: the caller's own tensors, or views of them."""
    sharded: bool = False
    sharding: Sharding | None = None
    annotation: str = ""
    spread: Callable[[], Spread | None] | None = None  # where all ranks' boxes are, if known
    is_apart: bool = False
    """Whether its mesh lacks some processes, which may hold another tensor of its name."""

    def data(self, index: int) -> torch.Tensor:
        """A view of the caller's memory outside autograd, on its own device.

        Made when it is asked for: of a hundred thousand small tensors views take tens of MiB.
        """
        return self.parts[index].detach()
