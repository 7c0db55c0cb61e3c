"""Two readers of one text: xckpt and the independent one refuse the same manifests.

A manifest is taken, one value in it is replaced by another that might be there, and it is sealed
again. What one of the two takes and the other refuses is a fault of one of them, or of the
specification.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from math import prod
from typing import Any

import xxhash
from hypothesis import event, given
from hypothesis import strategies as st

from conformance.reader import Broken, arrays_of
from conformance.strict_reader import parse as parse_strictly
from tests.support.examples import examples
from tests.support.manifests import example, manifests
from xckpt.core.manifest.codec import encode, parse
from xckpt.core.manifest.entries import Manifest, arrays
from xckpt.errors import ManifestError
from xckpt.storage.array import digest_bytes

NUMBERS = [-1, 0, 1, 2, 3, 4, 7, 8, 20, 64, 101, 1 << 31, 1 << 32, 1 << 56, (1 << 56) + 1, 1 << 63,
           1 << 64]  # fmt: skip
TEXTS = [
    "", "a", "..", "model", "model/regular", "model/regular/x", "opt/0", "opt/2", "a//b", "%",
    "%41", "-0", "%30", "%2F", "int8", "float64", "bool", "None", "0x7", "7", "list", "tuple",
    "dict", "namedtuple:A:x", "pytree:a.B", "opaque", "crc32c", "gzip", "tensor", "value",
    "a\u0000", ".generations/1", "/", "ü", "x" * 200,
]  # fmt: skip
OTHERS = [None, True, False, 1.0, 0.5, [], {}, [1], [8, 4], ["crc32c"], [[]], {"opt": "list"}]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS])


def places(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a JSON value has parts."""
    children: Any = ()
    if isinstance(value, dict | list):
        children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*above, key)
        yield from places(child, (*above, key))


@st.composite
def altered(draw: st.DrawFn) -> dict[str, Any]:
    """The body of a manifest with one or two parts replaced, removed, added or exchanged."""
    body = json.loads(encode(draw(st.just(example()) | manifests()), digest_bytes))["checkpoint"]
    for _ in range(draw(st.integers(1, 2))):
        found = [place for place in places(body) if place[0] not in ("user", "planner")]
        *above, last = draw(st.sampled_from(found))
        inside: Any = body
        for key in above:
            inside = inside[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if what == "replace":
            inside[last] = copy.deepcopy(draw(VALUES))
        elif what == "remove":
            del inside[last]
        elif isinstance(inside, dict):
            names = ["shard", "chunk", "pieces", "sharding", "annotation", "root", "x"]
            inside[draw(st.sampled_from(names))] = copy.deepcopy(draw(VALUES))
        else:
            inside.append(copy.deepcopy(inside[last]))
    return body


def sealed(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    digest = xxhash.xxh3_128_hexdigest(raw).encode()
    return b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}' % (digest, raw)


def ours(data: bytes) -> Manifest | str:
    try:
        return parse(data, digest_bytes)
    except ManifestError as error:
        return str(error)


def theirs(data: bytes) -> list[tuple[object, ...]] | str:
    try:
        manifest = parse_strictly(data)
        found: list[tuple[object, ...]] = []
        first = 0
        for leaf in manifest["leaves"]:
            for array in arrays_of(leaf, manifest.get("codecs") or [], first):
                dtype, shape = array["document"]["data_type"], tuple(array["shape"])
                found.append((array["path"], dtype, shape, array["first"]))
                first = array["first"] + prod(array["counts"])
        return found
    except Broken as error:
        return str(error)


@given(altered())
@examples(75, 1500)
def test_both_refuse_the_same_manifests(body: dict[str, Any]) -> None:
    data = sealed(body)
    one, other = ours(data), theirs(data)
    event("refused" if isinstance(one, str) else "taken")
    assert isinstance(one, str) == isinstance(other, str), (one, other)
    if not isinstance(one, str):
        listed = [(array.path, array.dtype, array.shape, array.first) for array in arrays(one)]
        assert listed == other
