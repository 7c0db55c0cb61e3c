"""The arrays of a manifest in columns, against those that `arrays` lists."""

from __future__ import annotations

from itertools import groupby
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xckpt.core.manifest import stored_arrays
from xckpt.core.manifest.entries import BytesEntry, Manifest, TensorEntry, ValueEntry, arrays
from xckpt.core.manifest.pieces import Pieces
from xckpt.core.manifest.stored_arrays import StoredArrays

sizes = st.integers(0, 9)
steps = st.integers(1, 4)


@st.composite
def leaves(draw: st.DrawFn) -> TensorEntry | BytesEntry | ValueEntry:
    kind = draw(st.sampled_from(["regular", "pieces", "bytes", "value"]))
    if kind == "value":
        return ValueEntry("", "int", "0x1")
    if kind == "bytes":
        return BytesEntry("", "bytes", draw(sizes), draw(steps))
    if kind == "regular":
        shape = tuple(draw(st.lists(sizes, max_size=2)))
        return TensorEntry("", "int16", shape, tuple(draw(steps) for _ in shape))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    cut = [((sum(lengths[:n]),), (size,), (draw(steps),)) for n, size in enumerate(lengths)]
    return TensorEntry("", "int16", (sum(lengths),), pieces=Pieces.listed(cut))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    listed = draw(st.lists(leaves(), max_size=6))
    named = tuple(_named(leaf, f"leaf{number}") for number, leaf in enumerate(listed))
    return Manifest(named, "", pack_bytes=draw(st.integers(0, 12)))


def _named(
    leaf: TensorEntry | BytesEntry | ValueEntry, name: str
) -> TensorEntry | BytesEntry | ValueEntry:
    about = {field: getattr(leaf, field) for field in leaf.__struct_fields__}
    return type(leaf)(**{**about, "name": name})


@given(manifests())
def test_columns_say_what_the_manifest_implies(manifest: Manifest) -> None:
    stored, listed = StoredArrays(manifest), list(arrays(manifest))
    by_leaf = {leaf: list(group) for leaf, group in groupby(listed, key=lambda each: each.leaf)}
    assert {name: list(found) for name, found in stored.items()} == by_leaf
    for number, leaf in enumerate(manifest.leaves):
        held = by_leaf.get(leaf.name, [])
        if any(array.count for array in held):
            assert stored.first[number] == held[0].first
        one = isinstance(leaf, TensorEntry) and leaf.chunk is not None and held[0].count == 1
        assert stored.nbytes[number] == (2 * prod(held[0].shape) if one else 0)
        packed = [array.place for array in held if array.place is not None and array.count]
        assert bool(stored.is_packed[number]) == bool(packed)
        assert not packed or stored.place[number] == packed[0]


def test_arrays_are_made_once_unless_one_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_arrays, "KEPT", 4)
    halves = Pieces.listed([((0,), (2,), (2,)), ((2,), (2,), (2,))])
    kinds = {
        "alone": TensorEntry("", "int8", (9,), (9,)),
        "packed": TensorEntry("", "int8", (4,), (4,)),
        "halves": TensorEntry("", "int8", (4,), pieces=halves),
    }
    leaves = [_named(leaf, f"{name}{n}") for n in range(9) for name, leaf in kinds.items()]
    stored = StoredArrays(Manifest(tuple(leaves), "", pack_bytes=4))
    for number, leaf in enumerate(leaves):
        made = stored.at(number)
        assert (stored.at(number) is made) == (not leaf.name.startswith("packed"))
        assert sum(map(len, stored._pieces.values())) <= 4 + 2
