"""An independent reader of the format, version 1: NumPy, JSON, zarr-python and a hash.

It was written from ``spec/`` and shares no line with the library that writes the format; numbers
in brackets are sections of ``spec/format-1.md``. It refuses what is not as its digests say; each
zarr.json follows from the manifest and is not looked at (7.4). `conformance.strict_reader` refuses
more: a manifest that contradicts itself under a right digest; and it verifies (10.7).

``python -m conformance.reader PATH`` reads every leaf of a checkpoint, and lists them.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
import zarr
from zarr.storage import LocalStore, StorePath

Json = dict[str, Any]
STANDARD = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
FLOAT8 = "e3m4 e4m3fn e4m3fnuz e4m3b11fnuz e5m2 e5m2fnuz e8m0fnu"
EXTENDED = ["bfloat16", "int2", "int4", "float4_e2m1fn", *(f"float8_{f}" for f in FLOAT8.split())]
"""Types that NumPy lacks: they are read, and given, as unsigned integers of the same bits (9)."""
DTYPES = {name: np.dtype(name) for name in f"{STANDARD} complex64 complex128".split()}
DTYPES |= {n: np.dtype("uint16" if n == "bfloat16" else "uint8") for n in EXTENDED}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}


class Broken(Exception):
    """What is there is no checkpoint of version 1, or is not as it was saved."""


def need(holds: object, complaint: str) -> None:
    """Refuse the checkpoint unless something holds."""
    if not holds:
        raise Broken(complaint)


def read_file(path: Path, most: int) -> bytes:
    """The content of a plain file, up to a number of bytes."""
    need(path.is_file() and path.stat().st_size <= most, f"{path}: missing, or too long")
    return path.read_bytes()


def parse(data: bytes, read_json: Callable[[bytes], Json] = json.loads) -> Json:
    """The body of a manifest, if it is the one that was written (4.1)."""
    head = rb'\{"format":"xckpt","version":(\d+),"digest":"([0-9a-f]{32})","checkpoint":(.*)\}'
    found = re.fullmatch(head, data, re.DOTALL)
    if found is None or found[1] != b"1":
        raise Broken("another version" if found else "no manifest")
    need(xxhash.xxh3_128_hexdigest(found[3]).encode() == found[2], "the manifest was altered")
    return with_pieces(read_json(found[3]))


def with_pieces(body: Json) -> Json:
    """A body in which each leaf in pieces has them, from the columns that leaves share (7.2)."""
    cuts: list[list[Json]] = []
    for cut in body.get("cuts") or []:
        texts = {name: text for name, text in cut.items() if name != "rank" and text is not None}
        columns = (np.frombuffer(base64.b64decode(text), "<i8") for text in texts.values())
        rows = zip(*(c.reshape(-1, cut["rank"]).tolist() for c in columns), strict=True)
        cuts.append([dict(zip(texts, row, strict=True)) for row in rows])
    for leaf in (each for each in body["leaves"] if each.get("pieces") is not None):
        leaf["pieces"] = cuts[leaf["pieces"]]
    return body


def path_of(name: str) -> str:
    """Where a leaf's zarr node lies in the root group (5.2)."""
    parts = [] if name else ["%root"]
    for raw in name.encode().split(b"/") if name else ():
        safe = re.sub(rb"[^A-Za-z0-9\-_.%+@=,() ]", lambda m: b"%%%02X" % m[0][0], raw).decode()
        if re.match(r"\.|__|zarr\.json$|xckpt\.(json|digests|packs|saving)$", safe):
            safe = f"%{ord(safe[0]):02X}{safe[1:]}"
        safe = re.sub("[. ]$", lambda m: f"%{ord(m[0]):02X}", safe)
        safe = re.sub(r"\.__lock$", "%2E__lock", safe)
        cut = f"{safe[:100]}~{hashlib.blake2b(raw, digest_size=16).hexdigest()}"
        parts.append(cut if len(safe) > 160 else safe)
    return "/".join(parts)


def value_of(kind: str, text: str) -> object:
    """A Python value from its text (6.3)."""
    if kind in ("None", "bool"):
        return {"": None, "True": True, "False": False}[text]
    if kind == "int":
        return int(text, 16)
    if kind in ("float", "complex"):
        parts = [float(part) for part in text.split(",")]
        return complex(*parts) if kind == "complex" else parts[0]
    if kind == "str":
        return re.sub(r"\\(\\|u.{4})", lambda m: chr(int(m[1][1:] or "5c", 16)), text)
    need(kind == "bytes", f"no type of a value: {kind[:40]!r}")
    return base64.b64decode(text)


def document_of(dtype: str, part: Json, codecs: Sequence[str], attributes: Json) -> Json:
    """The zarr.json of an array (7.4), without the names of dimensions, which read nothing."""
    coded: list[Json] = [LITTLE, *({"name": codec} for codec in codecs)]
    if part.get("shard") is not None:
        inner = {"chunk_shape": part["chunk"], "codecs": coded}
        inner |= {"index_codecs": [LITTLE, {"name": "crc32c"}], "index_location": "end"}
        coded = [{"name": "sharding_indexed", "configuration": inner}]
    zero: Any = 0.0 if "float" in dtype else False if dtype == "bool" else 0
    zero = 1.0 if dtype == "float8_e8m0fnu" else [0.0, 0.0] if "complex" in dtype else zero
    grid = {"name": "regular", "configuration": {"chunk_shape": part.get("shard") or part["chunk"]}}
    keys = {"name": "default", "configuration": {"separator": "/"}}
    start = {"zarr_format": 3, "node_type": "array", "shape": part["shape"], "data_type": dtype}
    start |= {"chunk_grid": grid, "chunk_key_encoding": keys, "fill_value": zero}
    return start | {"codecs": coded, "attributes": attributes, "storage_transformers": []}


def arrays_of(leaf: Json, codecs: Sequence[str], first: int) -> Iterator[Json]:
    """The zarr arrays of a leaf (6.2, 7); a value has none.

    Each has its path, its counts of chunks (7.1), the number of its first digest, its zarr.json.
    """
    if leaf["kind"] == "bytes":
        leaf |= {"dtype": "uint8", "chunk": [leaf["chunk"]], "shape": [leaf["size"]]}
    whole = [leaf | {"offset": [0] * len(leaf["shape"])}] if leaf["kind"] != "value" else []
    pieces = leaf.get("pieces")
    for number, part in enumerate(whole if pieces is None else pieces):
        path = path_of(leaf["name"]) + ("" if pieces is None else f"/{number}")
        attributes = {} if pieces is None else {"offset": part["offset"]}
        document = document_of(leaf["dtype"], part, codecs, attributes)
        counts = [-(-n // c) for n, c in zip(part["shape"], part["chunk"], strict=True)]
        yield part | {"path": path, "counts": counts, "first": first, "document": document}
        first += prod(counts)


class Checkpoint:
    """A checkpoint in a folder, open for reading; what it does raises `Broken`."""

    parse = staticmethod(parse)

    def __init__(self, folder: str | Path) -> None:
        self.manifest = self.parse(read_file(Path(folder, "xckpt.json"), 1 << 30))
        self.root = Path(folder, self.manifest.get("root") or "")
        self.leaves: dict[str, Json] = {leaf["name"]: leaf for leaf in self.manifest["leaves"]}
        self.arrays: dict[str, list[Json]] = {}
        self.packs, count, placed = self.manifest.get("packs", 0), 0, 0
        for name, leaf in self.leaves.items():
            self.arrays[name] = list(arrays_of(leaf, self.manifest.get("codecs") or [], count))
            count += sum(prod(array["counts"]) for array in self.arrays[name])
        self.digests = self.read_side("xckpt.digests", "digests", 16 * count)
        for array in filter(self.is_packed, chain(*self.arrays.values())):
            array["place"] = placed
            placed += prod(array["counts"])
        self.places = base64.b64decode(self.manifest.get("inline_places") or "")
        if placed or self.packs or self.places or self.manifest.get("places"):
            need(0 < self.packs <= placed, "no packs, or more than chunks in them")
            size = 16 * (self.packs + placed)
            self.places = self.places or self.read_side("xckpt.packs/places", "places", size)
            need(len(self.places) == size, "the manifest has places of other chunks")

    def read_side(self, key: str, field: str, size: int) -> bytes:
        """A file beside the manifest, which has its digest (7.6, 8)."""
        content = read_file(self.root / key, size)
        whole = xxhash.xxh3_128_hexdigest(content) == self.manifest.get(field)
        need(whole and len(content) == size, f"{key}: altered")
        return content

    def is_packed(self, array: Json) -> bool:
        """Whether an array's chunks lie in packs (7.6)."""
        most, item = self.manifest.get("pack_bytes", 0), DTYPES[array["document"]["data_type"]]
        return array.get("shard") is None and prod(array["chunk"]) * item.itemsize <= most

    def place(self, number: int) -> tuple[int, int]:
        """The pack and the offset of a packed chunk (7.6)."""
        pack, offset = np.frombuffer(self.places, "<u8", 2, 16 * (self.packs + number)).tolist()
        need(pack < self.packs, f"there is no pack {pack}")
        return pack, offset

    def value(self, name: str) -> object:
        """A Python value, or the bytes of an opaque one (6)."""
        leaf = self.leaves[name]
        if leaf["kind"] == "value":
            return value_of(leaf["type"], leaf["value"])
        content = self.read(name).tobytes()
        return content if leaf["type"] == "opaque" else value_of(leaf["type"], content.decode())

    def read(self, name: str, low: Sequence[int] = (), sizes: Sequence[int] = ()) -> np.ndarray:
        """The elements ``[low, low + sizes)`` of a tensor, by default all (10.5)."""
        leaf = self.leaves[name]
        low = low or [0] * len(leaf["shape"])
        box = np.empty(sizes or leaf["shape"], DTYPES[leaf["dtype"]])
        for array in self.arrays[name] if box.size else ():
            at = [a - o for a, o in zip(low, array["offset"], strict=True)]
            axes = zip(at, box.shape, array["shape"], array["chunk"], strict=True)
            spans = (range(max(a, 0) // c, (a < m) * -(-min(a + n, m) // c)) for a, n, m, c in axes)
            for cell in product(*spans):
                data = self.read_chunk(array, cell)
                lows = [k * c - a for k, c, a in zip(cell, array["chunk"], at, strict=True)]
                axes = list(zip(lows, data.shape, box.shape, strict=True))
                part = data[tuple(slice(max(-a, 0), m - a) for a, _, m in axes)]
                box[tuple(slice(max(a, 0), a + n) for a, n, _ in axes)] = part
        return box

    def read_chunk(self, array: Json, cell: Sequence[int]) -> np.ndarray:
        """The elements of a chunk that lie in its array, if they are what was saved (8)."""
        axes = zip(cell, array["chunk"], array["shape"], strict=True)
        region = tuple(slice(k * c, min(k * c + c, n)) for k, c, n in axes)
        objects = zip(region, array.get("shard") or array["chunk"], strict=True)
        key = "/".join([array["path"], "c", *(str(span.start // size) for span, size in objects)])
        number = int(np.ravel_multi_index(cell, array["counts"])) if cell else 0
        if "place" in array:
            data = self.read_packed(array, number, [span.stop - span.start for span in region])
        else:
            need((self.root / key).is_file(), f"{key}: missing, or no plain file")
            try:
                data = np.asarray(self.open(array)[region])
            except (ValueError, RuntimeError, OSError, TypeError) as error:
                raise Broken(f"{key}: {error}") from error
        number += array["first"]
        digest = self.digests[16 * number : 16 * number + 16]
        need(xxhash.xxh3_128_digest(data.tobytes()) == digest, f"{key}: not what was saved")
        return data

    def read_packed(self, array: Json, number: int, sizes: Sequence[int]) -> np.ndarray:
        """The elements of a chunk that lies in a pack (7.6)."""
        pack, offset = self.place(array["place"] + number)
        path = self.root / "xckpt.packs" / self.places[16 * pack : 16 * pack + 16].hex()
        dtype = DTYPES[array["document"]["data_type"]].newbyteorder("<")
        end = offset + prod(sizes) * dtype.itemsize
        need(path.is_file() and path.stat().st_size >= end, f"{path}: missing, or too short")
        return np.fromfile(path, dtype, prod(sizes), offset=offset).reshape(sizes)

    def open(self, array: Json) -> zarr.Array:
        """An array of zarr-python's, which knows no extended types (9)."""
        dtype, document = array["document"]["data_type"], array["document"]
        if dtype in EXTENDED:
            document = document | {"data_type": DTYPES[dtype].name, "fill_value": 0}
        place = StorePath(LocalStore(self.root, read_only=True), array["path"])
        return zarr.Array(zarr.AsyncArray(cast(Any, document), place))


if __name__ == "__main__":
    checkpoint = Checkpoint(sys.argv[1])
    for name, leaf in checkpoint.leaves.items():
        found = checkpoint.read(name) if leaf["kind"] != "value" else checkpoint.value(name)
        print(name or "the root", leaf.get("dtype") or leaf["type"], getattr(found, "shape", ""))
