"""What a reader has to refuse besides, so that whatever loads is a checkpoint of version 1.

`conformance.reader` reads without this. Numbers in brackets are sections of ``spec/format-1.md``;
nothing here allocates what a manifest asks for.

1. `parse`: the envelope, the digest, the version, and the fields of every object.
2. `check_names`: names are spelled right and are one tree, which the containers fit.
3. `check_leaf`: texts are values, sizes are within the limits, pieces cover their tensor once.
4. `StrictCheckpoint` reads only what passes all this and whose zarr.json is the one that follows
   from it; `StrictCheckpoint.verify` compares every zarr.json and reads every chunk.

``python -m conformance.strict_reader PATH`` verifies a checkpoint.
"""

import base64
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise, product
from keyword import iskeyword
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from conformance import reader
from conformance.reader import DTYPES, EXTENDED, Broken, Checkpoint, Json, need, path_of, read_file

__all__ = ["Broken", "StrictCheckpoint", "parse"]

FLOAT = r"(?:nan|-?inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
VALUES = {
    "None": "",
    "bool": "True|False",
    "int": "-?0x[0-9a-f]+",
    "float": FLOAT,
    "complex": f"{FLOAT},{FLOAT}",
    "str": r"(?s:[^\\]|\\\\|\\u[0-9a-f]{4})*",
    "bytes": "[A-Za-z0-9+/]*={0,2}",
}
"""Type -> the form of its text (6.3)."""

CUT = {"rank": int, "offset": str, "shape": str, "chunk": str, "shard?": str}
SHARDING = {"axes": [(str, "any int")], "placements?": [str], "spec?": [[str]]}
FIELDS = {
    "tensor": {"kind": str, "name": str, "dtype": str, "shape": [int], "chunk?": [int]}
    | {"shard?": [int], "pieces?": int, "sharding?": SHARDING, "annotation?": str}
    | {"dimension_names?": [str]},
    "value": {"kind": str, "name": str, "type": str, "value": str},
    "bytes": {"kind": str, "name": str, "type": str, "size": int, "chunk": int},
}
NULLABLE = {"chunk", "shard", "pieces", "sharding", "placements", "spec", "dimension_names"}
MANIFEST = {"leaves": [dict], "digests": str, "root?": str, "codecs?": [str]}
MANIFEST |= {"containers?": dict, "user?": object, "planner?": object, "zarr_json?": int}
MANIFEST |= {"pack_bytes?": int, "packs?": int, "places?": str, "cuts?": [CUT]}
MANIFEST |= {"inline_places?": str}
MANY_PIECES = 1 << 16
"""Of more pieces the root has no consolidated metadata (7.4)."""
LACKING = (
    "zarr-python lacks these data types: it opens arrays of other types by their paths, and lists "
    "groups without these. To open and list all: pip install xckpt, then import xckpt.zarr_dtypes"
)
"""The note of a root group without consolidated metadata (7.4)."""
PACKED = (
    "small arrays lie together in xckpt.packs and are not listed here: xckpt.open reads them, and "
    "a save with SaveOptions(pack_bytes=0) stores each as a zarr array"
)
"""The note of a root group of a checkpoint with packs (7.6)."""
INT = re.compile("-?(0|[1-9][0-9]{0,18})")


def value_of(kind: str, text: str) -> object:
    """A Python value from its text, if it has the form of one (6.3)."""
    need(kind in VALUES and re.fullmatch(VALUES[kind], text), f"no {kind[:40]}: {text[:40]!r}")
    try:
        return reader.value_of(kind, text)
    except ValueError as error:
        raise Broken(f"no {kind}: {text[:40]!r}") from error


def fits(value: Any, form: Any) -> bool:
    """Whether a JSON value has a form; an object has no fields besides the form's (4.2)."""
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(each, form[0]) for each in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    if form == "any int":
        return type(value) is int
    if form is int:
        return type(value) is int and 0 <= value <= 1 << 56
    if not isinstance(form, dict):
        return isinstance(value, form)
    fields = {field.rstrip("?"): field for field in form}
    if not isinstance(value, dict) or not value.keys() <= fields.keys():
        return False
    optional = {name for name, field in fields.items() if name != field}
    absent = {n for n in optional if n not in value or (n in NULLABLE and value[n] is None)}
    return all(name in absent or fits(value.get(name), form[fields[name]]) for name in fields)


def read_json(text: bytes) -> Any:
    """A JSON value: finite numbers, no half of a character, no name twice in an object (4.2)."""
    members = partial(members_of, lists={})
    decoder = json.JSONDecoder(object_pairs_hook=members, parse_constant=finite, parse_float=finite)
    try:
        found = decoder.decode(text.decode())
        if re.search(rb"\\u[dD][89a-fA-F]", text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Broken(f"the manifest is not JSON: {error}") from error
    return found


def members_of(pairs: list[tuple[str, Any]], lists: dict[tuple[int, ...], list[int]]) -> Json:
    """An object whose names are unique; ``lists`` has what pieces share, their shapes above all."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in an object")
    for name, value in pairs:
        if isinstance(value, list) and {int}.issuperset(map(type, value)):
            found[name] = lists.setdefault(tuple(value), value)
    return found


def finite(text: str) -> float:
    """A number that JSON has."""
    if not isfinite(float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return float(text)


def parse(data: bytes) -> Json:
    """What a manifest's bytes say, if it keeps the rules of the format (4, 5)."""
    if not re.match(rb'\{"format":"xckpt","version":1,"digest":"[0-9a-f]{32}","checkpoint":', data):
        document = read_json(data)
        need(isinstance(document, dict) and document.get("format") == "xckpt", "another format")
        version = document.get("version")
        need(version == 1, f"version {version!r}; this reader reads version 1")
    manifest = reader.parse(data, read_body)
    root, codecs = manifest.get("root") or "", manifest.get("codecs") or []
    folders = root.split("/") if root else []
    plain_names = all(re.fullmatch("[A-Za-z0-9._-]+", each) for each in folders)
    need(plain_names and not {".", ".."} & set(folders), f"no root: {root[:80]!r}")
    need(codecs in ([], ["crc32c"]), f"codecs {codecs}")
    need(manifest.get("zarr_json", 1) in (1, 2), "an unknown edition of zarr.json")
    need(manifest.get("pack_bytes", 0) <= 1 << 29 and manifest.get("packs", 0) <= 1 << 32, "packs")
    kinds = manifest.get("containers") or {}
    need(all(isinstance(kind, str) for kind in kinds.values()), "a container of no kind")
    check_names([leaf["name"] for leaf in manifest["leaves"]], kinds)
    count = sum(map(check_leaf, manifest["leaves"]))
    need(count <= 1 << 32, f"{count} chunks")
    return manifest


def read_body(text: bytes) -> Json:
    """A body with the fields of the format, and with pieces as there may be (4.2, 7.2)."""
    body = read_json(text)
    need(fits(body, MANIFEST), "the manifest has other fields than the format's")
    for leaf in body["leaves"]:
        need(leaf.get("kind") in ("tensor", "value", "bytes"), "a leaf of no kind")
        need(fits(leaf, FIELDS[leaf["kind"]]), f"{str(leaf.get('name'))[:80]}: other fields")
    counts = [*map(count_pieces, body.get("cuts", []))]
    cuts = [leaf["pieces"] for leaf in body["leaves"] if leaf.get("pieces") is not None]
    need(all(cut < len(counts) for cut in cuts), "no such cut")
    need(sum(counts[cut] for cut in cuts) <= 1 << 24, "more pieces than there may be")
    inline, is_file = unpacked(body.get("inline_places", "")), bool(body.get("places"))
    need(len(inline) <= 1 << 16 and not (inline and is_file), "places twice, or too many")
    need(body.get("packs", 0) or not (inline or is_file), "places, but no packs")
    return body


def unpacked(text: str) -> bytes:
    """The bytes that stand in a field in base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Broken(f"no base64: {error}") from error


def count_pieces(cut: Json) -> int:
    """How many pieces a cut has, if its columns are some (7.2)."""
    columns = [
        cut[name] for name in ("offset", "shape", "chunk", "shard") if cut.get(name) is not None
    ]
    lengths = {len(unpacked(column)) for column in columns}
    length, rank = lengths.pop(), cut["rank"]
    need(not lengths and 1 <= rank <= 32 and length % (8 * rank) == 0, "columns of a cut")
    return length // (8 * rank)


def is_spelled(part: str) -> bool:
    """Whether a component of a name is written as the format writes its key (5.1)."""
    if INT.fullmatch(part):
        return part != "-0"
    key = "" if part == "%" else re.sub("%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), part)
    text = key.replace("%", "%25").replace("/", "%2F") or "%"
    return part == (f"%{ord(text[0]):02X}{text[1:]}" if INT.fullmatch(text) else text)


def check_names(names: Sequence[str], kinds: dict[str, str]) -> None:
    """Names are spelled right and unique; with the containers they are one tree (5.3)."""
    need(len(set(names)) == len(names), "two leaves have one name")
    children: dict[str, set[str]] = {}
    for name in (*names, *kinds):
        parts = name.split("/", 65) if name else []
        need(len(parts) <= 64 and all(map(is_spelled, parts)), f"no name: {name[:80]!r}")
        for depth, part in enumerate(parts):
            children.setdefault("/".join(parts[:depth]), set()).add(part)
    for name in names:
        need(name not in children and name not in kinds, f"{name[:80]}: a leaf and a container")
    for name, kind in kinds.items():
        found, (word, *detail) = children.get(name, set()), kind.split(":", 2)
        if word in ("list", "tuple"):
            need(found == {str(n) for n in range(len(found))}, f"{name[:80]}: no {word}")
        if word == "namedtuple":
            title, fields = (*detail, "", "")[:2]
            listed = fields.split(",") if fields else []
            sound = all(each.isidentifier() and not iskeyword(each) for each in (title, *listed))
            need(sound and sorted(listed) == sorted(found), f"{name[:80]}: no namedtuple")


def check_leaf(leaf: Json) -> int:
    """A leaf is possible, and small enough to be held (6, 7, 11); how many chunks it has."""
    if leaf["kind"] == "value":
        value_of(leaf["type"], leaf["value"])
        return 0
    if leaf["kind"] == "bytes":
        need(leaf["type"] in ("opaque", *VALUES), f"no type: {leaf['type'][:40]!r}")
        return check_grid([leaf["size"]], {"shape": [leaf["size"]], "chunk": [leaf["chunk"]]}, 1)
    dtype, shape, pieces = leaf["dtype"], leaf["shape"], leaf.get("pieces")
    need(dtype in DTYPES and len(shape) <= 32, f"dtype {dtype[:40]!r}, {len(shape)} dimensions")
    names = leaf.get("dimension_names")
    if names is not None:
        need(len(names) == len(set(names)) == len(shape) and all(names), "names of dimensions")
    item = DTYPES[dtype].itemsize
    need(prod(max(n, 1) for n in shape) * item <= 1 << 56, "a tensor above the limit")
    need((pieces is None) != (leaf.get("chunk") is None), "exactly one of chunk and pieces")
    need(pieces is None or leaf.get("shard") is None, "a shard beside pieces")
    if pieces is not None:
        check_pieces(shape, pieces)
    return sum(check_grid(shape, part, item) for part in ([leaf] if pieces is None else pieces))


def unit_of(part: Json) -> list[int]:
    """The shape of what one object of an array holds: a zarr shard, or a chunk (7.3)."""
    return part["chunk"] if part.get("shard") is None else part["shard"]


def check_grid(shape: Sequence[int], part: Json, item: int) -> int:
    """The chunks of an array of a tensor are possible; how many there are (7, 11)."""
    chunk, shard = part["chunk"], unit_of(part)
    for cell in (chunk, shard):
        need(
            len(cell) == len(shape) and all(n > 0 for n in cell),
            f"chunk {cell[:40]} of another shape",
        )
        need(prod(cell) * item <= 1 << 32, "a chunk above the limit")
    need(not any(u % c for u, c in zip(shard, chunk, strict=True)), "shard and chunk do not fit")
    return prod(-(-n // c) for n, c in zip(part["shape"], chunk, strict=True))


def check_pieces(shape: Sequence[int], pieces: Sequence[Json]) -> None:
    """Pieces lie in the tensor and hold every element of it once (7.2)."""
    for piece in pieces:
        need(len(piece["shape"]) == len(shape), "a piece's dimensions")
        ends = list(zip(piece["offset"], piece["shape"], shape, strict=True))
        need(all(o >= 0 <= n and o + n <= size for o, n, size in ends), "a piece outside")
    full = [piece for piece in pieces if 0 not in piece["shape"]]
    need(sum(prod(piece["shape"]) for piece in full) == prod(shape), "gaps or overlaps")
    low = np.array([piece["offset"] for piece in full], np.int64).reshape(len(full), len(shape))
    high = low + np.array([piece["shape"] for piece in full], np.int64).reshape(low.shape)
    for n in range(len(full)):
        apart = (low[n] >= high[n + 1 :]) | (low[n + 1 :] >= high[n])
        need(apart.any(axis=1).all(), f"piece {n} overlaps another")


def dimension_names(leaf: Json, array: Json) -> list[str]:
    """A name for each dimension of one of a leaf's arrays (7.4)."""
    if leaf.get("dimension_names") is not None and leaf.get("pieces") is None:
        return leaf["dimension_names"]
    shape = array["shape"]
    repeats = [(size, shape[:d].count(size)) for d, size in enumerate(shape)]
    return [f"d{size}_{earlier}" if earlier else f"d{size}" for size, earlier in repeats]


def groups_of(nodes: Json, leaves: Iterable[Json], edition: int, packed: int) -> Json:
    """The zarr.json of every group above some arrays, the root's with all of them (7.4, 7.6)."""
    group = {"zarr_format": 3, "node_type": "group"}
    above: Json = {path[: m.start()]: {} for path in nodes for m in re.finditer("/", path)}
    for leaf in leaves:
        if leaf.get("pieces") and path_of(leaf["name"]) in above:
            named = leaf.get("dimension_names") is not None
            about = ("shape", "dimension_names")[: 1 + named]
            above[path_of(leaf["name"])] = {field: leaf[field] for field in about}
    groups = {path: group | {"attributes": attributes} for path, attributes in above.items()}
    lacking = {node["data_type"] for node in nodes.values()} & set(EXTENDED)
    said: Json = {"packed_arrays": packed, "packed": PACKED} if packed else {}
    if lacking and edition == 2:
        said |= {"data_types": sorted(lacking), "note": LACKING}
    pieces = sum("offset" in node["attributes"] for node in nodes.values())
    if edition == 2 and (lacking or pieces > MANY_PIECES):
        return groups | {"": group | {"attributes": {"xckpt": said} if said else {}}}
    every = dict(sorted((nodes | groups).items()))
    listed = {"kind": "inline", "must_understand": False, "metadata": every}
    attributes = {"xckpt": said} if said else {}
    return groups | {"": group | {"attributes": attributes, "consolidated_metadata": listed}}


class StrictCheckpoint(Checkpoint):
    """A checkpoint in a folder, open for reading, of which nothing contradicts the manifest."""

    parse = staticmethod(parse)

    def __init__(self, folder: str | Path) -> None:
        self.opened: dict[str, zarr.Array] = {}
        super().__init__(folder)
        self.edition = self.manifest.get("zarr_json", 1)
        for name, arrays in self.arrays.items() if self.edition == 2 else ():
            for array in arrays:
                array["document"]["dimension_names"] = dimension_names(self.leaves[name], array)

    def value(self, name: str) -> object:
        leaf = self.leaves[name]
        if leaf["kind"] == "value" or leaf["type"] == "opaque":
            return super().value(name)
        try:
            return value_of(leaf["type"], self.read(name).tobytes().decode())
        except UnicodeDecodeError as error:
            raise Broken(f"{name}: no UTF-8") from error

    def read(self, name: str, low: Sequence[int] = (), sizes: Sequence[int] = ()) -> np.ndarray:
        try:
            return super().read(name, low, sizes)
        except MemoryError as error:
            raise Broken(f"{name}: {error}") from error

    def read_chunk(self, array: Json, cell: Sequence[int]) -> np.ndarray:
        """The elements of a chunk whose object is a plain file, and no longer than it can be."""
        if "place" in array:
            return super().read_chunk(array, cell)
        unit, document = unit_of(array), array["document"]
        axes = zip(cell, array["chunk"], unit, strict=True)
        key = "/".join([array["path"], "c", *(str(k * c // u) for k, c, u in axes)])
        inner, codecs = prod(unit) // prod(array["chunk"]), self.manifest.get("codecs") or []
        index = 16 * inner + 4 if "sharding" in document["codecs"][0]["name"] else 0
        item = DTYPES[document["data_type"]].itemsize
        most = prod(unit) * item + 4 * inner * len(codecs) + index
        need((self.root / key).is_file(), f"{key}: missing, or no plain file")
        need((self.root / key).stat().st_size <= most, f"{key}: longer than {most} bytes")
        return super().read_chunk(array, cell)

    def open(self, array: Json) -> zarr.Array:
        """An array whose zarr.json is the one that follows from the manifest."""
        if array["path"] not in self.opened:
            self.compare(array["path"], array["document"])
            self.opened[array["path"]] = super().open(array)
        return self.opened[array["path"]]

    def compare(self, path: str, document: Json) -> None:
        """Refuse a zarr.json that is not, byte for byte, what the manifest implies."""
        content = json.dumps(document, indent=2, ensure_ascii=False).encode()
        found = read_file(self.root / path / "zarr.json", len(content))
        need(found == content, f"{path}/zarr.json: edited")

    def documents(self) -> dict[str, Json]:
        """Every zarr.json of the checkpoint, by the path of its folder (7.4)."""
        every = list(chain(*self.arrays.values()))
        nodes = {array["path"]: array["document"] for array in every if "place" not in array}
        packed = len(every) - len(nodes)
        return nodes | groups_of(nodes, self.leaves.values(), self.edition, packed)

    def check_places(self) -> None:
        """Refuse packed chunks that share some bytes, but not all (7.6)."""
        spans: list[tuple[int, int, int]] = []
        for array in chain(*self.arrays.values()):
            if "place" not in array:
                continue
            item = DTYPES[array["document"]["data_type"]].itemsize
            for number, cell in enumerate(product(*map(range, array["counts"]))):
                axes = zip(cell, array["chunk"], array["shape"], strict=True)
                size = item * prod(min(c, n - k * c) for k, c, n in axes)
                pack, offset = self.place(array["place"] + number)
                spans.append((pack, offset, offset + size))
        spans = sorted(set(spans))
        for (pack, _, end), (other, start, _) in pairwise(spans):
            need(pack != other or start >= end, f"two chunks share bytes of pack {pack}")

    def verify(self) -> list[str]:
        """A line for everything that is not as it was saved (10.7)."""
        checks: list[Callable[[], object]]
        checks = [partial(self.compare, *document) for document in self.documents().items()]
        checks.append(self.check_places)
        for array in chain(*self.arrays.values()):
            cells = product(*map(range, array["counts"]))
            checks += [partial(self.read_chunk, array, cell) for cell in cells]
        problems: list[str] = []
        for check in checks:
            try:
                check()
            except Broken as error:
                problems.append(str(error))
        return problems


if __name__ == "__main__":
    sys.exit("\n".join(StrictCheckpoint(sys.argv[1]).verify()) or None)
