"""Formats of weights that are not read: recognised by names and first bytes, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEAD_BYTES: Final = 8
"""How many of a file's first bytes `unread_format` looks at."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A format that is not read."""

    what: str
    advice: str
    suffixes: tuple[str, ...]
    magic: bytes = b""


_SAVE = "save what it returns with xckpt.save"
UNREAD: Final = (
    Unread("GGUF (llama.cpp)", f"read it with gguf.GGUFReader and {_SAVE}", (".gguf",), b"GGUF"),
    Unread(
        "Flax's msgpack",
        f"read it with flax.serialization.msgpack_restore and {_SAVE}",
        (".msgpack",),
    ),
    Unread(
        "NumPy's archives",
        "read it with dict(numpy.load(path)) and save that with xckpt.save",
        (".npz",),
    ),
    Unread("NumPy's arrays", f"read it with numpy.load and {_SAVE}", (".npy",), b"\x93NUMPY"),
    Unread(
        "Keras",
        "load it with keras.saving.load_model and save model.get_weights() with xckpt.save",
        (".keras", ".weights.h5"),
    ),
    Unread(
        "HDF5",
        "read it with h5py, or with Keras, and save the arrays with xckpt.save",
        (".h5", ".hdf5"),
        b"\x89HDF\r\n\x1a\n",
    ),
    Unread(
        "zarr 2",
        "open it with zarr.open_group, and save the arrays with xckpt.save",
        (".zgroup", ".zarray", ".zmetadata"),
    ),
    Unread(
        "ONNX", "read it with onnx.numpy_helper and save the arrays with xckpt.save", (".onnx",)
    ),
    Unread(
        "TensorFlow's checkpoints",
        f"read it with tf.train.load_checkpoint and {_SAVE}",
        (".data-00000-of-00001", ".tflite", ".pb"),
    ),
    Unread(
        "pickle",
        "nothing is unpickled here: load it where you trust it and save the state with xckpt.save",
        (".pkl", ".pickle", ".joblib"),
    ),
)
"""Formats that people try to open."""


def unread_format(name: str, first: bytes = b"") -> str:
    """A clause on a file of a format that is not read; empty for any other file.

    Args:
        name: the file's.
        first: its first bytes, as far as they are known.

    Example:
        >>> unread_format("model.gguf")
        'model.gguf is of the format GGUF (llama.cpp), which xckpt does not read: read it with \
gguf.GGUFReader and save what it returns with xckpt.save'
        >>> unread_format("model.safetensors")
        ''
    """
    for each in UNREAD:
        if name.endswith(each.suffixes) or (each.magic and first.startswith(each.magic)):
            return f"{name} is of the format {each.what}, which xckpt does not read: {each.advice}"
    return ""
