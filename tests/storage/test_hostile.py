"""Hostile checkpoints, generated: each is refused or read, in the memory that the options allow.

1. `hostile` writes one from a seed: absurd shapes, chunks, pieces and values; digest files that are
   sparse; JSON that is deep, long or altered; other libraries' files that claim much.
2. Each is opened, loaded and verified. Whatever happens is an error of the tree, and the peak of
   resident memory above what the process had stays within ``memory_bytes`` + 64 MiB.

They have up to 500 leaves; a leaf that is loaded takes 4 to 6 KiB beside that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash

import xckpt
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

MEMORY_BYTES = 32 << 20
ALLOWED = MEMORY_BYTES + (64 << 20)
OPTIONS = xckpt.LoadOptions(memory_bytes=MEMORY_BYTES)
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


def _write(path: Path, body: bytes) -> None:
    digest = digest_bytes(body).hex().encode()
    text = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}'
    (path / "xckpt.json").write_bytes(text % (digest, body))


def claims(path: Path, chance: random.Random) -> None:
    """A manifest that claims much; its digest file is as long as it says, where that is allowed."""
    leaves = tuple(_leaf(chance, n) for n in range(chance.choice((1, 1, 3, 30, 500))))
    manifest = Manifest(leaves, digest_bytes(b"").hex(), zarr_json=2)
    try:
        size = min(count_chunks(manifest) * 16, SPARSE)
    except (ValueError, ZeroDivisionError, AttributeError):
        size = 0  # shapes that do not fit each other
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", max(size, 0))
    hashed = xxhash.xxh3_128(bytes(max(size, 0)))
    _write(path, encode_body(msgspec.structs.replace(manifest, digests=hashed.hexdigest())))


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
    _write(path, msgspec.json.encode(Manifest((leaf,), digest, zarr_json=2)))


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
    _write(path, bytes(damaged))


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


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (claims, hollow, text, safetensors, zarr)


def _try(call: Callable[[], object]) -> None:
    with contextlib.suppress(xckpt.XckptError):
        call()


def _peak() -> int:
    """The most resident memory of this process since `_reset`, bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])


def _reset() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _attack(folder: Path, seed: int) -> None:
    """Everything that can be done with one hostile checkpoint."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    path = folder / str(seed)
    path.mkdir()
    kind(path, chance)
    before = _reset()
    if kind is zarr:
        _try(lambda: ZarrFolder(path, fill_missing=True).open("w", version=3))
    else:
        at = path / "model.safetensors" if kind is safetensors else path
        _try(lambda: xckpt.open(at, options=OPTIONS).verify())
        _try(lambda: xckpt.load(at, options=OPTIONS))
    assert _peak() - before <= ALLOWED, (seed, kind.__name__, _peak() - before)
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand missing chunks take a while."""
    monkeypatch.setattr("xckpt.storage.checkpoint.MOST_PROBLEMS", 100)


linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")


@linux
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_hostile_checkpoints_stay_within_memory(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 5):
        _attack(tmp_path, seed)


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 10_000, 100))
def test_ten_thousand_hostile_checkpoints(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 100):
        _attack(tmp_path, seed)
