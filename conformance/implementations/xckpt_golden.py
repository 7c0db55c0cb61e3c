"""xckpt as a reader of golden checkpoints, and the states of which they were saved.

`READERS` are what `conformance.laws.golden` judges. `checkpoints` says what is in each golden
checkpoint of format version 1 and how it is saved; `python -m conformance.laws.golden --write`
calls `write`, and a test saves them again and compares the bytes.

Everything is deterministic. The one identity that a save draws, the folder of a generation, is
given the name `GENERATION` afterwards, and the manifest is sealed again.
"""

from __future__ import annotations

import base64
import struct
from collections import namedtuple
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

import xckpt
from conformance.laws.golden import Read
from xckpt.core.dtypes import DTYPES, dtype_name
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.shards import inner
from xckpt.core.leaf import LazySource
from xckpt.core.manifest import codec as manifests
from xckpt.core.manifest.entries import EDITION, documents
from xckpt.core.manifest.own_keys import CLAIM
from xckpt.core.metadata import Metadata, Sharding
from xckpt.core.plan.items import SavePlan
from xckpt.core.plan.save import DefaultSavePlanner
from xckpt.core.tree import flatten
from xckpt.storage.array import digest_bytes
from xckpt.storage.location import Location, open_store
from xckpt.storage.packs import write_packs

__all__ = ["READERS", "Recipe", "XckptReader", "checkpoints", "describe", "write"]

GENERATION = "0123456789ab"


@dataclass(frozen=True, slots=True)
class XckptReader:
    """xckpt, reading in the caller's thread or in several."""

    threads: int

    @property
    def name(self) -> str:
        return f"xckpt {xckpt.__version__}, {self.threads} threads"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (xckpt.XckptError,)

    def load(self, path: Path) -> dict[str, Read]:
        options = xckpt.LoadOptions(threads=self.threads)
        tree = xckpt.load(path, options=options)
        return {name: read_of(leaf) for name, leaf in flatten(tree).leaves.items()}

    def verify(self, path: Path) -> Sequence[str]:
        options = xckpt.LoadOptions(threads=self.threads)
        return xckpt.open(path, options=options).verify()

    def digest(self, data: bytes) -> str:
        return xxhash.xxh3_128_hexdigest(data)


READERS = (XckptReader(threads=2), XckptReader(threads=1))


def read_of(leaf: object) -> Read:
    """A loaded leaf as bytes that mean the same in every language."""
    if isinstance(leaf, np.ndarray):
        little = leaf.astype(leaf.dtype.newbyteorder("<"), copy=False)
        return Read(dtype_name(leaf.dtype) or "", leaf.shape, little.tobytes())
    kind = type(leaf).__name__
    if leaf is None:
        return Read("None", None, b"")
    if isinstance(leaf, bool | int):
        return Read(kind, None, str(int(leaf)).encode())
    if isinstance(leaf, float):
        return Read(kind, None, struct.pack("<d", leaf))
    if isinstance(leaf, complex):
        return Read(kind, None, struct.pack("<dd", leaf.real, leaf.imag))
    if isinstance(leaf, str):
        return Read(kind, None, leaf.encode("utf-8", "surrogatepass"))
    assert isinstance(leaf, bytes)
    return Read(kind, None, leaf)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A golden checkpoint: what is saved and how."""

    about: str
    state: object
    expected: object = None
    """What a load gives, where that is not the state."""
    options: xckpt.SaveOptions = field(default_factory=xckpt.SaveOptions)
    metadata: Any = None
    planner_data: Any = None
    edition: int = EDITION
    """The zarr.json documents as an earlier writer wrote them."""
    before: object = None
    """A state that was saved there before, and overwritten without an exchange of folders."""
    tiny: bool = False
    """Objects of some bytes are cut for other readers too."""
    places: bool = False
    """A short table of places is a file too."""


class _TellingPlanner(DefaultSavePlanner):
    """Has something to keep with the checkpoint."""

    def __init__(self, data: object) -> None:
        super().__init__()
        self._data = data

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        kept = Metadata(
            metadata.state_dict_metadata, metadata.containers, metadata.user_metadata, self._data
        )
        return plans, kept


def numbers(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> NDArray[np.generic]:
    """Small numbers that tell every element from its neighbours."""
    count = int(np.prod(shape))
    values = (np.arange(count) * 37 + seed * 101) % 127
    return values.reshape(shape).astype(DTYPES[dtype])


def bits(dtype: str) -> NDArray[np.generic]:
    """Elements of a type with many bit patterns, those of not-a-number and -0.0 included."""
    kind = DTYPES[dtype]
    if dtype == "bool":
        return np.array([False, True, True, False, True])
    if dtype.startswith("int") and dtype in ("int2", "int4"):
        most = 2 if dtype == "int2" else 8
        return np.arange(-most, most).astype(kind)
    if dtype == "float4_e2m1fn":
        return np.arange(16, dtype=np.uint8).view(kind)
    raw = (np.arange(16 * kind.itemsize) * 73 + 128) % 256
    found = raw.astype(np.uint8).view(kind).copy()
    parts = found.view(found.real.dtype) if kind.kind == "c" else found
    patterns = {2: [0x8000, 0x7FC1, 0xFF81, 1], 4: [1 << 31, 0x7FC00001, 0xFF800001, 1]}
    patterns[8] = [1 << 63, 0x7FF8000000000001, 0xFFF0000000000001, 1]
    for width, unsigned in ((2, np.uint16), (4, np.uint32), (8, np.uint64)):
        if parts.dtype.itemsize == width:
            parts.view(unsigned)[:4] = patterns[width]
    return found


def boxed(
    array: NDArray[np.generic], boxes: Boxes, sharding: Sharding | None = None, annotation: str = ""
) -> LazySource:
    """An array that is saved in given boxes, as if it were sharded."""

    def read(index: int) -> NDArray[np.generic]:
        box = boxes[index]
        ranges = zip(box.offsets, box.sizes, strict=True)
        return np.ascontiguousarray(array[tuple(slice(o, o + n) for o, n in ranges)])

    name = dtype_name(array.dtype) or ""
    return LazySource(array.shape, name, boxes, read, sharding=sharding, annotation=annotation)


def rows(array: NDArray[np.generic], *cuts: int, sharding: Sharding | None = None) -> LazySource:
    """An array cut into rows at the given numbers."""
    below = array.shape[1:]
    zeros = (0,) * len(below)
    pairs = [((a, *zeros), (b - a, *below)) for a, b in pairwise([0, *cuts, len(array)])]
    return boxed(array, Boxes.of(pairs), sharding)


def checkpoints() -> dict[str, Recipe]:
    """Every golden checkpoint of version 1, by the name of its folder."""
    several = _several()
    small = xckpt.SaveOptions(chunk_bytes=96)
    packed = xckpt.SaveOptions(chunk_bytes=1600, pack_bytes=400)
    return {
        "dtypes": Recipe("every element type, with unusual bit patterns", _dtypes()),
        "regular": Recipe("arrays of several chunks, of none, of 0 to 5 dimensions", several,
                          options=small),
        "crc32c": Recipe("the same with a crc32c behind every chunk", several,
                         options=xckpt.SaveOptions(chunk_bytes=96, crc32c=True)),
        "sharded": Recipe("the same with several chunks in a zarr shard", several,
                          options=xckpt.SaveOptions(chunk_bytes=96, shard_bytes=384)),
        "sharded-crc32c": Recipe("both", several, options=xckpt.SaveOptions(
            chunk_bytes=96, shard_bytes=384, crc32c=True)),
        "readers": Recipe("shards cut along several dimensions for other readers", several,
                          options=xckpt.SaveOptions(chunk_bytes=384, readers=4), tiny=True),
        "pieces": Recipe("leaves whose shards are separate arrays", *_pieces(),
                         options=xckpt.SaveOptions(chunk_bytes=384)),
        "pieces-sharded": Recipe("the same with several chunks in a zarr shard", *_pieces(),
                                 options=xckpt.SaveOptions(chunk_bytes=96, shard_bytes=600)),
        "values": Recipe("Python values of each kind, short and long, and opaque bytes",
                         *_values(), options=xckpt.SaveOptions(
                             chunk_bytes=1500, serialise=lambda leaf: b"\x80opaque" * 9)),
        "names": Recipe("names that are escaped, reserved, long, or look like numbers", _names()),
        "containers": Recipe("lists, tuples and namedtuples in each other, empty ones too",
                             _containers()),
        "shardings": Recipe("the shardings that torch and JAX keep with a leaf", *_shardings()),
        "metadata": Recipe("the caller's metadata and a planner's", {"w": numbers((2, 3))},
                           metadata=_metadata(), planner_data={"merged": [1, None, "x"]}),
        "generation": Recipe("overwritten where folders cannot be exchanged", _generation(1),
                             before=_generation(0), options=small),
        "edition-1": Recipe("the first edition of the zarr.json documents", *_pieces(
            half=several["half"]), options=xckpt.SaveOptions(chunk_bytes=384), edition=1),
        "dimension-names": Recipe("named dimensions", *_pieces(even=several["even"]),
                                  options=xckpt.SaveOptions(chunk_bytes=384, dimension_names={
                                      "even": ("embed", "naïve"), "table": ("d3", "rows")})),
        "packed": Recipe("small chunks in packs, and their places in the manifest",
                         *_packed(), options=packed),
        "packed-places": Recipe("the same with a file of places", *_packed(), options=packed,
                                places=True),
        "leaf": Recipe("a state that is one array", numbers((5,), "int16")),
        "empty": Recipe("a state without leaves", {}),
    }  # fmt: skip


def _dtypes() -> dict[str, object]:
    return {dtype: bits(dtype) for dtype in DTYPES}


def _several() -> dict[str, object]:
    return {
        "even": numbers((8, 12)),
        "prime": numbers((13, 7), "int16", 1),
        "three": numbers((3, 4, 5), "uint16", 11),
        "five": numbers((2, 1, 3, 1, 5), "uint8", 2),
        "half": numbers((45,), "bfloat16", 3),
        "scalar": numbers((), "float64", 4),
        "none": numbers((0, 3), "int8"),
        "nothing": numbers((3, 0), "complex64"),
    }


def _pieces(**others: object) -> tuple[Mapping[str, object], Mapping[str, object]]:
    table, columns = numbers((101, 3), "float32", 5), numbers((2, 67), "int8", 6)
    block = numbers((41, 37), "uint8", 7)
    blocks = Boxes.of([((0, 0), (41, 13)), ((0, 13), (28, 24)), ((28, 13), (13, 24))])
    cuts = Boxes.of([((0, 0), (2, 20)), ((0, 20), (2, 31)), ((0, 51), (2, 16))])
    state = {
        "table": rows(table, 7, 20, 51),
        "columns": boxed(columns, cuts),
        "block": boxed(block, blocks),
    }
    expected = {"table": table, "columns": columns, "block": block}
    return state | others, expected | others


def _packed() -> tuple[Mapping[str, object], Mapping[str, object]]:
    """The first leaves are in no pack: a twin whose manifest names them otherwise lacks them."""
    large = {name: numbers((20, 20), seed=seed) for seed, name in enumerate(["first", "second"])}
    state, expected = _pieces(**_several())
    return {**large, **state}, {**large, **expected}


def _values() -> tuple[dict[str, object], dict[str, object]]:
    values: dict[str, object] = {
        "none": None, "true": True, "false": False, "zero": 0, "minus": -255, "large": 1 << 200,
        "float": 0.1, "negative zero": -0.0, "infinity": float("-inf"), "nan": float("nan"),
        "tiny": 5e-324, "complex": complex(1.5, -0.0), "text": "naïve \\ \n \0 ✓ 𝄞",
        "surrogate": "\ud800", "no text": "", "bytes": b"\x00\xff\n", "no bytes": b"",
        "long text": "ü" * 2500, "long bytes": bytes(range(256)) * 17,
    }  # fmt: skip
    return {**values, "opaque": frozenset([1])}, {**values, "opaque": b"\x80opaque" * 9}


def _names() -> dict[str, object]:
    names: list[str | int] = [
        "a.b", "a/b", "a%2Fb", "%", "", "0", 7, -3, "007", "zarr.json", "xckpt.json",
        "xckpt.digests", ".", "..", ".hidden", "__init__", "ends.", "ends ", " starts", "naïve",
        "重み", "😀", "a\\b", "a:b", "CON", "c", "L" * 200, "l" * 160, "m" * 161, "tab\there",
    ]  # fmt: skip
    state: dict[Any, object] = {
        name: np.array([number], np.int8) for number, name in enumerate(names)
    }
    state["nested"] = {0: {"0": np.array([100], np.int8), 0: np.array([101], np.int8)}}
    return state


def _containers() -> dict[str, object]:
    Point = namedtuple("Point", ["x", "y"])
    Empty = namedtuple("Empty", [])
    one = numbers((2,), "int8")
    return {
        "list": [1, [2, [one, []]], {}],
        "tuple": ((), (None,), ("a", {"b": [()]})),
        "point": Point(numbers((3,), "float32", 8), Point(1, [Point(2, 3)])),
        "empty": Empty(),
        "dict": {"dict": {}, "list": []},
    }


def _shardings() -> tuple[Mapping[str, object], Mapping[str, object]]:
    array = numbers((8, 6), "float32", 9)
    dtensor = Sharding(axes=(("dp", 2), ("tp", 4)), placements=("Replicate()", "Shard(dim=0)"))
    uneven = Sharding(axes=(("fsdp", 3),), placements=("Shard(dim=0)",))
    named = Sharding(axes=(("data", 2), ("model", 2)), spec=(("data", "model"), ()))
    keys = numbers((4, 2), "uint32", 10)
    state = {
        "dtensor": rows(array, 2, 4, 6, sharding=dtensor),
        "uneven": rows(array, 3, 6, sharding=uneven),
        "named": rows(array, 2, 4, 6, sharding=named),
        "keys": boxed(keys, Boxes.whole((4, 2)), annotation="prng_key:threefry2x32"),
    }
    return state, {"dtensor": array, "uneven": array, "named": array, "keys": keys}


def _metadata() -> dict[str, object]:
    return {"run": "naïve", "loss": 0.1, "steps": [1, 2, -3, 1 << 70], "none": None, "deep": [[{}]]}


def _generation(seed: int) -> dict[str, object]:
    return {"w": numbers((5, 7), "float32", seed), "step": seed}


def write(recipe: Recipe, path: Path) -> None:
    """Save a golden checkpoint to a path that is free, byte for byte the same each time."""
    planner = None if recipe.planner_data is None else _TellingPlanner(recipe.planner_data)
    if recipe.before is None:
        least = dict.fromkeys(("LEAST_SHARD", "LEAST_CHUNK", "LEAST_ROW"), 1)
        with ExitStack() as patched:
            if recipe.tiny:
                patched.enter_context(mock.patch.multiple(inner, **least))
            if recipe.places:
                patched.enter_context(mock.patch.object(write_packs, "INLINE_BYTES", 0))
            xckpt.save(
                path,
                recipe.state,
                metadata=recipe.metadata,
                planner=planner,
                options=recipe.options,
            )
        if recipe.edition != EDITION:
            _as_edition(path, recipe.edition)
        return
    url = f"memory://golden/{path}"
    xckpt.save(url, recipe.before, overwrite=True, options=recipe.options)
    xckpt.save(url, recipe.state, overwrite=True, options=recipe.options)
    _copy_out(url, path)


def _as_edition(path: Path, edition: int) -> None:
    """Give a checkpoint the zarr.json documents of an earlier edition."""
    manifest = manifests.parse((path / "xckpt.json").read_bytes(), digest_bytes)
    earlier = msgspec.structs.replace(manifest, zarr_json=edition)
    (path / "xckpt.json").write_bytes(manifests.encode(earlier, digest_bytes))
    for key, content in documents(earlier):
        (path / key).write_bytes(content)


def _copy_out(url: str, path: Path) -> None:
    """Bring a checkpoint with a generation to local files, under the generation's fixed name.

    The generation's claim, which is of no use to a reader, stays behind: it names a process.
    """
    store = open_store(Location.parse(url))
    content = {key.decode(): store.read(key).result().value for key in store.list().result()}
    manifest = manifests.parse(content["xckpt.json"], digest_bytes)
    root = f".generations/{GENERATION}"
    content["xckpt.json"] = manifests.encode(
        msgspec.structs.replace(manifest, root=root), digest_bytes
    )
    del content[f"{manifest.root}/{CLAIM}"]
    for key, data in content.items():
        file = path / key.replace(f"{manifest.root}/", f"{root}/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def describe(recipe: Recipe) -> dict[str, object]:
    """What a load of a golden checkpoint must give, as JSON: ``expected.json``."""
    loaded = recipe.state if recipe.expected is None else recipe.expected
    leaves: list[Mapping[str, object]] = []
    for name, leaf in flatten(loaded).leaves.items():
        read = read_of(leaf)
        entry: dict[str, object] = {"name": name, "type": read.type}
        if read.shape is not None:
            entry["shape"] = list(read.shape)
        entry["data"] = base64.b64encode(read.data).decode("ascii")
        leaves.append(entry)
    return {
        "about": recipe.about,
        "version": 1,
        "leaves": leaves,
        "tree": tree_of(loaded),
        "user": recipe.metadata,
        "planner": recipe.planner_data,
    }


def tree_of(node: object) -> object:
    """The containers of a tree as JSON; a leaf is null."""
    if isinstance(node, dict):
        return {"dict": [[key, tree_of(child)] for key, child in node.items()]}
    if isinstance(node, list):
        return {"list": [tree_of(child) for child in node]}
    if isinstance(node, tuple):
        fields = getattr(node, "_fields", None)
        children = [tree_of(child) for child in node]
        if fields is None:
            return {"tuple": children}
        return {"namedtuple": type(node).__name__, "fields": list(fields), "children": children}
    return None
