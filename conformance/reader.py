"""An independent reader of the format, version 1: NumPy, JSON, zarr-python and a hash.

It was written from ``spec/`` and shares no line with the library that writes the format; numbers
in brackets are sections of ``spec/format-1.md``. What a manifest may say, and what follows from it,
is in `conformance.reader_manifest`; here is how a checkpoint is read.

1. `Checkpoint` opens a folder: the manifest, the arrays that follow from it, the digest file.
2. `Checkpoint.read` gives any box of a tensor, each chunk verified; `Checkpoint.value` a value.
3. `Checkpoint.verify` compares every zarr.json and reads every chunk.

``python -m conformance.reader PATH`` lists the leaves of a checkpoint and verifies it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import xxhash
import zarr
from zarr.storage import LocalStore, StorePath

from conformance import reader_manifest as manifest
from conformance.reader_manifest import DTYPES, Broken, Json, need, read_file, value_of

__all__ = ["Broken", "Checkpoint"]


class Stored(NamedTuple):
    """A zarr array: where it is, which box of its tensor it holds, and how.

    ``unit`` is the shape of what one object holds (a zarr shard, or a chunk), ``counts`` the number
    of chunks in each dimension, ``first`` the number of the first chunk's digest.
    """

    path: str
    dtype: str
    offset: Sequence[int]
    shape: Sequence[int]
    chunk: Sequence[int]
    unit: Sequence[int]
    counts: Sequence[int]
    first: int
    document: Json


def arrays_of(leaf: Json, codecs: Sequence[str], first: int) -> Iterator[Stored]:
    """The zarr arrays of a leaf, within the limits (7, 11)."""
    path, dtype = manifest.path_of(leaf["name"]), leaf.get("dtype", "uint8")
    if leaf["kind"] == "value":
        value_of(leaf["type"], leaf["value"])
        return
    if leaf["kind"] == "bytes":
        need(leaf["type"] in ("opaque", *manifest.VALUES), f"no type: {leaf['type'][:40]!r}")
        leaf = leaf | {"chunk": [leaf["chunk"]], "shape": [leaf["size"]]}
    shape = leaf["shape"]
    need(dtype in DTYPES and len(shape) <= 32, f"dtype {dtype[:40]!r}, {len(shape)} dimensions")
    item, pieces = DTYPES[dtype].itemsize, leaf.get("pieces")
    need(prod(max(n, 1) for n in shape) * item <= 1 << 56, "a tensor above the limit")
    need((pieces is None) != (leaf.get("chunk") is None), "exactly one of chunk and pieces")
    need(pieces is None or leaf.get("shard") is None, "a shard beside pieces")
    if pieces is not None:
        manifest.check_pieces(shape, pieces)
    whole = leaf | {"offset": [0] * len(shape)}
    for number, part in enumerate([whole] if pieces is None else pieces):
        manifest.check_grid(shape, part, item)
        where = path if pieces is None else f"{path}/{number}"
        counts = [-(-n // c) for n, c in zip(part["shape"], part["chunk"], strict=True)]
        attributes = {} if pieces is None else {"offset": part["offset"]}
        document = manifest.document_of(dtype, part, codecs, attributes)
        box, unit = (part["offset"], part["shape"]), manifest.unit_of(part)
        yield Stored(where, dtype, *box, part["chunk"], unit, counts, first, document)
        first += prod(counts)


class Checkpoint:
    """A checkpoint in a folder, open for reading.

    Raises:
        Broken: no checkpoint of version 1 is there, or its digest file was altered.
    """

    def __init__(self, folder: str | Path) -> None:
        data = read_file(Path(folder, "xckpt.json"), 1 << 30)
        self.manifest = manifest.parse_manifest(data, xxhash.xxh3_128_hexdigest)
        self.root = Path(folder, self.manifest.get("root") or "")
        self.leaves: dict[str, Json] = {leaf["name"]: leaf for leaf in self.manifest["leaves"]}
        self.arrays: dict[str, list[Stored]] = {}
        self.opened: dict[str, zarr.Array] = {}
        count = 0
        for name, leaf in self.leaves.items():
            self.arrays[name] = list(arrays_of(leaf, self.manifest.get("codecs") or [], count))
            count += sum(prod(array.counts) for array in self.arrays[name])
        need(count <= 1 << 32, f"{count} chunks")
        self.digests = read_file(self.root / "xckpt.digests", 16 * count)
        whole = xxhash.xxh3_128_hexdigest(self.digests) == self.manifest["digests"]
        need(whole and len(self.digests) == 16 * count, "xckpt.digests: altered")

    def value(self, name: str) -> object:
        """A Python value, or the bytes of an opaque one (6)."""
        leaf = self.leaves[name]
        if leaf["kind"] == "value":
            return value_of(leaf["type"], leaf["value"])
        content = self.read(name).tobytes()
        return content if leaf["type"] == "opaque" else value_of(leaf["type"], content)

    def read(
        self, name: str, low: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> np.ndarray:
        """The elements ``[low, low + sizes)`` of a tensor, by default all (10.5)."""
        leaf = self.leaves[name]
        shape = leaf["shape"] if leaf["kind"] == "tensor" else [leaf["size"]]
        low = [0] * len(shape) if low is None else low
        try:
            box = np.empty(shape if sizes is None else sizes, DTYPES[leaf.get("dtype", "uint8")])
        except MemoryError as error:
            raise Broken(f"{name}: {error}") from error
        for array in self.arrays[name] if box.size else ():
            at = [a - o for a, o in zip(low, array.offset, strict=True)]
            axes = zip(at, box.shape, array.shape, array.chunk, strict=True)
            spans = (range(max(a, 0) // c, (a < m) * -(-min(a + n, m) // c)) for a, n, m, c in axes)
            for cell in product(*spans):
                data = self.read_chunk(array, cell)
                lows = [k * c - a for k, c, a in zip(cell, array.chunk, at, strict=True)]
                axes = list(zip(lows, data.shape, box.shape, strict=True))
                part = data[tuple(slice(max(-a, 0), m - a) for a, _, m in axes)]
                box[tuple(slice(max(a, 0), a + n) for a, n, _ in axes)] = part
        return box

    def read_chunk(self, array: Stored, cell: Sequence[int]) -> np.ndarray:
        """The elements of a chunk that lie in its array, if they are what was saved (8)."""
        axes = list(zip(cell, array.chunk, array.unit, array.shape, strict=True))
        key = "/".join([array.path, "c", *(str(k * c // u) for k, c, u, _ in axes)])
        inner, codecs = prod(array.unit) // prod(array.chunk), self.manifest.get("codecs") or []
        index = 16 * inner + 4 if "sharding" in array.document["codecs"][0]["name"] else 0
        most = prod(array.unit) * DTYPES[array.dtype].itemsize + 4 * inner * len(codecs) + index
        need((self.root / key).is_file(), f"{key}: missing, or no plain file")
        need((self.root / key).stat().st_size <= most, f"{key}: longer than {most} bytes")
        try:
            region = tuple(slice(k * c, min(k * c + c, n)) for k, c, _, n in axes)
            data = np.asarray(self.open(array)[region])
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise Broken(f"{key}: {error}") from error
        counts = zip(cell, array.counts, strict=True)
        number = reduce(lambda above, each: above * each[1] + each[0], counts, 0)
        start = 16 * (array.first + number)
        digest = xxhash.xxh3_128_digest(data.tobytes())
        need(digest == self.digests[start : start + 16], f"{key}: not what was saved")
        return data.view(DTYPES[array.dtype])

    def open(self, array: Stored) -> zarr.Array:
        """An array, opened by metadata of our own; its zarr.json has to say the same (7.4)."""
        if array.path not in self.opened:
            self.compare(array.path, array.document)
            bits = {"data_type": f"uint{8 * DTYPES[array.dtype].itemsize}", "fill_value": 0}
            # zarr-python alone does not know the extended types: it reads their bits.
            document = array.document | (
                bits if array.dtype in manifest.EXTENDED.split("|") else {}
            )
            place = StorePath(LocalStore(self.root, read_only=True), array.path)
            self.opened[array.path] = zarr.Array(zarr.AsyncArray(cast(Any, document), place))
        return self.opened[array.path]

    def compare(self, path: str, document: Json) -> None:
        """Refuse a zarr.json that is not, byte for byte, what the manifest implies."""
        content = json.dumps(document, indent=2).encode()
        found = read_file(self.root / path / "zarr.json", len(content))
        need(found == content, f"{path}/zarr.json: edited")

    def documents(self) -> dict[str, Json]:
        """Every zarr.json of the checkpoint, by the path of its folder (7.4)."""
        nodes = {array.path: array.document for each in self.arrays.values() for array in each}
        return nodes | manifest.groups_of(nodes, self.leaves.values())

    def verify(self) -> list[str]:
        """A line for everything that is not as it was saved."""
        checks = [partial(self.compare, *document) for document in self.documents().items()]
        for array in (array for arrays in self.arrays.values() for array in arrays):
            cells = product(*map(range, array.counts))
            checks += [partial(self.read_chunk, array, cell) for cell in cells]
        problems: list[str] = []
        for check in checks:
            try:
                check()
            except Broken as error:
                problems.append(str(error))
        return problems


if __name__ == "__main__":
    checkpoint = Checkpoint(sys.argv[1])
    for name, leaf in checkpoint.leaves.items():
        print(name or "the root", leaf.get("dtype") or leaf["type"], leaf.get("shape", ""))
    sys.exit("\n".join(checkpoint.verify()) or None)
