"""Strategies for manifests, as a planner makes them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.support.tilings import tiled_shapes
from xckpt.core.dtypes import DTYPES, item_size
from xckpt.core.geometry.box import Boxes
from xckpt.core.geometry.grid import GridOptions, choose_grid
from xckpt.core.manifest.codec import complete, draft
from xckpt.core.manifest.entries import BytesEntry, Manifest, ValueEntry
from xckpt.core.metadata import (
    BytesStorageMetadata,
    Metadata,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)
from xckpt.core.names import join_keys
from xckpt.core.values import encode_value, value_kind


def digest(data: bytes | memoryview) -> bytes:
    """Stands in for the storage's: the core doesn't care which it is."""
    return hashlib.blake2b(data, digest_size=16).digest()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**4095), 2**4095)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
shardings = st.sampled_from(
    [
        None,
        Sharding(axes=(("dp", 2), ("tp", 4)), placements=("Shard(0)", "Replicate()")),
        Sharding(axes=(("x", 8),), spec=(("x",), ())),
    ]
)
keys = st.one_of(st.integers(0, 5), st.text(max_size=4), st.sampled_from(["0", "a/b", "", "."]))


@st.composite
def tensors(draw: st.DrawFn, *, max_rank: int = 3) -> TensorStorageMetadata:
    shape, boxes = draw(tiled_shapes(max_rank=max_rank))
    dtype = draw(st.sampled_from(list(DTYPES)))
    full = Boxes.of([box for box in boxes if 0 not in box[1]], rank=len(shape))
    options = GridOptions(draw(st.sampled_from([4, 64, 1 << 20])), draw(st.sampled_from([0, 256])))
    grid = choose_grid(shape, item_size(dtype), full, options)
    annotation = draw(st.sampled_from(["", "prng_key:threefry2x32"]))
    letters = tuple("xyzuvw"[: len(shape)])
    names = draw(st.sampled_from([None, letters])) if len(letters) == len(shape) else None
    return TensorStorageMetadata(
        TensorProperties(dtype), shape, full, grid, draw(shardings), annotation, names
    )


@st.composite
def metadata(draw: st.DrawFn) -> tuple[Metadata, dict[str, ValueEntry | BytesEntry]]:
    """What is planned, and the values that ranks have reported."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    values: dict[str, ValueEntry | BytesEntry] = {}
    # A key of its own for each leaf keeps leaves out of leaves.
    for number, key in enumerate(draw(st.lists(keys, max_size=4))):
        name = join_keys((f"leaf{number}", key))
        kind = draw(st.sampled_from(["tensor", "tensor", "value", "bytes"]))
        if kind == "tensor":
            described[name] = draw(tensors())
        elif kind == "value":
            value = draw(st.sampled_from([None, True, 7, -0.5, 1j, "text", b"bytes"]))
            described[name] = BytesStorageMetadata(value_kind(value) or "")
            values[name] = ValueEntry(name, value_kind(value) or "", encode_value(value))
        else:
            described[name] = BytesStorageMetadata("opaque")
            values[name] = BytesEntry(
                name, "opaque", draw(st.integers(0, 99)), draw(st.integers(1, 64))
            )
    containers = {"leaf9": "list", "leaf9/0": "tuple"} if draw(st.booleans()) else {}
    user: Any = draw(json_values)
    planner: Any = draw(json_values)
    return Metadata(described, containers, user, planner), values


def with_digests(manifest: Manifest) -> Manifest:
    """A manifest that names the file of digests."""
    return msgspec.structs.replace(manifest, digests=digest(b"digests").hex())


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    planned, values = draw(metadata())
    tensors = draft(planned, draw(st.sampled_from([(), ("crc32c",)])))
    root = draw(st.sampled_from(["", ".generations/0123abcd"]))
    return with_digests(complete(tensors, planned, values, root=root))


def example() -> Manifest:
    """One of everything: regular, in pieces, sharded in zarr's sense, 0-d, empty, values, bytes."""
    rows = Boxes.of([((0, 0), (7, 4)), ((7, 0), (13, 4)), ((20, 0), (81, 4))])
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, shape, boxes, options in (
        ("model/regular", (8, 4), Boxes.whole((8, 4)), GridOptions(64)),
        ("model/pieces", (101, 4), rows, GridOptions(4096)),
        ("model/sharded", (8, 8), Boxes.whole((8, 8)), GridOptions(32, 128)),
        ("model/scalar", (), Boxes.whole(()), GridOptions()),
        ("model/empty", (0, 3), Boxes.of([], rank=2), GridOptions()),
    ):
        grid = choose_grid(shape, 2, boxes, options)
        described[name] = TensorStorageMetadata(TensorProperties("bfloat16"), shape, boxes, grid)
    tensor = described["model/regular"]
    assert isinstance(tensor, TensorStorageMetadata)
    described["model/regular"] = replace(
        tensor, sharding=Sharding(axes=(("dp", 2),), placements=("Shard(0)",))
    )
    described["opt/0"] = BytesStorageMetadata("int")
    described["opt/1"] = BytesStorageMetadata("opaque")
    values: dict[str, ValueEntry | BytesEntry] = {
        "opt/0": ValueEntry("opt/0", "int", "0x7"),
        "opt/1": BytesEntry("opt/1", "opaque", 100, 64),
    }
    planned = Metadata(described, {"opt": "list"}, {"run": "a"}, [1, None])
    tensors = draft(planned, ("crc32c",))
    return with_digests(complete(tensors, planned, values))
