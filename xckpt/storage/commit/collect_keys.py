"""Leftovers of killed saves in a bucket or in ``memory://``: finding, measuring, removing them.

1. All keys below a prefix are listed once. A checkpoint's place is where a manifest, a claim or a
   generation is.
2. A generation that the manifest does not name is left over from a save that was cut off, perhaps
   while it deleted the old data. If there is a claim and no manifest, the keys that look like a
   checkpoint's are leftovers.
3. It is never known whether the writer is alive; its identity tells when it began.
4. TensorStore lists keys without their sizes. Chunks count by the zarr.json of their array, and
   keys without one do not count.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import ml_dtypes  # noqa: F401  # NumPy knows its types by their names then
import msgspec
import numpy as np
import tensorstore as ts

from xckpt.core.manifest.own_keys import BY_SHAPE, CLAIM, GENERATIONS, MANIFEST
from xckpt.storage.commit.collect import Leftover, is_due, root_of
from xckpt.storage.commit.conditional import write_if
from xckpt.storage.commit.folder import ClaimText, new_identity
from xckpt.storage.commit.leftovers import OwnerState
from xckpt.storage.location import Location, answer, open_store, storage_errors

_DATED = 16
"""Digits of an identity that begins with a time."""


def find_in_keys(location: Location) -> Iterator[Leftover]:
    """What was left below a prefix.

    Raises:
        StorageError: the storage refused.
    """
    with storage_errors(location):
        store = open_store(location)
        keys = sorted(key.decode() for key in answer(store.list(), location))
        for place, generations in _places(keys).items():
            manifest = answer(store.read(f"{place}{MANIFEST}"), location)
            there = manifest.state == "value"
            root = root_of(manifest.value) if there else None
            for identity, own in generations.items():
                if identity and root != f"{GENERATIONS}/{identity}":
                    where = f"{place}{GENERATIONS}/{identity}"
                    yield _measured(location, store, where, place, own, _age(identity))
            # Beside data in place the claim stays; see `KeyStaging.replaced`.
            if "" in generations and root != "":
                own = [f"{place}{CLAIM}", *(() if there else _in_place(keys, place))]
                claim = answer(store.read(own[0]), location).value
                yield _measured(location, store, own[0], place, own, _age(_saver(claim)))


def _places(keys: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Prefix of a checkpoint -> identity of a generation -> its keys; "" is a claim's identity."""
    places: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        place, found, below = key.partition(f"{GENERATIONS}/")
        if found and (not place or place.endswith("/")):
            identity = below.partition("/")[0]
            places.setdefault(place, {}).setdefault(identity, []).append(key)
        elif posixpath.basename(key) == CLAIM:
            places.setdefault(key.removesuffix(CLAIM), {}).setdefault("", []).append(key)
    return places


def _in_place(keys: Iterable[str], place: str) -> list[str]:
    """The keys that look like those of a save in place, and lie in no checkpoint below."""
    below = [key.removeprefix(place) for key in keys if key.startswith(place)]
    others = tuple(key.removesuffix(MANIFEST) for key in below if key.endswith(f"/{MANIFEST}"))
    return [
        f"{place}{key}"
        for key in below
        if key not in (CLAIM, MANIFEST)
        and BY_SHAPE.owns(key)
        and not key.startswith((f"{GENERATIONS}/", *others))
    ]


def _saver(claim: bytes) -> str:
    """The identity of the save that wrote a claim."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(claim, type=ClaimText).save
    return ""


def _age(identity: str) -> float | None:
    """Seconds since the save of an identity began; None if that is unknown.

    Example:
        >>> _age("0123456789ab") is None, _age("00000000" * 2) > 1e9
        (True, True)
    """
    if len(identity) != _DATED:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, time.time() - int(identity[:8], 16))
    return None


def _measured(
    location: Location,
    store: ts.KvStore,
    where: str,
    place: str,
    keys: list[str],
    age: float | None,
) -> Leftover:
    total = sum(_sizes(location, store, keys).values())
    target = location.child(place.rstrip("/"))
    owner = OwnerState.UNKNOWN.value
    return Leftover(location.child(where), target, owner, total, len(keys), age)


def _sizes(location: Location, store: ts.KvStore, keys: list[str]) -> Mapping[str, int]:
    """The bytes of keys, as far as they are known."""
    documents = [key for key in keys if posixpath.basename(key) == "zarr.json"]
    asked = [(key, store.read(key)) for key in documents]
    sizes: dict[str, int] = {}
    chunk: dict[str, int] = {}
    for key, document in asked:
        content = answer(document, location).value
        sizes[key] = len(content)
        chunk[posixpath.dirname(key)] = _chunk_bytes(content)
    for key in keys:
        array, found, _ = key.rpartition("/c/")
        array = array if found else key.removesuffix("/c")
        sizes.setdefault(key, chunk.get(array, 0))
    return sizes


def _chunk_bytes(document: bytes) -> int:
    """The bytes of an array's chunk, by its zarr.json; 0 if that says none."""
    try:
        found = msgspec.json.decode(document)
        shape = found["chunk_grid"]["configuration"]["chunk_shape"]
        return math.prod(shape) * np.dtype(found["data_type"]).itemsize
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
        return 0


def remove_keys(location: Location, left: Leftover, older_than: float | None) -> Leftover:
    """Remove a leftover among keys, if it is due and nothing has committed it meanwhile.

    The claim of a save in place is taken over first: if the save is alive it commits no more.

    Raises:
        StorageError: the storage refused.
    """
    if not is_due(left, older_than):
        return left
    with storage_errors(left.path):
        store = open_store(location)
        where = left.path.removeprefix(str(location)).lstrip("/")
        place = left.target.removeprefix(str(location)).lstrip("/")
        place = f"{place}/" if place else ""
        in_place = posixpath.basename(where) == CLAIM
        if in_place and not _take_over(store, where, older_than, location):
            return left
        manifest = answer(store.read(f"{place}{MANIFEST}"), location)
        there = manifest.state == "value"
        named = "" if in_place else where.removeprefix(place)
        if there and root_of(manifest.value) == named:
            return left  # it was committed just now
        keys = [key.decode() for key in answer(store.list(), location)]
        if in_place:
            own = [*(() if there else _in_place(keys, place)), where]
        else:
            own = [key for key in keys if key.startswith(f"{where}/")]
        for future in [store.write(key, None) for key in own]:
            answer(future, location)
    return replace(left, removed=True)


def _take_over(store: ts.KvStore, key: str, older_than: float | None, location: Location) -> bool:
    """Replace a claim by one of this process, unless it is that of a later save by now."""
    claim = answer(store.read(key), location)
    age = _age(_saver(claim.value))
    if claim.state != "value" or age is None or older_than is None or age < older_than:
        return False
    own = msgspec.json.encode(ClaimText.own(new_identity()))
    return bool(write_if(store, key, own, claim.stamp.generation, location))
