"""Whole loads of golden checkpoints of which some files hold what a fuzzer made of them.

What may come of it is an error of xckpt's tree, or exactly what was saved:

1. Without a new manifest, every leaf is as it was saved. Where nothing is damaged for `verify`,
   nothing is for a load.
2. With a manifest that was changed and sealed anew, the checkpoint may be another; but every
   element of a tensor is still what was saved under that name: zarr.json and digests bind it.
3. With a chunk, its digest, and a manifest that is sealed over both, the load gives that chunk.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import xckpt
from conformance.implementations.xckpt_golden import read_of
from conformance.laws.golden import Golden, Read, goldens
from conformance.twins.manifests import encoded
from tests.fuzz.choices import Choices, edit_bytes, edit_json, spelled
from tests.fuzz.manifests import changed_manifest, resealed
from xckpt.core.dtypes import numpy_dtype
from xckpt.core.geometry.grid import ZarrArray, cells
from xckpt.core.manifest.entries import BytesEntry, TensorEntry, arrays
from xckpt.core.tree import flatten, rebuild
from xckpt.errors import XckptError
from xckpt.storage.array import DIGEST_BYTES, digest_array, digest_bytes

__all__ = ["checkpoint", "home"]

MANIFEST = "xckpt.json"


@dataclass(slots=True)
class Copy:
    """A golden checkpoint in a folder of its own, whose files are put back after each damage."""

    golden: Golden
    path: Path
    files: dict[str, bytes]
    expected: dict[str, Read]
    arrays: list[ZarrArray]
    root: str
    """The root group's folder with a slash, or nothing."""
    tree: object
    touched: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, golden: Golden, home: Path) -> Copy:
        path = home / golden.name
        shutil.copytree(golden.path, path)
        files = {
            str(file.relative_to(path)): file.read_bytes()
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        manifest = xckpt.open(path).manifest
        root = f"{manifest.root}/" if manifest.root else ""
        return cls(
            golden, path, files, golden.expected, list(arrays(manifest)), root, xckpt.load(path)
        )

    @property
    def digests(self) -> str:
        """The key of the digest file."""
        return f"{self.root}xckpt.digests"

    def blank(self) -> object:
        """The saved tree with zeros in its arrays."""
        return rebuild(self.tree, lambda _, leaf: _zeros(leaf))

    def write(self, key: str, content: bytes | None) -> None:
        """Put other content into a file, or take it away."""
        file = self.path / key
        # A new file, not new content: what is mapped into memory must not change.
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        self.touched.add(key)

    def restore(self) -> None:
        """Put all files back."""
        for key in list(self.touched):
            self.write(key, self.files[key])
        self.touched.clear()

    def changed(self) -> Iterator[str]:
        """The files that hold other content now."""
        for key in self.touched:
            file = self.path / key
            if not file.exists() or file.read_bytes() != self.files[key]:
                yield key

    def bound(self) -> set[str]:
        """The files that no load may take otherwise than byte for byte."""
        read = [array for array in self.arrays if array.count]
        keys = {f"{self.root}{array.path}/zarr.json" for array in read}
        return {MANIFEST, *keys, *([self.digests] if read else [])}

    @property
    def chunks(self) -> set[str]:
        """The files of chunks, which may have padding that is part of nothing."""
        return {key for key in self.files if re.search("/c(/[0-9]+)*$", key)}

    def body(self) -> Any:
        """What the manifest holds, as JSON."""
        return json.loads(self.files[MANIFEST])["checkpoint"]


@cache
def home() -> Path:
    """A folder in memory, where there is such a place, until the process ends."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="fuzz-", dir=memory)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def copies() -> list[Copy]:
    """A copy of each golden checkpoint, made once."""
    return [Copy.of(golden, home()) for golden in goldens()]


def checkpoint(data: bytes) -> str:
    """Damage a checkpoint, load it, and hold what comes of it against what was saved."""
    choices = Choices(data)
    copy = copies()[choices.below(len(copies()))]
    way = choices.below(8)
    how = choices.below(8)
    try:
        if how == 0:
            return _with_other_chunk(copy, way, choices)
        if how == 1:
            return _with_other_digests(copy, way, choices)
        if how <= 3:
            copy.write(MANIFEST, changed_manifest(copy.files[MANIFEST], choices))
            return _judge_another(copy, way)
        _damage(copy, choices, only_json=how == 4)
        return _judge(copy, way)
    finally:
        copy.restore()


def _damage(copy: Copy, choices: Choices, *, only_json: bool) -> None:
    """Change up to three files; no manifest is sealed anew."""
    keys = [key for key in copy.files if not only_json or key.endswith("zarr.json")]
    for _ in range(3):
        if not choices.left or not keys:
            return
        key = keys[choices.below(len(keys))]
        other = copy.files[keys[choices.below(len(keys))]]
        if only_json:
            document = json.loads(copy.files[key])
            edit_json(document, choices)
            copy.write(key, spelled(document))
            continue
        kind = choices.below(8)
        if kind == 0:
            copy.write(key, choices.take())
        elif kind == 1:
            copy.write(key, None)
        elif kind == 2:
            copy.write(key, other)
        else:
            copy.write(key, edit_bytes(copy.files[key], choices, other))


def _load(copy: Copy, way: int) -> dict[str, Read]:
    """Every leaf of a checkpoint, loaded in one of several ways."""
    options = xckpt.LoadOptions(threads=1 + (way & 1))
    if way & 6 == 6:
        opened = xckpt.open(copy.path, options=options)
        return dict(_sliced(opened))
    like = copy.blank() if way & 6 == 4 else None
    tree = xckpt.load(copy.path, like, options=options)
    return {name: read_of(leaf) for name, leaf in flatten(tree).leaves.items()}


def _zeros(leaf: object) -> object:
    return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else leaf


def _sliced(opened: xckpt.Checkpoint) -> Iterator[tuple[str, Read]]:
    for name, stored in opened.items():
        yield name, read_of(stored[...] if isinstance(stored, xckpt.StoredArray) else stored)


def _judge(copy: Copy, way: int) -> str:
    """Load and verify; the manifest is the original one, or refused."""
    problems: Sequence[str] | None = None
    with contextlib.suppress(XckptError):
        problems = xckpt.open(copy.path, options=xckpt.LoadOptions(threads=1)).verify()
    try:
        found = _load(copy, way)
    except XckptError:
        assert problems != [], "verification found nothing, and the load was refused"
        return "refused"
    _equal(found, copy.expected)
    assert problems is not None, "loaded, and verification did not even begin"
    bound = copy.bound()
    for key in copy.changed():
        assert key not in bound, f"loaded silently: {key} is not what was saved"
        assert problems or key in copy.chunks, f"verification does not mind {key}"
    return "loaded"


def _judge_another(copy: Copy, way: int) -> str:
    """Load with a manifest that may be sealed anew; its tensors are still the original ones."""
    try:
        manifest = xckpt.open(copy.path).manifest
        found = _load(copy, way)
    except XckptError:
        return "refused"
    types = {entry["name"]: entry["type"] for entry in copy.body()["leaves"] if "type" in entry}
    for leaf in manifest.leaves:
        if isinstance(leaf, TensorEntry) and 0 not in leaf.shape:
            assert leaf.name in copy.expected, f"{leaf.name!r} was loaded from nowhere"
            _equal({leaf.name: found[leaf.name]}, {leaf.name: copy.expected[leaf.name]})
        elif isinstance(leaf, BytesEntry) and leaf.type == types.get(leaf.name):
            _equal({leaf.name: found[leaf.name]}, {leaf.name: copy.expected[leaf.name]})
    return "loaded"


def _equal(found: Mapping[str, Read], expected: Mapping[str, Read]) -> None:
    assert found.keys() == expected.keys(), "loaded silently: other leaves than were saved"
    for name, read in found.items():
        assert read == expected[name], f"loaded silently: {name!r} is not what was saved"


def _with_other_digests(copy: Copy, way: int, choices: Choices) -> str:
    """Changed digests, and a manifest that is sealed over them: the chunks do not fit."""
    changed = edit_bytes(copy.files[copy.digests], choices, copy.files[MANIFEST])
    _seal(copy, changed)
    try:
        found = _load(copy, way)
    except XckptError:
        return "refused"
    chunks = sum(array.count for array in copy.arrays)
    assert changed == copy.files[copy.digests] or not chunks, "no chunk has these digests"
    _equal(found, copy.expected)
    return "loaded"


def _seal(copy: Copy, digests: bytes) -> None:
    body = {**copy.body(), "digests": digest_bytes(digests).hex()}
    copy.write(copy.digests, digests)
    copy.write(MANIFEST, resealed(encoded(body)))


def _with_other_chunk(copy: Copy, way: int, choices: Choices) -> str:
    """A changed chunk with its digest, and a manifest that is sealed over both."""
    plain = [
        array
        for array in copy.arrays
        if array.count and array.shard is None and not copy.body().get("codecs")
    ]
    if not plain:
        return "nothing to change"
    array = plain[choices.below(len(plain))]
    origin = (0,) * len(array.shape)
    numbers, boxes = cells(origin, array.shape, array.shape, array.chunk)
    number = choices.below(len(numbers))
    key = f"{copy.root}{array.key(boxes[number].offsets)}"
    changed = edit_bytes(copy.files[key], choices, copy.files[MANIFEST])
    copy.write(key, changed)
    inside = _inside(changed, array, boxes[number].sizes)
    digest = digest_bytes(changed) if inside is None else digest_array(inside)
    digests = bytearray(copy.files[copy.digests])
    at = (array.first + int(numbers[number])) * DIGEST_BYTES
    digests[at : at + DIGEST_BYTES] = digest
    _seal(copy, bytes(digests))
    try:
        found = _load(copy, way)
    except XckptError:
        return "refused"
    assert inside is not None, "loaded a chunk of another length"
    rest = {name: read for name, read in copy.expected.items() if name != array.leaf}
    _equal({name: read for name, read in found.items() if name != array.leaf}, rest)
    if array.dtype != "uint8" or found[array.leaf].shape is not None:
        _check_chunk(found[array.leaf], array, boxes[number], inside)
    return "loaded"


def _inside(content: bytes, array: ZarrArray, sizes: tuple[int, ...]) -> NDArray[np.generic] | None:
    """The elements of a chunk's file that lie in the array, if it is of the right length."""
    dtype = numpy_dtype(array.dtype)
    if len(content) != int(np.prod(array.chunk)) * dtype.itemsize:
        return None
    whole = np.frombuffer(content, np.uint8).view(dtype).reshape(array.chunk)
    return np.ascontiguousarray(whole[tuple(slice(0, n) for n in sizes)])


def _check_chunk(found: Read, array: ZarrArray, box: Any, inside: NDArray[np.generic]) -> None:
    assert found.shape is not None
    whole = np.frombuffer(found.data, np.uint8).view(numpy_dtype(found.type)).reshape(found.shape)
    start = [a + b for a, b in zip(array.offset, box.offsets, strict=True)]
    part = whole[tuple(slice(o, o + n) for o, n in zip(start, box.sizes, strict=True))]
    assert np.ascontiguousarray(part).tobytes() == inside.tobytes(), "not the chunk that is there"
