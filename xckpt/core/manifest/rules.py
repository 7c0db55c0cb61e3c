"""The rules that a manifest keeps: limits and contradictions, checked before anything is allocated.

Also here: what is packed where a caller does not say (`default_pack_bytes`).

1. The root and the codecs are those of the format.
2. Names are leaf names as `xckpt.core.names` makes them, each is there once, and together with the
   containers they are one tree, so that no path of one leaf lies in another's.
3. Shapes, chunks and their numbers are within the limits.
4. Pieces lie in their tensor and cover it exactly once.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, islice
from math import prod
from typing import Final

from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.geometry.box import Shape
from xckpt.core.geometry.grid import MAX_CHUNK_BYTES, ZarrArray
from xckpt.core.manifest.entries import (
    EDITION,
    BytesEntry,
    Entry,
    Manifest,
    TensorEntry,
    ValueEntry,
    is_packed,
    regular,
)
from xckpt.core.manifest.packs import places_problems
from xckpt.core.manifest.pieces import (
    MAX_PIECES,
    MAX_RANK,
    MAX_TENSOR_BYTES,
    pieces_problems,
)
from xckpt.core.names import dimension_name_faults, is_name, odd_names, split_name
from xckpt.core.tree import DEEPEST, Container, close_container, refuse_clashes, unflatten
from xckpt.core.values import KINDS, decode_value
from xckpt.errors import ManifestError

MAX_CHUNKS: Final = 1 << 32
"""Most chunks of a checkpoint: each has a digest."""
MAX_PACK_BYTES: Final = 1 << 29
"""Largest chunk that lies in a pack, bytes."""

SMALL_CHUNK: Final = 1 << 18
"""A chunk up to this size, bytes, takes as long as any smaller one where it is an object."""
FEW_OBJECTS: Final = 256
"""Up to this many small objects cost little, and any zarr reader lists them."""

Kind = tuple[str, Shape, Shape, Shape | None]
"""What leaves that are one array have in common: dtype, shape, chunk, zarr shard."""

MOST_FAULTS: Final = 1 << 10
"""Faults of a manifest that are listed."""
TOGETHER: Final = 1 << 11
"""Leaves that are counted at a time."""

_ROOT = re.compile(r"([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?")


def problems(manifest: Manifest) -> list[str]:
    """A line for everything in a manifest that breaks a rule, up to about `MOST_FAULTS` lines."""
    if count_pieces(manifest) > MAX_PIECES:
        from xckpt.core.manifest.objects import many_pieces  # what most manifests do without

        return [f"{many_pieces(manifest)}; at most {MAX_PIECES:,}"]
    faults = [*_head_problems(manifest), *_name_problems(manifest)]
    bad = {
        kind: lines for kind, _ in kinds(manifest) if (lines := _kind_problems(kind)) is not None
    }
    known: _Known = {}
    for leaf in manifest.leaves if bad else ():
        if len(faults) >= MOST_FAULTS:
            return faults
        kind = kind_of(leaf)
        lines = _leaf_problems(leaf, known) if kind is None else bad.get(kind, ())
        faults.extend(f"{leaf.name[:80]}: {problem}" for problem in lines)
    if not faults:
        chunks = count_chunks(manifest)
        if chunks > MAX_CHUNKS:
            most = max(manifest.leaves, key=count_leaf_chunks)
            shown = f"{most.name[:80] or 'the root'} alone has {count_leaf_chunks(most):,}"
            faults.append(f"{chunks:,} chunks, of which {shown}; at most {MAX_CHUNKS:,}")
        elif manifest.packs or manifest.places or manifest.inline_places:
            faults += places_problems(manifest, count_packed(manifest))
    return faults


def default_pack_bytes(arrays: Iterable[ZarrArray]) -> int:
    """The ``pack_bytes`` of a checkpoint whose caller names none; 0 where little is small.

    Example:
        >>> array = ZarrArray("w", 0, "int8", (0,), (256,), (1,))
        >>> default_pack_bytes([array]), default_pack_bytes([array, array])
        (0, 262144)
    """
    small = 0
    for array in arrays:
        small += array.count if is_packed(array, SMALL_CHUNK) else 0
        if small > FEW_OBJECTS:
            return SMALL_CHUNK
    return 0


def _head_problems(manifest: Manifest) -> Iterator[str]:
    if manifest.codecs not in ((), ("crc32c",)):
        yield f"codecs {manifest.codecs} are not those of the format"
    if manifest.zarr_json not in range(1, EDITION + 1):
        yield f"edition {manifest.zarr_json} of the zarr.json documents is not known"
    if not 0 <= manifest.pack_bytes <= MAX_PACK_BYTES or not 0 <= manifest.packs <= MAX_CHUNKS:
        yield f"{manifest.packs} packs of chunks up to {manifest.pack_bytes} bytes"
    if not _ROOT.fullmatch(root := manifest.root) or {".", ".."} & set(root.split("/")):
        yield f"the root {root[:80]!r} is not a folder of the checkpoint"


def _name_problems(manifest: Manifest) -> list[str]:
    names, again = set[str](), dict[str, None]()
    for leaf in manifest.leaves:
        if leaf.name in names:
            again[leaf.name] = None
        names.add(leaf.name)
    faults = [f"{name[:80]}: two leaves have this name" for name in islice(again, MOST_FAULTS)]
    odd = odd_names(chain(names, manifest.containers), DEEPEST)
    faults += map(_name_fault, islice(odd, MOST_FAULTS))
    if not faults:
        try:
            check_names(names, manifest.containers)
        except ManifestError as error:
            faults += error.problems or (str(error),)
    return faults


def check_names(names: Collection[str], containers: Mapping[str, str]) -> None:
    """Refuse names of which `unflatten` cannot make a tree, without making one.

    Args:
        names: of leaves, each as `xckpt.core.names` writes it; quick to look up.
        containers: as for `unflatten`.

    Raises:
        ManifestError: see `unflatten`.

    Example:
        >>> check_names({"opt/0", "opt/2"}, {"opt": "list"})
        Traceback (most recent call last):
        ...
        xckpt.errors.ManifestError: opt: called a list, but its keys are not 0, 1, ...
    """
    if "" in names:
        unflatten(dict.fromkeys(names), containers)
        return
    children: dict[str, list[str]] = {
        name: [] for name, kind in containers.items() if kind != "dict"
    }
    clashes = {name: None for name in containers if name in names}
    seen: set[int] = set()
    """Hashes of the containers' names, which may be long."""
    for name in chain(names, containers):
        above = name
        if name in containers:
            if hash(name) in seen:
                continue
            seen.add(hash(name))
        while above:
            parent, _, last = above.rpartition("/")
            if parent in children:
                children[parent].append(last)
            if hash(parent) in seen:
                break
            seen.add(hash(parent))
            if parent in names:
                clashes[parent] = None
            above = parent
    if clashes:
        refuse_clashes(islice(clashes, MOST_FAULTS))
    for name, inner in children.items():
        node = Container((split_name(last)[0], None) for last in inner)
        node.name, node.kind = name, containers[name]
        close_container(node)


def _name_fault(name: str) -> str:
    """What is wrong with one of `odd_names`."""
    if not is_name(name):
        return f"{name[:80]!r} is not a name as the format writes them"
    return f"{name[:80]}: more than {DEEPEST} containers deep"


_Known = dict[tuple[object, ...], list[str]]
"""What is wrong with leaves in pieces, once for all that are alike."""


def _leaf_problems(leaf: Entry, known: _Known) -> Iterator[str]:
    if isinstance(leaf, TensorEntry):
        if leaf.dimension_names is not None:
            yield from dimension_name_faults(leaf.dimension_names, len(leaf.shape))
        if leaf.pieces is None:
            yield from _tensor_problems(leaf)
        else:
            key = id(leaf.pieces), leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
            if key not in known:
                known[key] = list(_tensor_problems(leaf))
            yield from known[key]
    elif isinstance(leaf, BytesEntry):
        if not (0 <= leaf.size <= MAX_TENSOR_BYTES and 1 <= leaf.chunk <= MAX_CHUNK_BYTES):
            yield f"{leaf.size} bytes in chunks of {leaf.chunk}"
        if leaf.type != "opaque" and leaf.type not in KINDS:
            yield f"the type {leaf.type[:40]!r} is not one of the format's"
    else:
        try:
            decode_value(leaf.type, leaf.value)
        except ManifestError as error:
            yield str(error)


def _kind_problems(kind: Kind | None) -> list[str] | None:
    """What is wrong with the leaves of a kind: None if nothing is; [] where each is to be asked."""
    return [] if kind is None else list(_tensor_problems(TensorEntry("", *kind))) or None


def _tensor_problems(leaf: TensorEntry) -> Iterator[str]:
    if leaf.dtype not in DTYPES:
        yield f"dtype {leaf.dtype[:40]!r} is not one of the format's"
        return
    item = item_size(leaf.dtype)
    if fault := shape_fault(leaf.shape, item):
        yield fault
    elif (leaf.chunk is None) == (leaf.pieces is None):
        yield "exactly one of chunk and pieces must be given"
    elif leaf.pieces is not None and leaf.shard is not None:
        yield "a tensor in pieces has a shard shape in each of them, not one of its own"
    elif leaf.chunk is not None:
        yield from _grid_problems(leaf.shape, leaf.chunk, leaf.shard, item)
    else:
        assert leaf.pieces is not None
        yield from pieces_problems(leaf.shape, leaf.pieces, item, _grid_problems)


@functools.lru_cache(maxsize=64)
def shape_fault(shape: Shape, item_bytes: int) -> str:
    """Why no array can have this shape, not even an empty array; empty if one can."""
    if len(shape) > MAX_RANK:
        return f"{len(shape)} dimensions, and a checkpoint holds at most {MAX_RANK}"
    if any(size < 0 or size > MAX_TENSOR_BYTES for size in shape):
        return f"impossible shape {shape}"
    if prod(max(size, 1) for size in shape) * item_bytes > MAX_TENSOR_BYTES:
        return f"shape {shape} is more than {MAX_TENSOR_BYTES:,} bytes"
    return ""


def _grid_problems(shape: Shape, chunk: Shape, shard: Shape | None, item: int) -> Iterator[str]:
    for what, cell in (("chunk", chunk), ("shard", shard)):
        if cell is None:
            continue
        fits = len(cell) == len(shape) and all(1 <= size <= MAX_TENSOR_BYTES for size in cell)
        if not fits or prod(cell) * item > MAX_CHUNK_BYTES:
            most = f"{MAX_CHUNK_BYTES:,} bytes"
            yield f"{what} shape {cell} does not suit shape {shape}, or is over {most}"
            return
    if shard is not None and any(outer % inner for outer, inner in zip(shard, chunk, strict=True)):
        yield f"shard shape {shard} is not a multiple of chunk shape {chunk}"


def kind_of(leaf: Entry) -> Kind | None:
    """The kind of a leaf that is one array; None for any other, and where dimensions have names."""
    if not isinstance(leaf, TensorEntry) or leaf.chunk is None or leaf.pieces is not None:
        return None
    kind = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
    return kind if leaf.dimension_names is None else None


def kinds(manifest: Manifest) -> Iterator[tuple[Kind | None, int]]:
    """How many leaves there are of each kind, `TOGETHER` at a time: all may be different."""
    rest = map(kind_of, manifest.leaves)
    while some := Counter(islice(rest, TOGETHER)):
        yield from some.items()


def count_chunks(manifest: Manifest) -> int:
    """How many chunks a checkpoint has; each has a digest."""
    return _counts(manifest)[0]


def count_packed(manifest: Manifest) -> int:
    """How many chunks lie in packs."""
    return _counts(manifest)[1]


def _counts(manifest: Manifest) -> tuple[int, int]:
    """How many chunks there are, and how many in packs: counted once, and kept by the manifest."""
    kept = vars(manifest)
    if "counts" in kept:
        return kept["counts"]
    chunks = packed = others = 0
    most = manifest.pack_bytes
    for kind, count in kinds(manifest):
        if kind is None:
            others += count
            continue
        _, of_one, is_small = regular(*kind, most)
        chunks, packed = chunks + of_one * count, packed + of_one * count * is_small
    for leaf in manifest.leaves if others else ():
        if kind_of(leaf) is None:
            chunks += count_leaf_chunks(leaf)
            packed += count_leaf_packed(leaf, most)
    return kept.setdefault("counts", (chunks, packed))


def count_pieces(manifest: Manifest) -> int:
    """How many pieces the leaves of a checkpoint have together."""
    tensors = (leaf for leaf in manifest.leaves if isinstance(leaf, TensorEntry))
    return sum(len(leaf.pieces) for leaf in tensors if leaf.pieces is not None)


def count_leaf_chunks(leaf: Entry) -> int:
    """How many chunks a leaf has."""
    if isinstance(leaf, ValueEntry):
        return 0
    if isinstance(leaf, TensorEntry) and leaf.pieces is not None:
        return leaf.pieces.chunks
    return count_array(leaf, 0)[0]


def count_leaf_packed(leaf: Entry, pack_bytes: int) -> int:
    """How many chunks of a leaf lie in packs."""
    if isinstance(leaf, ValueEntry):
        return 0
    if isinstance(leaf, TensorEntry) and leaf.pieces is not None:
        return leaf.pieces.packed_chunks(pack_bytes // item_size(leaf.dtype))
    chunks, is_packed = count_array(leaf, pack_bytes)
    return chunks * is_packed


def count_array(leaf: TensorEntry | BytesEntry, pack_bytes: int) -> tuple[int, bool]:
    """The chunks of a leaf that is one array, and whether it is packed."""
    if isinstance(leaf, BytesEntry):
        about = "uint8", (leaf.size,), (leaf.chunk,), None
    else:
        assert leaf.chunk is not None
        about = leaf.dtype, leaf.shape, leaf.chunk, leaf.shard
    return regular(*about, pack_bytes)[1:]
