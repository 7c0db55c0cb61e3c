"""Which keys of a checkpoint's folder are the checkpoint's; every other file there is the user's.

1. A manifest implies its own keys (`OwnKeys.of`): the manifest, the digests, a zarr.json for each
   array and for each folder above one, and the chunks of the arrays.
2. Saves below ``.generations`` are its own, and so are packs, by their names, the claim of a save,
   and lock files beside a key, which a killed save may have left.
3. Where a manifest cannot be read, and where a save was killed before it wrote one, keys are known
   by their shape (`BY_SHAPE`): a zarr.json, or numbers below a folder ``c``. Another
   checkpoint below looks the same, so nothing in its folder counts by shape (`OwnKeys.among`), and
   no array or group does whose zarr.json is not as xckpt writes it (`is_own_document`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Final, TypeAlias, cast

import msgspec

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Shape
from xckpt.core.manifest.entries import (
    Manifest,
    TensorEntry,
    arrays,
    documents,
    is_packed,
    leaf_arrays,
)
from xckpt.core.manifest.packs import NAME_BYTES, PACKS, PLACE, PLACES
from xckpt.core.names import zarr_path

MANIFEST: Final = "xckpt.json"
"""Key of the manifest: where it is, a checkpoint is."""
DIGESTS: Final = "xckpt.digests"
"""Key of the digests of all chunks."""
CLAIM: Final = "xckpt.saving"
"""Key of the claim of a save that is staged in place."""
GENERATIONS: Final = ".generations"
"""Folder of saves that are staged beside the old data."""

ORBAX: Final = ("_METADATA", "_CHECKPOINT_METADATA")
"""What Orbax writes beside its arrays, which may be those of zarr."""

_ZARR: Final = "zarr.json"
_LOCK: Final = ".__lock"
"""What TensorStore appends to the name of a file that it is about to write."""
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")
"""Of a piece, or of a chunk in a dimension, as it is written."""
IN_GENERATIONS: Final = "[0-9a-f]+"
"""Name of a save's folder below `GENERATIONS`."""
_NAMED: Final = re.compile(
    rf"{re.escape(PACKS)}/[0-9a-f]{{32}}|{re.escape(PLACES)}|"
    rf"{re.escape(GENERATIONS)}/{IN_GENERATIONS}(/.*)?",
    re.DOTALL,
)
"""What is a checkpoint's own by its name: packs, and saves beside the data."""
_CHUNK: Final = re.compile(rf"(.+)/c(?:/(?:{_NUMBER.pattern}))*")
_MARKS: Final = (MANIFEST, CLAIM, *ORBAX)
_DOCUMENT: Final = re.compile(
    rb'\{\n  "zarr_format": 3,\n  "node_type": "(?:'
    rb'array",\n  "shape": .*\n  "storage_transformers": \[\]|'
    rb'group",\n  "attributes": (?:\{\}\n|\{\n    "xckpt": |.*\n  "consolidated_metadata"))',
    re.DOTALL,
)
"""How xckpt begins a zarr.json; other libraries have other fields, or another order."""
DOCUMENT_BYTES: Final = 1 << 16
"""Of a zarr.json, as many as tell whose it is."""

Documents: TypeAlias = Callable[[Sequence[str]], Iterable[bytes | None]]
"""Reads the zarr.json at some keys, or their first `DOCUMENT_BYTES`; empty where it cannot; None
of a file that is gone: a deletion takes only xckpt's."""


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """The keys that are a checkpoint's own, relative to its folder."""

    arrays: frozenset[str] = frozenset()
    """Paths of zarr arrays, without those of `pieces`."""
    groups: frozenset[str] = frozenset()
    """Paths of the folders above them; the empty path is the checkpoint's own folder."""
    pieces: Mapping[str, int] = field(default_factory=dict[str, int])
    """Path of a leaf in pieces -> how many there are: they are too many to list."""
    by_shape: bool = False
    """Whether every key that looks like one of a zarr array or group counts."""
    inner: frozenset[str] = frozenset()
    """Folders of other checkpoints, whose keys do not count."""
    others: frozenset[str] = frozenset()
    """Arrays and groups that others have written, whose keys do not count by shape."""

    @classmethod
    def of(cls, manifest: Manifest) -> OwnKeys:
        """What a manifest implies, at its root.

        Example:
            >>> from xckpt.core.manifest.entries import TensorEntry
            >>> leaf = TensorEntry("model/w", "int8", (4,), chunk=(2,))
            >>> own = OwnKeys.of(Manifest((leaf,), ""))
            >>> own.owns("model/w/c/1"), own.owns("model/zarr.json"), own.owns("config.json")
            (True, True, False)
        """
        if manifest.root:
            return cls()
        most, paths, pieces = manifest.pack_bytes, set[str](), dict[str, int]()
        for leaf in manifest.leaves:
            cut = leaf.pieces if isinstance(leaf, TensorEntry) else None
            if cut is not None and cut.least_chunk > most:  # in bytes it is as large at least
                pieces[zarr_path(leaf.name)] = len(cut)
            else:
                paths |= {each.path for each in leaf_arrays(leaf) if not is_packed(each, most)}
        groups = {""}
        for parent in chain(map(posixpath.dirname, paths), pieces):
            while parent not in groups:
                groups.add(parent)
                parent = posixpath.dirname(parent)
        return cls(frozenset(paths), frozenset(groups), pieces)

    def among(self, keys: Collection[str], read: Documents | None = None) -> OwnKeys:
        """The same; where shapes count, those of others among these keys do not.

        Args:
            keys: all that there are.
            read: tells which arrays are others'; without it, all that lie in no other checkpoint
                count.

        Example:
            >>> own = BY_SHAPE.among(["w/zarr.json", "step-1/zarr.json", "step-1/xckpt.json"])
            >>> own.owns("w/zarr.json"), own.owns("step-1/zarr.json")
            (True, False)
            >>> BY_SHAPE.among(["w/zarr.json", "w/c/0"], lambda keys: [b"{}"]).owns("w/c/0")
            False
        """
        if not self.by_shape:
            return self
        documents = [key for key in keys if read and posixpath.basename(key) == _ZARR]
        found = zip(documents, read(documents) if read else (), strict=True)
        others = {
            posixpath.dirname(key)
            for key, text in found
            if text is not None and not is_own_document(text)
        }
        return replace(self, inner=_places_in(keys), others=frozenset(others))

    def owns(self, key: str) -> bool:
        """Whether a key is the checkpoint's own."""
        key = key.removesuffix(_LOCK)
        if self.inner and not self.inner.isdisjoint(_above(key)):
            return False
        if key in (MANIFEST, CLAIM) or _NAMED.fullmatch(key):
            return True
        folder, name = posixpath.split(key)
        if name == _ZARR and (
            self._has_shape(folder) or folder in self.groups or self.is_array(folder)
        ):
            return True
        if key == DIGESTS:
            return self.by_shape or "" in self.groups
        chunk = _CHUNK.fullmatch(key)
        return chunk is not None and (self._has_shape(chunk[1]) or self.is_array(chunk[1]))

    def _has_shape(self, path: str) -> bool:
        """Whether shapes count in the folder of an array or a group."""
        return self.by_shape and path not in self.others

    def is_array(self, path: str) -> bool:
        """Whether a folder is a zarr array of the checkpoint."""
        leaf, number = posixpath.split(path)
        if leaf not in self.pieces:
            return path in self.arrays
        return _NUMBER.fullmatch(number) is not None and int(number) < self.pieces[leaf]

    def is_group(self, path: str) -> bool:
        """Whether a folder may hold the checkpoint's own files and others side by side."""
        shaped = self.by_shape and self.inner.isdisjoint((path, *_above(path)))
        return path == "" or shaped or path in self.groups

    def needs(self, key: str) -> bool:
        """Whether a file at ``key`` would stand where the checkpoint has a file or a folder.

        Example:
            >>> own = OwnKeys(frozenset({"model/w"}), frozenset({"", "model"}))
            >>> own.needs("model"), own.needs("zarr.json"), own.needs("model/w.txt")
            (True, True, False)
        """
        above = posixpath.dirname(key)
        while above and not self.owns(above):
            above = posixpath.dirname(above)
        taken = self.is_array(key) or key in self.groups or key == GENERATIONS
        return bool(above) or taken or self.owns(key)


BY_SHAPE: Final = OwnKeys(by_shape=True)
"""What counts as a checkpoint's own where no manifest can be read."""


def object_sizes(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Key and bytes of every object that a manifest implies, in its root.

    The manifest itself is left out. What codecs and the padding of edge chunks add is not counted.
    Packs are not among them: their names stand in the table of places.

    Example:
        >>> from xckpt.core.manifest.entries import TensorEntry
        >>> leaf = TensorEntry("w", "float32", (3,), chunk=(2,))
        >>> [key for key, _ in object_sizes(Manifest((leaf,), ""))]
        ['xckpt.digests', 'w/zarr.json', 'zarr.json', 'w/c/0', 'w/c/1']
    """
    yield from objects_beside(manifest)
    for array in arrays(manifest):
        if array.count and array.place is None:
            size, unit = item_size(array.dtype), array.unit
            for at in _offsets(array.shape, unit):
                held = (min(u, n - o) for o, u, n in zip(at, unit, array.shape, strict=True))
                yield array.key(at), prod(held) * size


def _offsets(shape: Shape, unit: Shape) -> Iterator[Shape]:
    """The corners of an array's objects, one by one: there may be billions.

    Example:
        >>> list(_offsets((3, 2), (2, 2))), list(_offsets((), ()))
        ([(0, 0), (2, 0)], [()])
    """
    if not shape:
        yield ()
        return
    for first in range(0, shape[0], unit[0]):
        yield from ((first, *rest) for rest in _offsets(shape[1:], unit[1:]))


def object_bytes(manifest: Manifest) -> int:
    """What `object_sizes` adds up to; chunks are not counted out.

    Example:
        >>> from xckpt.core.manifest.entries import TensorEntry
        >>> one = Manifest((TensorEntry("w", "float32", (3,), chunk=(2,)),), "")
        >>> object_bytes(one) == sum(size for _, size in object_sizes(one))
        True
    """
    stored = (array for array in arrays(manifest) if array.place is None)
    chunks = sum(prod(array.shape) * item_size(array.dtype) for array in stored)
    return chunks + sum(size for _, size in objects_beside(manifest))


def objects_beside(manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Those of `object_sizes` that hold no chunks."""
    counts = [(array.count, array.place is not None) for array in arrays(manifest)]
    yield DIGESTS, 16 * sum(count for count, _ in counts)
    if manifest.places:
        placed = sum(count for count, is_placed in counts if is_placed)
        yield PLACES, NAME_BYTES * manifest.packs + PLACE.itemsize * placed
    yield from ((key, len(content)) for key, content in documents(manifest))


def is_own_document(text: bytes) -> bool:
    """Whether a zarr.json begins as xckpt writes it.

    Example:
        >>> is_own_document(b'{"zarr_format": 3, "node_type": "group"}')
        False
    """
    return _DOCUMENT.match(text) is not None


def is_manifest(text: bytes) -> bool:
    """Whether a file of a manifest's name may be one, if only a damaged or a newer one.

    Example:
        >>> is_manifest(b'{"my": "settings"}'), is_manifest(b'{"digest": "0", "check')
        (False, True)
    """
    try:
        found: object = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    fields = cast(dict[str, object], found) if isinstance(found, dict) else {}
    return fields.get("format") == "xckpt" or not {"digest", "checkpoint"}.isdisjoint(fields)


def own_among(
    keys: list[str], kinds: Iterable[OwnKeys], *kept: str, read: Documents | None = None
) -> list[str]:
    """The keys that are a checkpoint's own, and the folders above them, except for some.

    Args:
        keys: relative to the checkpoint's place; folders are among them.
        kinds: what counts as its own; shapes do not where another checkpoint is.
        kept: keys that do not count, nor does what is below them.
        read: see `OwnKeys.among`.
    """
    kinds = [kind.among(keys, read) for kind in kinds]
    own = {key for key in keys if any(kind.owns(key) for kind in kinds)}
    found = own | {above for key in own for above in _above(key)}
    left = tuple(f"{key}/" for key in kept if key)
    return [key for key in keys if key in found and not f"{key}/".startswith(left)]


def with_folders(left: Iterable[str], keys: Iterable[str]) -> list[str]:
    """Keys that are left, and the folders among all keys that they keep from going.

    Example:
        >>> with_folders(["w/c/0"], ["w/zarr.json", "w/c/1", "w/c/0", "w/c", "w"])
        ['w/c/0', 'w/c', 'w']
    """
    found = set(left)
    found.update(above for key in tuple(found) for above in _above(key))
    return [key for key in keys if key in found]


def _places_in(keys: Iterable[str]) -> frozenset[str]:
    """The folders among keys in which other checkpoints are, whole or not."""
    places: set[str] = set()
    for key in keys:
        folder, _, name = key.rpartition("/")
        outer, generations, _ = key.partition(f"/{GENERATIONS}")
        places.add(outer if generations else folder if name in _MARKS else "")
    return frozenset(each for each in places if each.partition("/")[0] not in ("", GENERATIONS))


def _above(key: str) -> Iterator[str]:
    """The folders above a key."""
    while key := key.rpartition("/")[0]:
        yield key
