"""Corrupt twins: every way that we know of to damage a golden checkpoint, one file at a time.

`twins` lists them for a checkpoint. Each twin is a name, a function that damages a copy of the
checkpoint, and what a reader may do about it (`Bar`). The kind of a file follows from zarr.json:

1. The manifest, the digests, the ``zarr.json`` of an array that has elements, and chunks: without
   any of them a load must be refused.
2. The ``zarr.json`` of a group, or of an array without elements: no load depends on it, and
   verification must find it.
3. Bytes of a chunk that lie beyond the array's edge: padding, which is not part of anything.

What is wrong inside a manifest that is sealed with a fitting digest is in `twin_manifests`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Bar", "Twin", "chunk_files", "files", "twins"]

GIANT = 1 << 42
"""Bytes of a sparse file that no memory can hold."""
LARGEST_MANIFEST = 1 << 31
"""Bytes of a manifest that is too long for the format."""


class Bar(Enum):
    """What a reader may do about a twin."""

    REFUSE = "a load must be refused"
    FIND = "verification must find it; a load may give what was saved"
    PADDING = "a load may give what was saved"


@dataclass(frozen=True, slots=True)
class Twin:
    """A damage to one checkpoint."""

    name: str
    damage: Callable[[Path], None]
    """Damages the checkpoint at a path; it may put things beside it, in its parent folder."""
    bar: Bar


def files(checkpoint: Path) -> list[Path]:
    """Every file, relative to the checkpoint."""
    return sorted(f.relative_to(checkpoint) for f in checkpoint.rglob("*") if f.is_file())


@dataclass(frozen=True, slots=True)
class _Place:
    """A file of a checkpoint, and what a reader may do if it is damaged."""

    file: Path
    bar: Bar
    padding: frozenset[int] | None = None
    """Positions of bytes that hold no element; None if it is not known which do."""

    @property
    def longer(self) -> Bar:
        """What a reader may do if there is more behind it: a pack holds what no chunk needs."""
        pack = self.file.parent.name == "xckpt.packs" and self.file.name != "places"
        return Bar.PADDING if pack else self.bar


def chunk_files(checkpoint: Path) -> dict[Path, dict[str, Any]]:
    """Each chunk's file, and the ``zarr.json`` of its array; both relative to the checkpoint."""
    found: dict[Path, dict[str, Any]] = {}
    for file in files(checkpoint):
        document = _array_above(checkpoint, file)
        if file.name != "zarr.json" and document is not None:
            found[file] = document
    return found


def _array_above(checkpoint: Path, file: Path) -> dict[str, Any] | None:
    for folder in file.parents:
        metadata = checkpoint / folder / "zarr.json"
        if metadata.is_file():
            document = json.loads(metadata.read_bytes())
            if document["node_type"] == "array":
                return {**document, "at": folder}
    return None


def _places(checkpoint: Path) -> Iterator[_Place]:
    chunks = chunk_files(checkpoint)
    for file in files(checkpoint):
        if file in chunks:
            yield _chunk_place(checkpoint, file, chunks[file])
        elif file.name == "zarr.json":
            document = json.loads((checkpoint / file).read_bytes())
            read = document["node_type"] == "array" and 0 not in document["shape"]
            yield _Place(file, Bar.REFUSE if read else Bar.FIND, frozenset())
        else:
            yield _Place(file, Bar.REFUSE, frozenset())


def _chunk_place(checkpoint: Path, file: Path, document: dict[str, Any]) -> _Place:
    """A chunk, with the positions of its padding where zarr.json gives them."""
    shape = document["shape"]
    unit = document["chunk_grid"]["configuration"]["chunk_shape"]
    codecs = document["codecs"]
    if codecs[0]["name"] == "sharding_indexed":
        inner = codecs[0]["configuration"]
        whole = all(n % c == 0 for n, c in zip(shape, inner["chunk_shape"], strict=True))
        return _Place(file, Bar.REFUSE, frozenset() if whole or len(inner["codecs"]) > 1 else None)
    if len(codecs) > 1:
        return _Place(file, Bar.REFUSE, frozenset())
    cell = [int(n) for n in file.relative_to(document["at"]).parts[1:]]
    inside = np.zeros(unit, bool)
    inside[tuple(slice(0, n - i * c) for n, i, c in zip(shape, cell, unit, strict=True))] = True
    size = (checkpoint / file).stat().st_size // max(prod(unit), 1)
    padding = np.flatnonzero(~np.repeat(inside.ravel(), size))
    return _Place(file, Bar.REFUSE, frozenset(padding.tolist()))


def twins(checkpoint: Path, others: list[Path], *, flips: int = 24) -> Iterator[Twin]:
    """Every twin of a checkpoint, but for those that `twin_manifests` makes.

    Args:
        checkpoint: a golden checkpoint.
        others: others, whose files are foreign to it.
        flips: how many bytes are flipped in each file; a smaller file has each byte flipped.
    """
    for place in _places(checkpoint):
        content = (checkpoint / place.file).read_bytes()
        yield from _flipped(place, content, flips)
        yield from _resized(place, content)
        yield from _replaced(place)
        if place.file.name == "zarr.json":
            yield from _edited(place, content)
    yield from _swapped(checkpoint)
    yield from _without_folders(checkpoint)
    yield from _foreign(checkpoint, others)


def _flipped(place: _Place, content: bytes, flips: int) -> Iterator[Twin]:
    step = max(1, len(content) / flips)
    for number in range(min(flips, len(content))):
        at = int(number * step)
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        bar = place.bar
        if place.padding is None or at in place.padding:
            bar = Bar.PADDING
        yield Twin(
            f"{place.file}: bit {at % 8} of byte {at} flipped", _written(place, flipped), bar
        )


def _written(place: _Place, content: bytes | bytearray) -> Callable[[Path], None]:
    return partial(_write, place.file, bytes(content))


def _write(file: Path, content: bytes, checkpoint: Path) -> None:
    (checkpoint / file).write_bytes(content)


def _resized(place: _Place, content: bytes) -> Iterator[Twin]:
    size = len(content)
    lengths = sorted(n for n in {0, 1, size // 2, size - 1} if 0 <= n < size)
    others = {f"cut to {length} bytes": content[:length] for length in lengths}
    others |= {
        "extended by a zero byte": content + b"\0",
        "extended by itself": content * 2,
        "extended by a page": content + b"junk" * 1024,
        "zeroed": bytes(size),
        "all bits set": b"\xff" * size,
        "reversed": content[::-1],
        "turned by a byte": content[1:] + content[:1],
    }
    for name, other in others.items():
        bar = place.longer if other.startswith(content) else place.bar
        if other != content:
            yield Twin(f"{place.file}: {name}", _written(place, other), bar)


def _replaced(place: _Place) -> Iterator[Twin]:
    """Something else than a file of the right size."""
    for name, damage in (
        ("deleted", _delete),
        ("a folder", _folder),
        ("a pipe", _pipe),
        ("a link to itself", partial(_link, place.file.name)),
        ("a link to nothing", partial(_link, "not-there")),
        ("a link to a device", partial(_link, "/dev/zero")),
        ("a giant", partial(_giant, GIANT)),
    ):
        bar = place.longer if name == "a giant" else place.bar
        yield Twin(f"{place.file}: {name}", partial(damage, file=place.file), bar)
    if place.file.name == "xckpt.json":
        damage = partial(_giant, LARGEST_MANIFEST, file=place.file)
        yield Twin(f"{place.file}: 2 GiB long", damage, place.bar)


def _delete(checkpoint: Path, file: Path) -> None:
    (checkpoint / file).unlink()


def _folder(checkpoint: Path, file: Path) -> None:
    (checkpoint / file).unlink()
    (checkpoint / file).mkdir()


def _pipe(checkpoint: Path, file: Path) -> None:
    (checkpoint / file).unlink()
    os.mkfifo(checkpoint / file)


def _link(target: str, checkpoint: Path, file: Path) -> None:
    (checkpoint / file).unlink()
    (checkpoint / file).symlink_to(target)


def _giant(size: int, checkpoint: Path, file: Path) -> None:
    os.truncate(checkpoint / file, size)


def _edited(place: _Place, content: bytes) -> Iterator[Twin]:
    """Documents that are valid zarr, but not the ones that were saved."""
    for name, edit in {
        "shape": lambda d: d["shape"].append(d["shape"].pop() + 1),
        "data_type": lambda d: d.update(data_type="int32" if d["data_type"] == "int8" else "int8"),
        "chunk shape": lambda d: d["chunk_grid"]["configuration"]["chunk_shape"].append(1),
        "endian": lambda d: d["codecs"][-1]["configuration"].update(endian="big"),
        "codec": lambda d: d["codecs"].append({"name": "gzip", "configuration": {"level": 1}}),
        "separator": lambda d: d["chunk_key_encoding"]["configuration"].update(separator="."),
        "fill_value": lambda d: d.update(fill_value=7),
        "attributes": lambda d: d["attributes"].update(hello="world"),
        "node_type": lambda d: d.update(node_type="group"),
        "unknown field": lambda d: d.update(unknown=1),
        "spelling": lambda d: None,
    }.items():
        document = json.loads(content)
        try:
            edit(document)
        except (KeyError, IndexError):
            continue  # a group, or a scalar, has no such field
        edited = json.dumps(document).encode()
        if edited != content:
            yield Twin(f"{place.file}: edited, {name}", _written(place, edited), place.bar)


def _swapped(checkpoint: Path) -> Iterator[Twin]:
    """Each chunk exchanged with the next that differs."""
    chunks = list(chunk_files(checkpoint))
    for one, other in zip(chunks, [*chunks[1:], *chunks[:1]], strict=True):
        if (checkpoint / one).read_bytes() != (checkpoint / other).read_bytes():
            yield Twin(f"{one}: swapped with {other}", partial(_swap, one, other), Bar.REFUSE)


def _swap(one: Path, other: Path, checkpoint: Path) -> None:
    first, second = (checkpoint / one).read_bytes(), (checkpoint / other).read_bytes()
    (checkpoint / one).write_bytes(second)
    (checkpoint / other).write_bytes(first)


def _without_folders(checkpoint: Path) -> Iterator[Twin]:
    chunks = chunk_files(checkpoint)
    for folder in sorted(f.relative_to(checkpoint) for f in checkpoint.rglob("*") if f.is_dir()):
        held = any(folder in chunk.parents for chunk in chunks)
        bar = Bar.REFUSE if held else Bar.FIND
        yield Twin(f"{folder}: deleted", partial(_delete_folder, folder), bar)
        if held:
            yield Twin(f"{folder}: a file", partial(_file_instead, folder), bar)


def _delete_folder(folder: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / folder)


def _file_instead(folder: Path, checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / folder)
    (checkpoint / folder).write_bytes(b"")


def _foreign(checkpoint: Path, others: list[Path]) -> Iterator[Twin]:
    """Files of other checkpoints, and documents of other formats, in place of the manifest."""
    manifest = Path("xckpt.json")
    own = (checkpoint / manifest).read_bytes()
    for other in others:
        content = (other / manifest).read_bytes()
        if content != own:
            twin = partial(_write, manifest, content)
            yield Twin(f"xckpt.json: of {other.parent.name}", twin, Bar.REFUSE)
    for name, content in {
        "an empty object": b"{}",
        "a list": b"[]",
        "null": b"null",
        "a string": b'"xckpt"',
        "the root's zarr.json": next(checkpoint.rglob("zarr.json")).read_bytes(),
        "nested 100,000 deep": b"[" * 100_000,
        "objects nested 100,000 deep": b'{"checkpoint":' * 100_000,
        "no UTF-8": b'{"format":"\xff\xfe"}',
        "a pickle": b"\x80\x04\x95.",
        "a zip archive": b"PK\x03\x04" + bytes(26),
    }.items():
        yield Twin(f"xckpt.json: {name}", partial(_write, manifest, content), Bar.REFUSE)
