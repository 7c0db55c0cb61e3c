"""A file as `torch.save` writes it, made without torch.

1. ``data.pkl`` holds the value; each array in it is described as torch describes dtypes without a
   storage class of their own: a tensor of that dtype over a storage of untyped bytes. torch 2.1 and
   newer reads any dtype this way.
2. The bytes of array n lie uncompressed under ``data/n``, at a multiple of 64 bytes, and can be
   mapped.
3. A file gets its name when it is complete, and may be written again.
"""

from __future__ import annotations

import os
import struct
import sys
import uuid
import zipfile
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from xckpt.core.dtypes import DTYPES
from xckpt.core.text.arguments import named
from xckpt.formats.torch_save.pickle_machine import Symbol
from xckpt.formats.torch_save.pickle_writer import Built, call, dump, outside

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
"""torch's own mark of a padding field, and the length of that header."""


def write_saved(path: Path, value: object) -> None:
    """Write a value: plain ones, and arrays of `SAVED_DTYPES`, of which `torch.load` makes tensors.
    The file is synced.

    Raises:
        TypeError: it holds a value of another type.
        OSError: the file cannot be written.

    Example:
        >>> write_saved(Path("w.pt"), {"w": np.arange(3, dtype=np.float32), "step": 7})
        >>> import torch
        >>> torch.load("w.pt")
        {'w': tensor([0., 1., 2.]), 'step': 7}
    """
    arrays: list[NDArray[np.generic]] = []

    def describe(part: object) -> Built:
        if not isinstance(part, np.ndarray):
            raise TypeError(
                f"{named(type(part).__qualname__)} is neither a plain value nor an array"
            )
        arrays.append(np.asarray(part, order="C"))
        return _tensor(arrays[-1], str(len(arrays) - 1))

    pickled = dump(value, describe)
    staged = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with staged.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("archive/data.pkl"), pickled)
            archive.writestr(zipfile.ZipInfo("archive/byteorder"), sys.byteorder)
            for key, array in enumerate(arrays):
                elements = array.reshape(-1).view(np.uint8)
                archive.writestr(_aligned(f"archive/data/{key}", file), elements.data)
            archive.writestr(zipfile.ZipInfo("archive/version"), "3\n")
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def _tensor(array: NDArray[np.generic], key: str) -> Built:
    """A call of torch's function that makes a tensor of a storage."""
    kind = Symbol("torch.storage.UntypedStorage")
    storage = outside(("storage", kind, key, "cpu", array.nbytes))
    strides = tuple(step // array.itemsize for step in array.strides)
    hooks = call("collections.OrderedDict")
    dtype = Symbol(f"torch.{array.dtype.name}")
    return call(
        "torch._utils._rebuild_tensor_v3", (storage, 0, array.shape, strides, False, hooks, dtype)
    )


def _aligned(name: str, file: IO[bytes]) -> zipfile.ZipInfo:
    """The next entry of a ZIP file, whose content begins at a multiple of `_ALIGNMENT`."""
    info = zipfile.ZipInfo(name)
    begin = file.tell() + _LOCAL_HEADER + len(name) + _PADDING.size
    filling = -begin % _ALIGNMENT
    info.extra = _PADDING.pack(b"FB", filling) + bytes(filling)
    return info
