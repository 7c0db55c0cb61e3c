"""Manifests, key paths and zarr.json: pure functions over bytes, without any file.

`manifest` refuses what it is given, or gives a manifest that keeps the format's promises: it is
written the same way again, its limits hold, its paths stay inside, and zarr.json follows from it.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from conformance.laws.golden import goldens
from conformance.twins.manifests import encoded, seal
from tests.fuzz.choices import Choices, edit_bytes, edit_json, spelled
from xckpt.core.manifest.codec import encode, parse, to_metadata
from xckpt.core.manifest.entries import Manifest, TensorEntry, arrays, documents
from xckpt.core.manifest.rules import MAX_CHUNK_BYTES, MAX_CHUNKS, MAX_RANK, MAX_TENSOR_BYTES
from xckpt.core.names import join_keys, split_name, zarr_path
from xckpt.core.tree import unflatten
from xckpt.errors import XckptError
from xckpt.storage.array import digest_bytes

__all__ = ["changed_manifest", "manifest", "names"]

ORIGINALS = [(golden.path / "xckpt.json").read_bytes() for golden in goldens()]
LOOKED_AT = 2000
"""Arrays and documents of a manifest that are looked at; it may imply very many."""
FORBIDDEN = {"", ".", "..", "zarr.json", "xckpt.json", "xckpt.digests", ".generations"}


def resealed(body: bytes) -> bytes:
    """A manifest with another body and the digest that fits it."""
    return seal(body, digest_bytes(body).hex())


def changed_manifest(original: bytes, choices: Choices) -> bytes:
    """A manifest with some changes; most have a fitting digest, so that they are looked at."""
    body: Any = json.loads(original)["checkpoint"]
    how = choices.below(8)
    if how == 0:
        return choices.rest()
    if how == 1:
        return edit_bytes(original, choices)
    if how == 2:
        return resealed(choices.rest())
    if how == 3:
        return resealed(edit_bytes(encoded(body), choices, original))
    if how == 4:
        envelope = json.loads(original)
        edit_json(envelope, choices)
        return spelled(envelope)
    edit_json(body, choices)
    return resealed(spelled(body))


def manifest(data: bytes) -> str:
    """Parse a changed manifest."""
    choices = Choices(data)
    original = ORIGINALS[choices.below(len(ORIGINALS))]
    changed = changed_manifest(original, choices)
    try:
        parsed = parse(changed, digest_bytes)
    except XckptError:
        return "refused"
    check_manifest(parsed)
    return "read" if changed != original else "unchanged"


def check_manifest(parsed: Manifest) -> None:
    """Hold what was read against what a manifest promises."""
    again = parse(encode(parsed, digest_bytes), digest_bytes)
    assert repr(again) == repr(parsed), "written anew, it is another"
    to_metadata(parsed)
    unflatten({leaf.name: None for leaf in parsed.leaves}, parsed.containers)
    assert parsed.root == "" or FORBIDDEN.isdisjoint(set(parsed.root.split("/")) - {".generations"})
    for leaf in parsed.leaves:
        if isinstance(leaf, TensorEntry):
            assert len(leaf.shape) <= MAX_RANK
            assert all(0 <= size <= MAX_TENSOR_BYTES for size in leaf.shape)
    first, paths = 0, set[str]()
    for array in islice(arrays(parsed), LOOKED_AT):
        assert array.first == first and array.count >= 0
        first += array.count
        assert array.path not in paths
        paths.add(array.path)
        check_path(array.path)
        size = 1
        for step in array.chunk:
            size *= step
        assert 0 < size <= MAX_CHUNK_BYTES
    assert first <= MAX_CHUNKS
    for key, content in islice(documents(parsed), LOOKED_AT):
        check_path(key.removesuffix("zarr.json").rstrip("/") or "root")
        json.loads(content)


def check_path(path: str) -> None:
    """A path that any store takes, and that stays where it is."""
    for part in path.split("/"):
        assert part not in FORBIDDEN and not part.startswith((".", "__")), path
        assert part.isascii() and part.isprintable() and "\\" not in part, path
        assert len(part) <= 160 and part[-1] not in " ." and not part.endswith(".__lock"), path


def names(data: bytes) -> str:
    """Key paths, names and paths, in each direction."""
    choices = Choices(data)
    keys: list[str | int] = []
    while choices.left and len(keys) < 9:
        if choices.below(4) == 0:
            keys.append(choices.number(8) - (1 << 63))
        else:
            keys.append(choices.take().decode("utf-8", "replace"))
    name = join_keys(keys)
    assert split_name(name) == tuple(keys), name
    check_path(zarr_path(name))
    text = data.decode("utf-8", "replace")
    found = split_name(text)
    if join_keys(found) != text:
        return "not canonical"
    check_path(zarr_path(text))
    assert text == name or zarr_path(text) != zarr_path(name), "two names have one path"
    return "canonical"
