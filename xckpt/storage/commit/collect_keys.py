"""Leftovers of killed saves in a bucket or in ``memory://``: finding, measuring, removing them.

1. All keys below a prefix are listed once. A checkpoint's place is where a manifest, a claim or a
   generation is.
2. A generation that the manifest does not name is left over from a save that was cut off. One that
   it names may hold a copy of the manifest before (`REPLACED`): the old data was not all deleted.
   If there is a claim and the manifest names a generation, or there is none, the other keys that
   look like a checkpoint's are leftovers, as for a save. Beside a manifest that cannot be read,
   perhaps a newer release's, nothing counts as one.
3. It is never known whether the writer is alive; its identity tells when it began. So its claim is
   taken over before anything is removed, and the manifest read some seconds after that
   (`let_arrive`): a save commits only while it has its claim, and may have looked just before.
   With a damaged claim it commits no more. When it began is not known: its age counts as 0.
4. TensorStore lists keys without their sizes. Chunks count by the zarr.json of their array, and
   keys without one do not count.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import ml_dtypes  # noqa: F401  # NumPy knows its types by their names then
import msgspec
import numpy as np
import tensorstore as ts

from xckpt.core.manifest.own_keys import (
    BY_SHAPE,
    CLAIM,
    GENERATIONS,
    IN_GENERATIONS,
    MANIFEST,
    Documents,
    own_among,
)
from xckpt.errors import StorageError
from xckpt.storage.buckets.listing import listed
from xckpt.storage.commit.carry import own_keys
from xckpt.storage.commit.collect import Leftover, is_due, root_of
from xckpt.storage.commit.conditional import (
    KeyClaim,
    delete_keys,
    documents_of,
    let_arrive,
)
from xckpt.storage.commit.folder import ClaimText, new_identity
from xckpt.storage.commit.keys import REPLACED
from xckpt.storage.commit.leftovers import OwnerState
from xckpt.storage.location import Location, answer, open_store, storage_errors

_DATED = 16
"""Digits of an identity that begins with a time."""
_UNREADABLE = "?"
"""Stands for the root that a manifest names which cannot be read."""


def find_in_keys(location: Location) -> Iterator[Leftover]:
    """What was left below a prefix.

    Raises:
        StorageError: the storage refused.
    """
    with storage_errors(location):
        store = open_store(location)
        keys = sorted(key.decode() for key in listed(store, location))
        for place, generations in _places(keys).items():
            yield from _find_at(location, store, keys, place, generations)


def _find_at(
    location: Location,
    store: ts.KvStore,
    keys: list[str],
    place: str,
    generations: Mapping[str, list[str]],
) -> Iterator[Leftover]:
    """What was left at a checkpoint's place."""
    root = _root_at(store, place, location)
    if root == _UNREADABLE:
        return
    for identity, own in generations.items():
        where = f"{place}{GENERATIONS}/{identity}"
        if identity and root != where.removeprefix(place):
            yield _measured(location, store, where, place, own, _age(identity))
    named = posixpath.basename(root or "")
    note = f"{place}{root}/{REPLACED}"
    if note in generations.get(named, ()):
        old = answer(store.read(note), location).value
        own = [note, *_of_manifest(old, keys, place, documents_of(store, location, place))]
        yield _measured(location, store, note, place, own, _age(named))
    elif "" in generations and root != "":  # beside data in place the claim stays
        own = [f"{place}{CLAIM}", *_in_place(keys, place, documents_of(store, location, place))]
        claim = answer(store.read(own[0]), location).value
        yield _measured(location, store, own[0], place, own, _age(_saver(claim)))


def _places(keys: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Prefix of a checkpoint -> identity of a generation -> its keys; "" is a claim's identity."""
    places: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        place, found, below = key.partition(f"{GENERATIONS}/")
        identity = below.partition("/")[0]
        if found and (not place or place.endswith("/")):
            if not re.fullmatch(IN_GENERATIONS, identity):
                continue  # the user's
            places.setdefault(place, {}).setdefault(identity, []).append(key)
        elif posixpath.basename(key) == CLAIM:
            places.setdefault(key.removesuffix(CLAIM), {}).setdefault("", []).append(key)
    return places


def _of_manifest(manifest: bytes, keys: Iterable[str], place: str, read: Documents) -> list[str]:
    """The keys in place that a manifest implies, and the claim beside them."""
    below = [key.removeprefix(place) for key in keys if key.startswith(place)]
    own = own_among(below, [own_keys(manifest)], MANIFEST, GENERATIONS, read=read)
    return [f"{place}{key}" for key in own]


def _in_place(keys: Iterable[str], place: str, read: Documents) -> list[str]:
    """The keys that look like those of a save in place, and lie in no checkpoint below."""
    below = [key.removeprefix(place) for key in keys if key.startswith(place)]
    own = own_among(below, [BY_SHAPE], CLAIM, MANIFEST, GENERATIONS, read=read)
    return [f"{place}{key}" for key in own]


def _saver(claim: bytes) -> str:
    """The identity of the save that wrote a claim."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
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


def remove_keys(
    location: Location, found: Iterable[Leftover], older_than: float | None
) -> Iterator[Leftover]:
    """Remove leftovers among keys that are due, unless something has committed them meanwhile.

    The claims of their saves are taken over first, all of them: a save that is alive commits no
    more. Gives each leftover, in order, with whether it was removed.

    Raises:
        StorageError: the storage refused, or a save has committed what was being removed.
    """
    found = list(found)
    taken = [_taken(location, left, older_than) for left in found]
    if any(taken):
        let_arrive()
    for left, claim in zip(found, taken, strict=True):
        yield left if claim is None else _removed(location, left, *claim)


def _taken(
    location: Location, left: Leftover, older_than: float | None
) -> tuple[KeyClaim, bool] | None:
    """A claim on a leftover, and whether there was one before; None if it is not due."""
    if not is_due(left, older_than):
        return None
    with storage_errors(left.path):
        store = open_store(location)
        where, place = _keys_of(location, left)
        in_place = posixpath.basename(where) in (CLAIM, REPLACED)
        claim = KeyClaim.of(f"{place if in_place else f'{where}/'}{CLAIM}", new_identity())
        seen = answer(store.read(claim.key), location)
        there = seen.state == "value"
        ours = _is_of(seen.value, left, older_than) if there else claim.key != where
        taken = ours and claim.take(store, location, seen.stamp.generation)
        return (claim, there) if taken else None


def _keys_of(location: Location, left: Leftover) -> tuple[str, str]:
    """The key of a leftover, and the prefix of the checkpoint's place."""
    where, place = (
        each.removeprefix(str(location)).lstrip("/") for each in (left.path, left.target)
    )
    return where, f"{place}/" if place else ""


def _removed(location: Location, left: Leftover, claim: KeyClaim, there: bool) -> Leftover:
    """Remove a leftover whose claim was taken over, if ``there`` was one."""
    with storage_errors(left.path):
        store = open_store(location)
        where, place = _keys_of(location, left)
        own = _own(store, where, place, location)
        # What says that the others are left goes last.
        for some in (set(own) - {where, claim.key}, set(own) & {where} - {claim.key}):
            for error in delete_keys(store, list(some), location).values():
                raise error
        if own or not there:
            claim.release(store, location)
        root = where.removeprefix(place).removesuffix(CLAIM)
        if own and _root_at(store, place, location) == root:
            raise StorageError(
                f"{left.target}: a save committed here while what it had written was removed as "
                f"that of a dead one: save again, and give a longer time"
            )
    return replace(left, removed=bool(own))


def _is_of(claim: bytes, left: Leftover, older_than: float | None) -> bool:
    """Whether a claim is as old as its leftover has to be, and not that of a later save."""
    age = _age(_saver(claim))
    age = left.age if age is None else age
    return older_than is not None and (age or 0.0) >= older_than


def _own(store: ts.KvStore, where: str, place: str, location: Location) -> list[str]:
    """The keys of a leftover by now; none if the manifest names them."""
    end = f"{place[:-1]}0" if place else ""  # 0 follows the slash
    keys = [key.decode() for key in listed(store, location, ts.KvStore.KeyRange(place, end))]
    root = _root_at(store, place, location)  # after the listing: a save has had time to commit
    name, generation = posixpath.basename(where), where.removeprefix(place)
    if name == REPLACED and root == posixpath.dirname(generation):
        old = answer(store.read(where), location).value
        return [*_of_manifest(old, keys, place, documents_of(store, location, place)), where]
    if name == CLAIM and root not in ("", _UNREADABLE) and f"{place}{root}/{REPLACED}" not in keys:
        return [*_in_place(keys, place, documents_of(store, location, place)), where]
    left = name not in (CLAIM, REPLACED) and root not in (generation, _UNREADABLE)
    return [key for key in keys if left and key.startswith(f"{where}/")]


def _root_at(store: ts.KvStore, place: str, location: Location) -> str | None:
    """The root that the manifest at a place names; None if there is none."""
    manifest = answer(store.read(f"{place}{MANIFEST}"), location)
    if manifest.state != "value":
        return None
    root = root_of(manifest.value)
    return _UNREADABLE if root is None else root
