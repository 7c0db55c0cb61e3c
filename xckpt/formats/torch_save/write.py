"""An array in a file of its own, written without torch as `torch.save` writes a tensor.

1. ``data.pkl`` says of it what torch says of dtypes that have no storage class of their own: a
   tensor of that dtype over a storage of untyped bytes. torch 2.1 and newer takes any dtype so.
   Nothing is pickled: the text is put together here, from numbers and names.
2. The bytes lie uncompressed under ``data/0``, at a multiple of 64 bytes, and can be mapped.
3. A file appears under its name when it is whole, and may be written again.
"""

from __future__ import annotations

import os
import struct
import sys
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES

__all__ = ["SAVED_DTYPES", "write_array"]

SAVED_DTYPES: Final = frozenset(DTYPES) - {
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float4_e2m1fn",
    "int2",
    "int4",
}
"""The format's dtypes that torch has tensors of, and can save."""

_ALIGNMENT: Final = 64
_LOCAL_HEADER: Final = 30
"""Bytes before the name of an entry of a ZIP file."""
_PADDING: Final = struct.Struct("<2sH")
"""torch's own mark of an extra field that only fills up, and its length."""

# Of the pickle's language, version 2.
_MARK, _TUPLE, _REFER, _CALL, _FALSE, _END = b"(", b"t", b"Q", b"R", b"\x89", b"."


def write_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write an array of one of `SAVED_DTYPES`; `torch.load` makes a tensor of it.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> write_array(Path("w.pt"), np.arange(3, dtype=np.float32))
        >>> import torch
        >>> torch.load("w.pt")
        tensor([0., 1., 2.])
    """
    whole = np.asarray(array, order="C")
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with staged.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("archive/data.pkl"), _described(whole))
            archive.writestr(zipfile.ZipInfo("archive/byteorder"), sys.byteorder)
            elements = whole.reshape(-1).view(np.uint8)
            archive.writestr(_aligned("archive/data/0", file), elements.data)
            archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _aligned(name: str, file: IO[bytes]) -> zipfile.ZipInfo:
    """The next entry of a ZIP file, whose content begins at a multiple of `_ALIGNMENT`."""
    info = zipfile.ZipInfo(name)
    begin = file.tell() + _LOCAL_HEADER + len(name) + _PADDING.size
    filling = -begin % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", filling) + bytes(filling)
    return info


def _described(array: NDArray[np.generic]) -> bytes:
    """What ``data.pkl`` says: a call of torch's function that makes a tensor of a storage."""
    storage = (
        _text("storage"),
        _name("torch.storage", "UntypedStorage"),
        _text("0"),
        _text("cpu"),
        _number(array.nbytes),
    )
    arguments = (
        _tuple(storage) + _REFER,
        _number(0),
        _tuple([_number(size) for size in array.shape]),
        _tuple([_number(step // array.itemsize) for step in array.strides]),
        _FALSE,
        _name("collections", "OrderedDict") + _tuple(()) + _CALL,
        _name("torch", array.dtype.name),
    )
    called = _name("torch._utils", "_rebuild_tensor_v3") + _tuple(arguments) + _CALL
    return b"\x80\x02" + called + _END


def _tuple(items: Sequence[bytes]) -> bytes:
    return _MARK + b"".join(items) + _TUPLE


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode("ascii")


def _number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
