"""What a manifest says and implies, for the independent reader, and what it refuses in one.

Written from ``spec/``, like `conformance.reader`; numbers in brackets are sections of
``spec/format-1.md``. Nothing here allocates what a manifest asks for.

1. `parse_manifest`: the envelope, the digest, the version, and the fields of every object.
2. `check_names`: names are spelled right and are one tree, which the containers fit.
3. `check_grid` and `check_pieces`: sizes are within the limits and pieces cover their tensor.
4. `value_of`, `path_of`, `document_of`: a value from its text, a path from a name, a zarr.json.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from keyword import iskeyword
from math import isfinite, prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["DTYPES", "EXTENDED", "Broken", "Json", "parse_manifest"]

Json = dict[str, Any]
STANDARD = "bool|int8|int16|int32|int64|uint8|uint16|uint32|uint64|float16|float32|float64"
COMPLEX = "complex64|complex128"
EXTENDED = "bfloat16|float8_e3m4|float8_e4m3fn|float8_e4m3fnuz|float8_e4m3b11fnuz|float8_e5m2"
EXTENDED += "|float8_e5m2fnuz|float8_e8m0fnu|int2|int4|float4_e2m1fn"
DTYPES = {name: np.dtype(name) for name in f"{STANDARD}|{COMPLEX}".split("|")}
DTYPES |= {name: np.dtype(getattr(ml_dtypes, name)) for name in EXTENDED.split("|")}
FLOAT = r"(?:nan|-?inf|-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
VALUES: dict[str, tuple[str, Callable[[str], object]]] = {
    "None": ("", lambda text: None),
    "bool": ("True|False", lambda text: text == "True"),
    "int": ("-?0x[0-9a-f]+", lambda text: int(text, 16)),
    "float": (FLOAT, float),
    "complex": (f"{FLOAT},{FLOAT}", lambda text: complex(*map(float, text.split(",")))),
    "str": (r"(?s:[^\\]|\\\\|\\u[0-9a-f]{4})*", lambda text: re.sub(r"\\(\\|u.{4})", plain, text)),
    "bytes": ("[A-Za-z0-9+/]*={0,2}", lambda text: base64.b64decode(text, validate=True)),
}
"""Type -> the form of its text, and what the text means."""

PIECE = {"offset": [int], "shape": [int], "chunk": [int], "shard?": [int]}
SHARDING = {"axes": [(str, "any int")], "placements?": [str], "spec?": [[str]]}
FIELDS = {
    "tensor": {"kind": str, "name": str, "dtype": str, "shape": [int], "chunk?": [int]}
    | {"shard?": [int], "pieces?": [PIECE], "sharding?": SHARDING, "annotation?": str},
    "value": {"kind": str, "name": str, "type": str, "value": str},
    "bytes": {"kind": str, "name": str, "type": str, "size": int, "chunk": int},
}
NULLABLE = {"chunk", "shard", "pieces", "sharding", "placements", "spec"}
MANIFEST = {"leaves": [dict], "digests": str, "root?": str, "codecs?": [str]}
MANIFEST |= {"containers?": dict, "user?": object, "planner?": object}
LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
INT = re.compile("-?(0|[1-9][0-9]{0,18})")


class Broken(Exception):
    """What is there is no checkpoint of version 1, or is not as it was saved."""


def need(holds: object, complaint: str) -> None:
    """Refuse the checkpoint unless something holds."""
    if not holds:
        raise Broken(complaint)


def plain(found: re.Match[str]) -> str:
    """What a backslash sequence stands for."""
    return "\\" if found[1] == "\\" else chr(int(found[1][1:], 16))


def value_of(kind: str, content: str | bytes) -> object:
    """A Python value from its text (6.3), or the UTF-8 of that."""
    try:
        text = content if isinstance(content, str) else content.decode()
    except UnicodeDecodeError as error:
        raise Broken(f"no {kind[:40]}: no UTF-8") from error
    need(kind in VALUES and re.fullmatch(VALUES[kind][0], text), f"no {kind[:40]}: {text[:40]!r}")
    try:
        return VALUES[kind][1](text)
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


def read_file(path: Path, most: int) -> bytes:
    """The content of a plain file of at most so many bytes."""
    need(path.is_file(), f"{path}: missing, or no plain file")
    need(path.stat().st_size <= most, f"{path}: longer than {most} bytes")
    return path.read_bytes()


def read_json(text: bytes) -> Any:
    """A JSON value: finite numbers, and no half of a character (4.2)."""
    try:
        found = json.loads(text.decode(), parse_constant=finite, parse_float=finite)
        if re.search(rb"\\u[dD][89a-fA-F]", text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Broken(f"the manifest is no JSON: {error}") from error
    return found


def finite(text: str) -> float:
    """A number that JSON has."""
    if not isfinite(float(text)):
        raise ValueError(f"{text} is no JSON number")
    return float(text)


def parse_manifest(data: bytes, digest: Callable[[bytes], str]) -> Json:
    """What a manifest's bytes say, if its fields are those of the format (4)."""
    head = re.match(
        rb'\{"format":"xckpt","version":1,"digest":"([0-9a-f]{32})","checkpoint":', data
    )
    if head is None:
        document = read_json(data)
        need(isinstance(document, dict) and document.get("format") == "xckpt", "another format")
        version = document.get("version")
        need(version == 1, f"version {version!r}; this reader reads version 1")
    need(head and data.endswith(b"}"), "the envelope was altered")
    assert head is not None
    body = data[head.end() : -1]
    need(digest(body) == head[1].decode(), "the manifest was altered")
    manifest = read_json(body)
    need(fits(manifest, MANIFEST), "the manifest has other fields than the format's")
    for leaf in manifest["leaves"]:
        need(leaf.get("kind") in ("tensor", "value", "bytes"), "a leaf of no kind")
        need(fits(leaf, FIELDS[leaf["kind"]]), f"{str(leaf.get('name'))[:80]}: other fields")
    root, codecs = manifest.get("root") or "", manifest.get("codecs") or []
    folders = root.split("/") if root else []
    plain_names = all(re.fullmatch("[A-Za-z0-9._-]+", each) for each in folders)
    need(plain_names and not {".", ".."} & set(folders), f"no root: {root[:80]!r}")
    need(codecs in ([], ["crc32c"]), f"codecs {codecs}")
    kinds = manifest.get("containers") or {}
    need(all(isinstance(kind, str) for kind in kinds.values()), "a container of no kind")
    check_names([leaf["name"] for leaf in manifest["leaves"]], kinds)
    return manifest


def is_spelled(part: str) -> bool:
    """Whether a component of a name is written as the format writes its key (5.1)."""
    if INT.fullmatch(part):
        return part != "-0"
    key = "" if part == "%" else re.sub("%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), part)
    text = key.replace("%", "%25").replace("/", "%2F") or "%"
    return part == (f"%{ord(text[0]):02X}{text[1:]}" if INT.fullmatch(text) else text)


def path_of(name: str) -> str:
    """Where a leaf's zarr node lies in the root group (5.2)."""
    parts = [] if name else ["%root"]
    for raw in name.encode().split(b"/") if name else ():
        safe = re.sub(rb"[^A-Za-z0-9\-_.%+@=,() ]", lambda m: b"%%%02X" % m[0][0], raw).decode()
        if re.match(r"\.|__|zarr\.json$|xckpt\.(json|digests|saving)$", safe):
            safe = f"%{ord(safe[0]):02X}{safe[1:]}"
        if safe[-1] in " .":
            safe = f"{safe[:-1]}%{ord(safe[-1]):02X}"
        safe = re.sub(r"\.__lock$", "%2E__lock", safe)
        cut = f"{safe[:100]}~{hashlib.blake2b(raw, digest_size=16).hexdigest()}"
        parts.append(cut if len(safe) > 160 else safe)
    return "/".join(parts)


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


def unit_of(part: Json) -> list[int]:
    """The shape of what one object of an array holds: a zarr shard, or a chunk (7.3)."""
    return part["chunk"] if part.get("shard") is None else part["shard"]


def check_grid(shape: Sequence[int], part: Json, item: int) -> None:
    """The chunks of an array of a tensor are possible, and small enough to be held (7, 11)."""
    chunk, shard = part["chunk"], unit_of(part)
    for cell in (chunk, shard):
        need(len(cell) == len(shape) and 0 not in cell, f"chunk {cell[:40]} of another shape")
        need(prod(cell) * item <= 1 << 32, "a chunk above the limit")
    need(not any(u % c for u, c in zip(shard, chunk, strict=True)), "shard and chunk do not fit")


def check_pieces(shape: Sequence[int], pieces: Sequence[Json]) -> None:
    """Pieces lie in the tensor and hold every element of it once (7.2)."""
    for piece in pieces:
        need(len(piece["offset"]) == len(piece["shape"]) == len(shape), "a piece's dimensions")
        ends = zip(piece["offset"], piece["shape"], shape, strict=True)
        need(all(o + n <= size for o, n, size in ends), "a piece outside its tensor")
    full = [piece for piece in pieces if 0 not in piece["shape"]]
    need(sum(prod(piece["shape"]) for piece in full) == prod(shape), "gaps or overlaps")
    low = np.array([piece["offset"] for piece in full], np.int64).reshape(len(full), len(shape))
    high = low + np.array([piece["shape"] for piece in full], np.int64).reshape(low.shape)
    for n in range(len(full)):
        apart = (low[n] >= high[n + 1 :]) | (low[n + 1 :] >= high[n])
        need(apart.any(axis=1).all(), f"piece {n} overlaps another")


def document_of(dtype: str, part: Json, codecs: Sequence[str], attributes: Json) -> Json:
    """The zarr.json of an array (7.4)."""
    chain: list[Json] = [LITTLE, *({"name": codec} for codec in codecs)]
    if part.get("shard") is not None:
        inner = {"chunk_shape": part["chunk"], "codecs": chain}
        inner |= {"index_codecs": [LITTLE, {"name": "crc32c"}], "index_location": "end"}
        chain = [{"name": "sharding_indexed", "configuration": inner}]
    zero: Any = 0.0 if "float" in dtype else False if dtype == "bool" else 0
    zero = 1.0 if dtype == "float8_e8m0fnu" else [0.0, 0.0] if dtype in COMPLEX else zero
    grid = {"chunk_shape": unit_of(part)}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": part["shape"],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": chain,
        "attributes": attributes,
        "storage_transformers": [],
    }


def groups_of(nodes: Json, leaves: Iterable[Json]) -> Json:
    """The zarr.json of every group above some arrays, the root's with all of them (7.4)."""
    group = {"zarr_format": 3, "node_type": "group"}
    above: Json = {path[: m.start()]: {} for path in nodes for m in re.finditer("/", path)}
    above |= {
        path_of(leaf["name"]): {"shape": leaf["shape"]} for leaf in leaves if leaf.get("pieces")
    }
    groups = {path: group | {"attributes": attributes} for path, attributes in above.items()}
    every = dict(sorted((nodes | groups).items()))
    listed = {"kind": "inline", "must_understand": False, "metadata": every}
    return groups | {"": group | {"attributes": {}, "consolidated_metadata": listed}}
