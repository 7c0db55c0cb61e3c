"""Hostile checkpoints made of real ones, from a seed: what is changed is under digests that fit.

`altered`: the manifest; `damaged`: files; `places`: where packed chunks lie; `indexed`: the indices
of zarr shards; `cuts`: pieces that many leaves share; `steps`: the records of a run; `orbax`:
another library's documents.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import xckpt
from conformance.twins.pieces import cut_of
from tests.support.hostile_claims import SPARSE, write_manifest
from tests.support.states import LAYOUTS, everything
from xckpt.convert import convert
from xckpt.core.geometry.shards.index import CHECKSUM_BYTES, index_bytes
from xckpt.core.manifest.packs import PACKS, PLACES
from xckpt.core.run.record import StepRecord, run_metadata
from xckpt.storage.array import digest_bytes
from xckpt.storage.chunks.shards.files import sealed

ODD: tuple[Any, ...] = (
    *(0, -1, 1, 3, 1 << 31, 1 << 53, (1 << 56) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400),
    *(0.5, 1e308, True, None, "", "../x", "é\x1b[2J\u202e", "a" * 100_000, "9" * 5000, [], {}),
    *([None], [[]] * 1000, {"run": None}, "pytree:os.system", "list", "opaque", "int4"),
)
NUMBERS = (
    0,
    1,
    7,
    149,
    150,
    1 << 20,
    1 << 40,
    (1 << 62) + 1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
"""Unsigned, of 64 bits."""
MOST_PLACES = 10_000
"""A document of more is not changed any more: lists in lists that are repeated grow without end."""
MOST_TEXT = 1 << 24
"""Characters that one repetition adds at most: of a long text in lists it would add gigabytes."""
READ = {**LAYOUTS, "packed": xckpt.SaveOptions(chunk_bytes=150, pack_bytes=1 << 18)}
"""Name -> the options of a checkpoint that is altered."""


def _real(path: Path, layout: str) -> Path:
    """A copy of a checkpoint of every kind of leaf, at ``path``."""
    original = path.parent / f"original {layout}"
    if not original.exists():
        xckpt.save(original, everything(), metadata={"a": [1]}, options=READ[layout])
    return Path(shutil.copytree(original, path, dirs_exist_ok=True))


def _nodes(document: Any) -> list[tuple[Any, Any]]:
    """Each place in a JSON document: a container, and a key or an index."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        found += [(node, key) for key in keys]
        waiting += [node[key] for key in keys if isinstance(node[key], dict | list)]
    return found


def edit(document: Any, chance: random.Random) -> None:
    """Put something odd, or something from elsewhere in it, into a JSON document."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        places = _nodes(document)
        if not places or len(places) > MOST_PLACES:
            return
        node, key = chance.choice(places)
        how = chance.randrange(5)
        if how == 0:
            there, other = chance.choice(places)
            node[key] = _copy(there[other])
        elif how == 1 and isinstance(node, list):
            text, times = json.dumps(node[key]), chance.choice((1, 300))
            times = min(times, max(1, MOST_TEXT // len(text)))
            node.extend(json.loads(f"[{','.join([text] * times)}]"))
        elif how == 2:
            del node[key]
        else:
            node[key] = _copy(chance.choice(ODD))


def _copy(document: Any) -> Any:
    """A copy of which each part is its own: an edit of one must change no other, nor `ODD`."""
    return json.loads(json.dumps(document))


def _resealed(path: Path, edit: Callable[[Any], object] = id) -> None:
    """Seal a manifest over its files again, once it is edited."""
    body = json.loads((path / "xckpt.json").read_bytes())["checkpoint"]
    for field, key in (("digests", "xckpt.digests"), ("places", PLACES)):
        file = path / key
        if field in body and file.is_file() and file.stat().st_size <= SPARSE:
            body[field] = digest_bytes(file.read_bytes()).hex()
    edit(body)
    write_manifest(path, json.dumps(body, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def altered(path: Path, chance: random.Random) -> None:
    """A manifest in which something odd stands, under a digest that fits."""
    _real(path, chance.choice(list(READ)))
    _resealed(path, lambda body: edit(body, chance))


def damaged(path: Path, chance: random.Random) -> None:
    """Files that are cut, long, exchanged, missing or no files, under digests that may fit."""
    _real(path, chance.choice(list(READ)))
    for _ in range(chance.choice((1, 1, 3))):
        files = sorted(file for file in path.rglob("*") if file.is_file())
        special = [file for file in files if file.name in ("xckpt.digests", "places", "xckpt.json")]
        file = chance.choice(special if chance.random() < 0.3 and special else files)
        how = chance.randrange(8)
        if how < 3:
            length = (file.stat().st_size, chance.choice((0, 1, 16, 1 << 20, 1 << 40)))
            os.truncate(file, chance.choice((length[0] // 2, length[0] + 1, length[1])))
        elif how == 3:
            size = min(file.stat().st_size, SPARSE)
            file.write_bytes(chance.randbytes(chance.choice((1, 16, size))))
        elif how == 4:
            other = chance.choice(files)
            if other.stat().st_size <= SPARSE:  # else its holes would become bytes
                shutil.copy(other, file.with_name("other"))
                file.with_name("other").replace(file)
        else:
            file.unlink()
            if how == 5:
                file.mkdir()
            elif how == 6:
                file.symlink_to(chance.choice(("/dev/zero", file.name, str(path))))
    manifest = path / "xckpt.json"
    if chance.random() < 0.7 and manifest.is_file() and manifest.stat().st_size <= SPARSE:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # no manifest any more
            _resealed(path)


def places(path: Path, chance: random.Random) -> None:
    """Packed chunks that share bytes, lie outside of packs or in packs that are not there.

    Their table stands in the manifest or in a file, or in both.
    """
    _real(path, "packed")
    body = json.loads((path / "xckpt.json").read_bytes())["checkpoint"]
    numbers = np.frombuffer(bytearray(base64.b64decode(body["inline_places"])), "<u8")
    packs = body["packs"]
    for _ in range(chance.choice((1, 1, 5, len(numbers)))):
        at = chance.randrange(2 * packs, len(numbers))
        numbers[at] = chance.choice((*NUMBERS, int(numbers[chance.randrange(len(numbers))])))
    content = numbers.tobytes() * chance.choice((1, 1, 1, 2, 1000))
    content = content[: len(content) - chance.choice((0, 0, 0, 1, 16))]
    for pack in sorted((path / PACKS).iterdir()):
        if chance.random() < 0.3:
            os.truncate(pack, chance.choice((0, pack.stat().st_size - 1, 1 << 40)))
    where = chance.choice(("manifest", "file", "file", "both"))
    if where != "manifest":
        (path / PLACES).write_bytes(content)
    inline = "" if where == "file" else base64.b64encode(content).decode()
    digest = "" if where == "manifest" else digest_bytes(content).hex()
    count = chance.choice((*[packs] * 20, *NUMBERS))
    odd = {"packs": count, "places": digest, "inline_places": inline}
    _resealed(path, lambda body: body.update(odd))


def indexed(path: Path, chance: random.Random) -> None:
    """Indices of zarr shards whose entries overlap or point outside, with checksums that fit."""
    _real(path, chance.choice(("sharded", "sharded crc32c")))
    leaves = json.loads((path / "xckpt.json").read_bytes())["checkpoint"]["leaves"]
    leaf = next(each for each in leaves if each["name"] == "even")
    index = index_bytes(leaf["shard"], leaf["chunk"])
    for file in sorted(file for file in (path / "even/c").rglob("*") if file.is_file()):
        content = file.read_bytes()
        entries = np.frombuffer(bytearray(content[-index:-CHECKSUM_BYTES]), "<u8")
        for _ in range(chance.choice((1, 3))):
            at = chance.randrange(len(entries))
            entries[at] = chance.choice((*NUMBERS, int(entries[chance.randrange(len(entries))])))
        file.write_bytes(content[:-index] + sealed(entries.tobytes()))
        if chance.random() < 0.2:
            os.truncate(file, chance.choice((3, 1 << 40)))


def cuts(path: Path, chance: random.Random) -> None:
    """Many leaves that share a cut of many pieces, of which nothing is stored."""
    count, leaves = chance.choice(((1, 300), (100, 300), (10_000, 3), (30_000, 1)))
    step = chance.choice((1, 1, 1 << 30))
    rows = [{"offset": [n * step], "shape": [step], "chunk": [step]} for n in range(count)]
    if chance.random() < 0.3:
        chance.choice(rows)[chance.choice(("offset", "shape", "chunk"))][0] = chance.choice(
            [number for number in NUMBERS if number < 1 << 63]
        )
    entry = {"kind": "tensor", "dtype": "int8", "shape": [count * step], "pieces": 0}
    size = min(count * leaves * 16, SPARSE)
    (path / "xckpt.digests").touch()
    os.truncate(path / "xckpt.digests", size)
    body = {
        "leaves": [{**entry, "name": f"l/{n}"} for n in range(leaves)],
        "digests": xxhash.xxh3_128_hexdigest(bytes(size)),
        "cuts": [cut_of(rows, 1)] * chance.choice((1, 1, 5)),
        "pack_bytes": chance.choice((0, 0, 1 << 18)),
    }
    write_manifest(path, json.dumps(body, separators=(",", ":")).encode())


RULES = (
    *("Latest(3)", 'Best("loss", 1, "min")', 'Best(["loss"], 1, "max")', "EveryMinutes(1e-320)"),
    *("Latest(" + "9" * 5000 + ")", "OnSteps([[1]])", "EverySteps(0)", "All(1)", "len"),
    "Latest(" + "[" * 100_000 + ")",
)


def steps(path: Path, chance: random.Random) -> None:
    """A run whose steps say odd things of themselves."""
    for number in range(chance.choice((1, 3, 10))):
        step = path / f"step-{number}"
        step.mkdir()
        rules = tuple(chance.choice(RULES) for _ in range(3))
        record = StepRecord(number, 60.0 * number, {"loss": 0.5, "\x1b[2J": 1.0}, keep=rules)
        shape = [chance.choice((1, 1, 1 << 56, -1, 1 << 70))] * chance.choice((1, 1, 32, 1000))
        leaf = {"kind": "tensor", "name": "w", "dtype": "int8", "shape": shape, "chunk": [1]}
        leaves = [leaf] * (chance.choice((1, 50_000)) if len(shape) == 1 else 1)
        body: Any = {"leaves": leaves, "digests": "", "user": run_metadata(record)}
        if chance.random() < 0.7:
            edit(body["user"], chance)
        text = json.dumps(body, separators=(",", ":")).encode()
        # A listing takes three times the text.
        write_manifest(step, text if len(text) < SPARSE // 4 else b"")


def orbax(path: Path, chance: random.Random) -> None:
    """A checkpoint of Orbax with documents in which something odd stands, and files cut off."""
    original = path.parent / "original orbax"
    if not original.exists():
        arrays = {name: np.ones((6, 4), name) for name in ("f4", "i2")}
        xckpt.save(path.parent / "original", {"a": arrays, "step": 3})
        convert(path.parent / "original", original, format="orbax")
    shutil.copytree(original, path, dirs_exist_ok=True)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    documents = [file for file in files if file.read_bytes()[:1] == b"{"]
    for file in chance.sample(documents, chance.choice((1, 1, 2))):
        document = json.loads(file.read_bytes())
        edit(document, chance)
        file.write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
    if chance.random() < 0.3:
        file = chance.choice(files)
        os.truncate(file, chance.choice((0, file.stat().st_size // 2, 1 << 40)))


OF_REAL = (altered, damaged, places, indexed, cuts, steps, orbax)
