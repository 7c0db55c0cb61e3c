"""What a manifest takes in memory is known from above before it takes it."""

from __future__ import annotations

import gc
import tracemalloc

import msgspec
import pytest

from tests.support.manifests import example
from xckpt.core.manifest.codec import encode, parse, to_metadata
from xckpt.core.manifest.entries import Manifest, TensorEntry, ValueEntry, arrays, is_packed
from xckpt.core.manifest.memory import (
    LEAST_LIMIT,
    described_bytes,
    json_bytes,
    leaves_bytes,
    maybe_small,
)
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.metadata import Sharding
from xckpt.core.tree import DEEPEST
from xckpt.errors import MemoryLimitError
from xckpt.storage.array import digest_bytes

COUNT = 10_000
MANIFESTS = {
    "values": Manifest(tuple(ValueEntry(f"v/{n}", "int", hex(n)) for n in range(COUNT)), ""),
    "tensors": Manifest(
        tuple(TensorEntry(f"l/{n}", "int8", (n, 7), (n + 1, 7)) for n in range(COUNT)), ""
    ),
    "alike": Manifest(
        tuple(TensorEntry(f"model/{n}/w", "float32", (64, 7), (64, 7)) for n in range(COUNT)), ""
    ),
    "strings": Manifest(
        (
            TensorEntry(
                "w", "int8", (1,), (1,), sharding=Sharding((), tuple(f"{n}" for n in range(COUNT)))
            ),
        ),
        "",
    ),
    "pieces": Manifest(
        (
            TensorEntry(
                "w",
                "int8",
                (COUNT,),
                pieces=Pieces.listed(((n,), (1,), (1,)) for n in range(COUNT)),
            ),
        ),
        "",
    ),
    "user": Manifest((), "", user=[{"a": [{}]} for _ in range(COUNT)]),
    "containers": Manifest((), "", containers={f"c{n}": "list" for n in range(COUNT)}),
    "deep": Manifest(
        tuple(ValueEntry(f"a{n}/{'b/' * 60}c", "None", "") for n in range(COUNT // 30)), ""
    ),
}


def estimate(data: bytes) -> int:
    """What `parse` expects."""
    body = msgspec.json.decode(data, type=dict[str, msgspec.Raw])["checkpoint"]
    parts = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return sum(
        (leaves_bytes if name == "leaves" else json_bytes)(bytes(text))
        for name, text in parts.items()
    )


@pytest.mark.parametrize("kind", MANIFESTS)
def test_the_estimate_is_an_upper_bound(kind: str) -> None:
    manifest = MANIFESTS[kind]
    data = encode(manifest, digest_bytes)
    parse(data, digest_bytes)
    gc.collect()  # else tuples that Python keeps for later come from memory that is not counted
    tracemalloc.start()
    kept = to_metadata(parse(data, digest_bytes))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept is not None
    assert peak < 1.1 * (estimate(data) + described_bytes(manifest))
    if kind in ("values", "tensors", "alike"):
        assert peak < (5 - 1) * len(data), "with the text, more than five bytes for each of it"


def test_what_is_above_the_limit_is_refused_by_name() -> None:
    data = encode(MANIFESTS["values"], digest_bytes)
    parse(data, digest_bytes, 1)  # what takes little is always read
    copies = -(-LEAST_LIMIT // len(data)) + 1
    user = Manifest((), "", user=["[" * len(data)] * copies)
    with pytest.raises(MemoryLimitError, match=r"memory_bytes \(1 B\); raise LoadOptions"):
        parse(encode(user, digest_bytes), digest_bytes, 1)
    # Few bytes, and many containers that only names tell.
    leaves = tuple(ValueEntry(f"a{n}/{'b/' * 60}c", "None", "") for n in range(2000))
    body = msgspec.json.encode(Manifest(leaves, ""))
    text = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}'
    stored = text % (digest_bytes(body).hex().encode(), body)
    assert len(stored) < 1 << 20
    with pytest.raises(MemoryLimitError, match="the manifest of 2,000 leaves takes about"):
        parse(stored, digest_bytes, 1)


def test_arrays_that_may_be_small_are_all_that_are():
    tensors = tuple(leaf for leaf in example().leaves if isinstance(leaf, TensorEntry))
    whole = Manifest(tensors, "")
    pieces = {array.path for array in arrays(whole) if array.piece_of is not None}
    for most in (0, 1, 100, 200, 1 << 20):
        kept = {array.path for array in maybe_small(whole, most)}
        assert {array.path for array in arrays(whole) if is_packed(array, most)} <= kept
        assert kept.isdisjoint(pieces) or most
    assert pieces <= {array.path for array in maybe_small(whole, 1 << 20)}


def test_a_name_of_too_many_levels_is_not_taken_apart() -> None:
    """That took 4 s for a hundred thousand levels, and grew by their square; `check` refuses it."""
    deepest = "/".join("a" * DEEPEST)
    for name, containers in (("/" * 200_000, 0), (deepest, DEEPEST - 1), (f"a/a/{deepest}", 0)):
        manifest = Manifest((TensorEntry(name, "int8", (4,), (4,)),), "")
        assert described_bytes(manifest) == containers * 800
