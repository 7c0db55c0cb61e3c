"""Hostile checkpoints of nothing, from a seed: they claim much, and hardly a byte is there."""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from xckpt.core.manifest.decode import encode_body
from xckpt.core.manifest.entries import (
    BytesEntry,
    Manifest,
    TensorEntry,
    ValueEntry,
    array_metadata,
)
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.rules import count_chunks
from xckpt.storage.array import digest_bytes
from xckpt.storage.foreign.zarr_arrays import ZarrFolder

SPARSE = 1 << 26
"""Longest digest file, bytes."""
DTYPES = ("int8", "float32", "bfloat16", "int4", "complex128", "no_such")


def _size(chance: random.Random, most: int = 50) -> int:
    return chance.choice((0, 1, chance.randrange(9), 1 << chance.randrange(most)))


def _shape(chance: random.Random, rank: int | None = None) -> tuple[int, ...]:
    rank = chance.choice((0, 1, 1, 2, 3, 32, 40)) if rank is None else rank
    return tuple(_size(chance, 50 // max(rank, 1) + 2) for _ in range(rank))


def _tensor(chance: random.Random, number: int) -> TensorEntry:
    shape = _shape(chance)
    rank = chance.choice((len(shape), len(shape), None))
    chunk = tuple(max(1, size) for size in _shape(chance, rank))
    shard = chance.choice((None, None, _shape(chance, len(shape))))
    pieces = None
    if chance.random() < 0.3:
        pieces = _pieces(chance, len(shape))
        chunk = chance.choice((None, None, chunk))  # type: ignore[assignment]
    return TensorEntry(f"l/{number}", chance.choice(DTYPES), shape, chunk, shard, pieces)


def _pieces(chance: random.Random, rank: int) -> Pieces:
    count, columns = chance.choice((0, 1, 5, 500)), chance.choice((3, 3, 4))
    shapes = [[_shape(chance, rank) for _ in range(count)] for _ in range(columns)]
    numbers = [np.array(column, object).ravel() for column in shapes]
    content = [np.minimum(column, (1 << 63) - 1).astype("<i8").tobytes() for column in numbers]
    if chance.random() < 0.1:
        content[-1] = content[-1][:-1]
    return Pieces(chance.choice((rank, rank, rank, 0, -1, rank + 1)), *content)


def _leaf(chance: random.Random, number: int) -> TensorEntry | ValueEntry | BytesEntry:
    kind = chance.random()
    if kind < 0.6:
        return _tensor(chance, number)
    if kind < 0.8:
        text = chance.choice(("0x7", "7" * 10_000, "0x" + "f" * 100_000, "é\x1b[2J", ""))
        return ValueEntry(f"v/{number}", chance.choice(("int", "str", "bytes", "odd")), text)
    return BytesEntry(f"b/{number}", chance.choice(("str", "opaque")), _size(chance), _size(chance))


def write_manifest(path: Path, body: bytes) -> None:
    """Write a manifest of these inner bytes, under the digest that fits."""
    digest = digest_bytes(body).hex().encode()
    text = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}'
    (path / "xckpt.json").write_bytes(text % (digest, body))


def claims(path: Path, chance: random.Random) -> None:
    """A manifest that claims much; its digest file is as long as it says, where that is allowed."""
    leaves = tuple(_leaf(chance, n) for n in range(chance.choice((1, 1, 3, 30, 500))))
    manifest = Manifest(leaves, digest_bytes(b"").hex(), zarr_json=2)
    try:
        with np.errstate(divide="ignore"):
            size = min(count_chunks(manifest) * 16, SPARSE)
    except (ValueError, ZeroDivisionError, AttributeError):
        size = 0  # shapes that do not fit each other
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", max(size, 0))
    hashed = xxhash.xxh3_128(bytes(max(size, 0)))
    write_manifest(path, encode_body(msgspec.structs.replace(manifest, digests=hashed.hexdigest())))


def hollow(path: Path, chance: random.Random) -> None:
    """A manifest that fits all rules, and chunks that are not there, or are sparse."""
    chunk = 1 << chance.randrange(20)
    count = 1 << chance.randrange(22)
    leaf = TensorEntry("w", "uint8", (chunk * count,), (chunk,))
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", count * 16)
    digest = xxhash.xxh3_128(bytes(count * 16)).hexdigest()
    (path / "w/c").mkdir(parents=True)
    for number in range(chance.choice((0, 3))):
        (path / f"w/c/{number}").touch()
        os.truncate(path / f"w/c/{number}", chance.choice((chunk, chunk - 1, 1 << 40)))
    write_manifest(path, msgspec.json.encode(Manifest((leaf,), digest, zarr_json=2)))


def text(path: Path, chance: random.Random) -> None:
    """JSON that is deep, long, repeats itself, or was altered."""
    many = chance.choice((10, 1000, 100_000))
    body = chance.choice(
        (
            b"[" * many + b"]" * many,
            b'{"leaves":[],"digests":"","user":' + b"[" * many + b"]" * many + b"}",
            b'{"leaves":[],"digests":"","user":[' + b"{}," * many + b"{}]}",
            b'{"leaves":[],"digests":"","user":' + b"9" * many + b"}",
            b'{"leaves":[],"digests":"","containers":{"' + b"a/" * many + b'":"list"}}',
            b'{"leaves":[' + b"null," * many + b'1],"digests":""}',
            b'{"leaves":[],"digests":"' + b"\\u0000" * many + b'"}',
        )
    )
    damaged = bytearray(body)
    for _ in range(chance.choice((0, 0, 3))):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    write_manifest(path, bytes(damaged))


def safetensors(path: Path, chance: random.Random) -> None:
    """A safetensors file whose header claims much."""
    entries = {
        f"t{n}": {
            "dtype": chance.choice(("F32", "BF16", "X")),
            "shape": _shape(chance, 2),
            "data_offsets": [_size(chance), _size(chance)],
        }
        for n in range(chance.choice((1, 1000)))
    }
    header = json.dumps(entries).encode()
    length = chance.choice((len(header), len(header), 1 << 62, 0))
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length) + header)
        file.truncate(chance.choice((8, 1 << 40)) + len(header))


def zarr(path: Path, chance: random.Random) -> None:
    """An array of another library, as Orbax has them."""
    (path / "w").mkdir()
    shape = _shape(chance)
    chunk = tuple(max(1, size) for size in _shape(chance, len(shape)))
    document = array_metadata("float32", shape, chunk, None, ())
    (path / "w/zarr.json").write_text(json.dumps(document))


_MAKE = (
    *(b"}", b"]", b"(t", b"(", b"N\x85", b"]Na", b"}K\x01Ns", b"J\x01\x02\x03\x04"),
    *(b"X\x04\0\0\0\xf0\x9f\x98\x80", b"\x8a\x01\x07", b"G" + bytes(8), b"q\0h\0"),
    b"ccollections\nOrderedDict\n)R",
)
"""Opcodes of a pickle that make objects."""


def pickled(path: Path, chance: random.Random) -> None:
    """A pickle that makes many objects: DCP's, or that of a file of torch.save."""
    many = chance.choice((10_000, 1_000_000, 3_000_000))
    body = b"\x80\x02("
    for _ in range(chance.choice((1, 3))):
        made = chance.choice(_MAKE)
        body += made * (many // len(made)) + chance.choice((b"", b"t", b"l", b"a" * (many // 2)))
    body += chance.choice((b"t.", b".", b""))
    if chance.random() < 0.5:
        (path / ".metadata").write_bytes(body)
        return
    with zipfile.ZipFile(path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", body)
        archive.writestr("w/byteorder", "little")


def sparse(path: Path, chance: random.Random) -> None:
    """A checkpoint of Orbax whose chunks, nodes and documents are long and not there."""
    folder = ZarrFolder(path, ocdbt=chance.random() < 0.5)
    entry = {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array"},
    }
    tree = {"tree_metadata": {"w": entry}, "use_ocdbt": folder.ocdbt, "use_zarr3": True}
    (path / "_METADATA").write_text(json.dumps(tree))
    stored = folder.create("w", "float32", (1 << 22,), (1 << chance.randrange(10, 22),))
    stored.write((0,), np.zeros(stored.chunk, np.float32))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    file = chance.choice(files)
    os.truncate(file, chance.choice((1 << 27, 1 << 31, 1 << 40)))


OF_FOREIGN = (pickled, sparse)
OF_NOTHING = (claims, hollow, text, safetensors, zarr)
