"""Detecting the format at a path, and opening the source or sink of a format.

1. `detect` looks for xckpt's manifest, else at names in a folder or the first bytes of a file.
2. `open_source` opens what is there, on whatever storage.
3. `open_sink` goes by the format that the caller asks for, or by the name of the output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from xckpt.core.manifest.own_keys import MANIFEST
from xckpt.core.text.printable import in_few
from xckpt.errors import NotACheckpointError, PathError
from xckpt.formats.dcp.keys import METADATA_FILE
from xckpt.formats.orbax.tree import looks_like_orbax
from xckpt.formats.sink import TensorSink
from xckpt.formats.source import TensorSource
from xckpt.options import LoadOptions
from xckpt.storage.absent import checkpoint_meant
from xckpt.storage.foreign.files import LONGEST_FILE, open_file
from xckpt.storage.foreign.paths import FilePath, find_path
from xckpt.storage.foreign.single_files import format_of_file
from xckpt.storage.foreign.unread import unread_format
from xckpt.storage.location import Location, storage_errors

SOURCES: Final[Mapping[str, str]] = {
    "xckpt": "xckpt.formats.xckpt:XckptSource",
    "safetensors": "xckpt.formats.safetensors.source:SafetensorsSource",
    "orbax": "xckpt.formats.orbax.source:OrbaxSource",
    "dcp": "xckpt.formats.dcp.source:DCPSource",
    "torch": "xckpt.formats.torch_save.source:TorchSaveSource",
}
"""Format -> module and class of its source; loaded when it is opened."""

WITH_OBJECTS: Final = ("xckpt", "dcp")
"""The formats that keep objects as bytes."""

SINKS: Final[Mapping[str, str]] = {
    "safetensors": "xckpt.formats.safetensors.sink:SafetensorsSink",
    "orbax": "xckpt.formats.orbax.sink:OrbaxSink",
    "dcp": "xckpt.formats.dcp.sink:DCPSink",
}
"""Format -> module and class of its sink."""

UNWRITTEN: Final = (
    *(".safetensor", ".index.json", ".pt", ".pth", ".bin", ".pkl", ".npz", ".npy", ".gguf", ".h5"),
    ".msgpack",
)
"""Endings of outputs that users mean to be a file; a checkpoint would be a folder."""

LOOKED_FOR: Final[Mapping[str, str]] = {
    "xckpt": "a folder with xckpt.json",
    "safetensors": "*.safetensors files, with *.safetensors.index.json if they are several",
    "orbax": "a folder with _METADATA, or an Orbax step or root of steps (_CHECKPOINT_METADATA)",
    "dcp": "a folder with .metadata, as torch.distributed.checkpoint writes it",
    "torch": "a file of torch.save, or a folder with pytorch_model.bin, *.bin.index.json, or one "
    ".bin, .pt or .pth file",
}
"""Format -> what `detect` looks for, for messages."""

SHOWN = 8
"""How many names in a folder are shown."""
SMALL_BYTES = 1024
"""Files of a bucket up to this size (bytes) are read to find their length."""


def open_source(
    path: str | os.PathLike[str],
    format: str | None = None,
    *,
    options: LoadOptions | None = None,
    opaque: bool = False,
    skip_objects: bool = False,
) -> TensorSource:
    """Open the checkpoint at a path, of any known format.

    Args:
        path: a file or folder: a local path, or a URL as `xckpt.save` takes it.
        format: one of `SOURCES`; detected by default.
        options: its ``memory_bytes`` is what the description of a checkpoint may take, and each
            chunk that is decoded as a whole.
        opaque: give objects that are neither tensors nor values as `Opaque` ones, where the format
            has any; by default they are refused, or bytes in an xckpt checkpoint.
        skip_objects: leave such objects out of a DCP folder; the source lists them as ``skipped``.

    Raises:
        NotACheckpointError: nothing is there, or nothing that is known; lists what was looked for
            and what is there.
        ValueError: there is no such format.
        XckptError: the format's own errors.

    Example:
        >>> from safetensors.numpy import save_file
        >>> import numpy as np
        >>> save_file({"w": np.zeros((2, 3), np.float16)}, "some.safetensors")
        >>> open_source("some.safetensors").specs
        {'w': TensorSpec(shape=(2, 3), dtype='float16')}
    """
    known = _known(format or detect(path), SOURCES, "read")
    source: Callable[..., TensorSource] = resolve_name(SOURCES[known])
    if known == "dcp" and skip_objects:
        return source(path, options=options, skip_objects=True)
    objects = {"opaque": True} if opaque and known in WITH_OBJECTS else {}
    return source(path, options=options, **objects)


def detect(path: str | os.PathLike[str]) -> str:
    """The format of what lies at a path.

    Raises:
        NotACheckpointError: nothing is there, or nothing that is known.
        StorageError: the storage refused.

    Example:
        >>> import xckpt
        >>> _ = xckpt.save("memory://what-format", {"step": 7})
        >>> detect("memory://what-format"), is_known("memory://no-format")
        ('xckpt', False)
    """
    place = find_path(path)
    with storage_errors(place):
        if (place / MANIFEST).is_file():
            return "xckpt"
        format = None
        if place.exists():
            format = format_of_file(place) if place.is_file() else _of_folder(place)
        if format is None:
            raise NotACheckpointError(_unknown(place))
    return format


def is_known(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint of a format that `SOURCES` reads lies at a path.

    Raises:
        StorageError: the storage refused.

    Example:
        >>> is_known("memory://no-known-format")
        False
    """
    try:
        return bool(detect(path))
    except NotACheckpointError:
        return False


def _of_folder(folder: FilePath) -> str | None:
    if not folder.is_dir():
        return None  # A pipe would have to be waited for.
    entries = list(folder.iterdir())
    names = {entry.name for entry in entries}
    if METADATA_FILE in names:
        return "dcp"
    if looks_like_orbax(folder):
        return "orbax"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    if any(name.endswith((".bin.index.json", ".bin", ".pt", ".pth")) for name in names):
        # One such file beside checkpoints, as in the root of a run, does not count.
        return None if any((entry / MANIFEST).is_file() for entry in entries) else "torch"
    return None


def _unknown(place: FilePath) -> str:
    """The message about a place without a checkpoint of a known format."""
    meant = checkpoint_meant(place) if isinstance(place, Path) else ""
    if meant or not place.exists():
        return f"{place}: {meant or 'nothing is there; check the path'}"
    unread = unread_format(place.name)
    unread = f"  {unread}\n" if unread else ""
    looked = "".join(f"\n    - {name}: {what}" for name, what in LOOKED_FOR.items())
    return (
        f"{place} is not a checkpoint of a known format.\n{unread}  Looked for:{looked}\n"
        f"  Found: {_shown(place)}"
    )


def _shown(path: FilePath) -> str:
    if path.is_file():
        with closing(open_file(path)) as file:
            first, content = file.head(8), file.whole(SMALL_BYTES)
            size = file.most_bytes if content is None else len(content)
        length = f" of {size:,} bytes" if size < LONGEST_FILE else ""
        return f"a file{length} that begins with {first!r}"
    if not path.is_dir():
        return "neither a file nor a folder"
    names = sorted(entry.name for entry in path.iterdir())
    return in_few(names, SHOWN) or "an empty folder"


def open_sink(
    path: str | os.PathLike[str], format: str | None = None, *, overwrite: bool = False
) -> TensorSink | None:
    """The sink for an output, or None for an xckpt checkpoint.

    Args:
        path: where it goes.
        format: "xckpt" or one of `SINKS`; by default the name decides: ``*.safetensors`` is one.
        overwrite: what is there may be replaced, if it is an output of the same format.

    Raises:
        ValueError: there is no such format.
        PathError: the name has the ending of another format, or of one that is not written.
        TypeError: it is no path.

    Example:
        >>> open_sink("model.safetensors").path.name, open_sink("folder")
        ('model.safetensors', None)
    """
    Location.parse(path)  # refuses what is no path
    name = os.fspath(path).rstrip("/")  # A path is the same with a slash behind it.
    if name.endswith(".safetensors"):
        format = format or "safetensors"
        if format in {"xckpt", *SINKS} - {"safetensors"}:
            raise PathError(
                f"{os.fspath(path)}: this ending is that of a safetensors file, but the format "
                f"{format!r} makes a folder; choose another name, or leave the format out"
            )
    if format is None and name.endswith(UNWRITTEN):
        raise PathError(
            f"{os.fspath(path)}: a file with this ending cannot be written; name a *.safetensors "
            f"file, or give the format: {', '.join(('xckpt', *SINKS))}"
        )
    if format in (None, "xckpt"):
        return None
    sink: Callable[..., TensorSink] = resolve_name(SINKS[_known(format, SINKS, "written")])
    return sink(path, overwrite=overwrite)


def _known(format: str, formats: Mapping[str, object], done: str) -> str:
    if not isinstance(format, str) or format not in formats:
        known = ", ".join(("xckpt", *formats) if "xckpt" not in formats else formats)
        raise ValueError(f"the format {format!r} cannot be {done}; known are {known}")
    return format
