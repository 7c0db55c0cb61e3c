"""The manifest: what was encoded is parsed, what was altered or is absurd is refused."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.twins.pieces import cut_of
from tests.support.examples import examples
from tests.support.manifests import digest, example, manifests, metadata
from xckpt.core.manifest import codec as module
from xckpt.core.manifest import pieces as manifest_pieces
from xckpt.core.manifest import rules
from xckpt.core.manifest.codec import complete, draft, encode, parse, to_metadata
from xckpt.core.manifest.entries import BytesEntry, Manifest, TensorEntry, arrays, documents
from xckpt.core.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from xckpt.core.names import zarr_path
from xckpt.errors import ManifestError, VersionError

ENCODED = encode(example(), digest)


def sealed(body: object) -> bytes:
    """A manifest around any content, with the right digest: what an attacker can make."""
    raw = json.dumps(body).encode()
    return b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}' % (
        digest(raw).hex().encode(),
        raw,
    )


def content() -> dict[str, Any]:
    """The example's content as plain JSON values."""
    return json.loads(ENCODED)["checkpoint"]


@given(manifests())
def test_parse_inverts_encode(manifest):
    assert parse(encode(manifest, digest), digest) == manifest


def test_the_example_is_sealed_alike():
    assert parse(sealed(content()), digest) == example() == parse(ENCODED, digest)


@given(metadata())
def test_metadata_comes_back_as_planned(case):
    planned, values = case
    back = to_metadata(complete(draft(planned), planned, values))
    assert list(back.state_dict_metadata) == list(planned.state_dict_metadata)
    assert (back.containers, back.user_metadata, back.planner_data) == (
        planned.containers,
        planned.user_metadata,
        planned.planner_data,
    )
    for name, tensor in planned.state_dict_metadata.items():
        again = back.state_dict_metadata[name]
        if isinstance(tensor, BytesStorageMetadata):
            assert again == tensor
            continue
        assert isinstance(again, TensorStorageMetadata) and tensor.grid is not None
        assert again.grid == tensor.grid and again.chunks == tensor.grid.arrays
        assert (again.properties, again.size) == (tensor.properties, tensor.size)
        assert (again.sharding, again.annotation) == (tensor.sharding, tensor.annotation)


@given(manifests())
@examples(40, 1000)
def test_arrays_number_their_digests_without_gaps(manifest):
    first = 0
    for array in arrays(manifest):
        assert array.first == first
        first += array.count
        assert array.path.startswith(zarr_path(array.leaf))
        assert (array.piece_of is None) == (array.path == zarr_path(array.leaf))
    paths = [array.path for array in arrays(manifest)]
    assert len(set(paths)) == len(paths)


def test_every_truncation_is_refused():
    for length in range(len(ENCODED)):
        with pytest.raises(ManifestError):
            parse(ENCODED[:length], digest)


def test_every_flipped_bit_is_refused():
    for position in range(len(ENCODED)):
        for bit in range(8):
            altered = bytearray(ENCODED)
            altered[position] ^= 1 << bit
            with pytest.raises(ManifestError):
                parse(bytes(altered), digest)


@given(st.integers(0, len(ENCODED) - 1), st.integers(0, 255))
def test_every_changed_byte_is_refused(position, value):
    if ENCODED[position] != value:
        altered = bytearray(ENCODED)
        altered[position] = value
        with pytest.raises(ManifestError):
            parse(bytes(altered), digest)


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_anything_else_is_refused(data):
    with pytest.raises(ManifestError):
        parse(data, digest)


@pytest.mark.parametrize(
    "document",
    [
        {"format": "xckpt", "version": 2, "digest": "", "checkpoint": {}},
        {"format": "xckpt", "version": 2, "checksum": {"new": 1}, "body": [], "flags": [1]},
        {"format": "xckpt", "version": 10**30},
    ],
)
def test_a_newer_version_is_named(document):
    """Whatever else a newer version holds: the first two fields are those of every version."""
    with pytest.raises(VersionError, match="upgrade xckpt") as caught:
        parse(json.dumps(document).encode(), digest)
    assert f"version {document['version']} " in str(caught.value)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.5, True])
def test_a_version_that_never_was_is_refused_but_not_as_newer(version):
    data = ENCODED.replace(b'"version":1', b'"version":' + json.dumps(version).encode(), 1)
    with pytest.raises(ManifestError) as caught:
        parse(data, digest)
    assert not isinstance(caught.value, VersionError)


@pytest.mark.parametrize(
    "old, new",
    [
        (b'{"format"', b'{ "format"'),
        (b'"version":1,', b'"version":1,"extra":1,'),
        (b'"version":1,', b'"version":1,"checkpoint":{},'),
        (b'"format":"xckpt","version":1', b'"version":1,"format":"xckpt"'),
    ],
)
def test_the_envelope_has_one_spelling(old, new):
    """No digest is taken of it, so another reader might understand it otherwise."""
    assert old in ENCODED
    with pytest.raises(ManifestError, match="around its content"):
        parse(ENCODED.replace(old, new, 1), digest)
    with pytest.raises(ManifestError, match="around its content"):
        parse(ENCODED[:-1] + b',"extra":1}', digest)


def test_another_format_is_refused():
    with pytest.raises(ManifestError, match="'zarr', not 'xckpt'"):
        parse(ENCODED.replace(b'"xckpt"', b'"zarr"', 1), digest)


def test_a_manifest_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", len(ENCODED) - 1)
    with pytest.raises(ManifestError, match="bytes long; at most"):
        parse(ENCODED, digest)


def nodes(value: Any, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of each part of a JSON value."""
    yield where
    if isinstance(value, dict):
        for key, child in value.items():
            yield from nodes(child, (*where, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from nodes(child, (*where, index))


def replaced(where: tuple[str | int, ...], change: Callable[[Any], Any]) -> Any:
    """The example's content with one part changed."""
    body: Any = {"": content()}
    parent, last = body, ""
    for key in where:
        parent, last = parent[last], key
    parent[last] = change(parent[last])
    return body[""]


def test_an_unknown_field_anywhere_is_refused():
    body = content()
    # The caller's own JSON, and names of containers, are free.
    free = ("user", "planner", "containers")
    count = 0
    for where in nodes(body):
        if where and where[0] in free:
            continue

        def add(part: Any) -> Any:
            return {**part, "extra": 1} if isinstance(part, dict) else part

        altered = replaced(where, add)
        if altered != body:
            count += 1
            with pytest.raises(ManifestError, match="extra"):
                parse(sealed(altered), digest)
    assert count >= 10


HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 64, 1 << 31, 1 << 32, 1 << 56, (1 << 56) + 1, 1 << 60, 1 << 63,
    -(1 << 63), 1 << 64, 10**40, 1.5, "", "/", "..", "../x", "a//b", "a/", "%zz", "\x00", "float32",
    "object", "x" * 300, "/".join("a" * 200), [], [0], [1, 1], [-1, 2], [1 << 60], [1 << 62, 4],
    [1] * 33, [[0]], {}, {"a": 1},
]  # fmt: skip


@given(st.sampled_from(list(nodes(content()))), st.sampled_from(HOSTILE), st.booleans())
@examples(200, 4000)
def test_a_hostile_manifest_is_refused_or_harmless(where, value, delete):
    """Any part replaced or removed, and the digest put right: no other error, nothing huge."""

    def hurt(part: Any) -> Any:
        if delete and isinstance(part, dict) and part:
            return {key: part[key] for key in list(part)[1:]}
        return copy.deepcopy(part[:-1]) if delete and isinstance(part, list) else value

    tracemalloc.start()
    try:
        parsed = parse(sealed(replaced(where, hurt)), digest)
        # It was taken, so everything that follows from it has to work.
        assert to_metadata(parsed) and list(documents(parsed))
        assert parse(encode(parsed, digest), digest) == parsed
    except ManifestError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 50 << 20


def tensor(**fields: Any) -> dict[str, Any]:
    return {"kind": "tensor", "name": "w", "dtype": "int8", **fields}


def piece(offset: list[int], shape: list[int], **fields: Any) -> dict[str, Any]:
    return {"offset": offset, "shape": shape, "chunk": [max(1, n) for n in shape], **fields}


def pieces(*rows: dict[str, Any], rank: int = 1) -> dict[str, Any]:
    """A cut; a leaf of `tensor` that has it in place of a number gets the number."""
    return cut_of(rows, rank)


def body_of(*leaves: dict[str, Any]) -> dict[str, Any]:
    """A body whose leaves' cuts are where they belong."""
    cuts = [leaf["pieces"] for leaf in leaves if isinstance(leaf.get("pieces"), dict)]
    given = [
        leaf | ({"pieces": cuts.index(leaf["pieces"])} if leaf.get("pieces") in cuts else {})
        for leaf in leaves
    ]
    return {"leaves": given, "digests": "", "cuts": cuts}


@pytest.mark.parametrize(
    "leaf, problem",
    [
        (tensor(shape=[1 << 60], chunk=[4]), "shape"),
        (tensor(shape=[1 << 30, 1 << 30], chunk=[4, 4]), "more than"),
        (tensor(shape=[0, 1 << 60], chunk=[1, 4]), "shape"),
        (tensor(shape=[-4], chunk=[4]), "shape"),
        (tensor(shape=[10**40], chunk=[4]), "shape"),
        (tensor(shape=[1] * 33, chunk=[1] * 33), "33 dimensions"),
        (tensor(shape=[4], chunk=[0]), "chunk"),
        (tensor(shape=[4], chunk=[-1]), "chunk"),
        (tensor(shape=[4], chunk=[4, 4]), "chunk"),
        (tensor(shape=[4], chunk=[]), "chunk"),
        (tensor(shape=[4], chunk=[1 << 33]), "chunk"),
        (tensor(shape=[4], chunk=[10**40]), "chunk"),
        (tensor(shape=[1 << 50], chunk=[1]), "chunks"),
        (tensor(shape=[4], chunk=[2], shard=[3]), "not a multiple"),
        (tensor(shape=[4], chunk=[2], shard=[0]), "shard"),
        (tensor(shape=[4], chunk=[2], shard=[2, 2]), "shard"),
        (tensor(shape=[4], chunk=[2], dtype="object"), "dtype"),
        (tensor(shape=[4], chunk=[2], dtype="uint7"), "dtype"),
        (tensor(shape=[4]), "exactly one"),
        (tensor(shape=[4], chunk=[2], pieces=pieces(piece([0], [4]))), "exactly one"),
        (tensor(shape=[4], chunk=[2], dimension_names=["a", "b"]), "dimension_names"),
        (tensor(shape=[4, 4], chunk=[2, 2], dimension_names=["a", "a"]), "dimension_names"),
        (tensor(shape=[4], chunk=[2], dimension_names=[""]), "dimension_names"),
        (tensor(shape=[4], pieces=pieces()), "gap"),
        (tensor(shape=[4], pieces=pieces(piece([0], [3]))), "gap"),
        (tensor(shape=[4], pieces=pieces(piece([0], [3]), piece([2], [2]))), "overlap"),
        (tensor(shape=[], pieces=pieces(piece([0], [1]))), "1 dimensions, the tensor has 0"),
        (tensor(shape=[], pieces=pieces(rank=0)), "pieces of 0 dimensions"),
        (tensor(shape=[4], pieces=pieces(rank=33)), "pieces of 33 dimensions"),
        (tensor(shape=[4], pieces=pieces(rank=-1)), "pieces of -1 dimensions"),
        (tensor(shape=[4], pieces=pieces(piece([0], [5]))), "outside"),
        (tensor(shape=[4], pieces=pieces(piece([-1], [5]))), "outside"),
        (tensor(shape=[4], pieces=pieces(piece([0], [-1]))), "outside"),
        (tensor(shape=[4], pieces=pieces(piece([(1 << 63) - 1], [4]))), "piece 0"),
        (tensor(shape=[4], pieces=pieces(piece([-(1 << 63)], [4]))), "piece 0"),
        (tensor(shape=[4], pieces=pieces(piece([0, 0], [4, 1]), rank=2)), "the tensor has 1"),
        (tensor(shape=[4], pieces=pieces(piece([0], [4])) | {"rank": 2}), "columns of"),
        (tensor(shape=[4], pieces=pieces(piece([0], [4, 1]))), "columns of"),
        (tensor(shape=[4], pieces=pieces(piece([0], [1 << 60]))), "piece 0"),
        (tensor(shape=[4], pieces=pieces(piece([0], [4], shard=[3]))), "shard"),
        (tensor(shape=[4], pieces=pieces(piece([0], [4]) | {"chunk": [0]})), "piece 0: chunk"),
        (
            tensor(shape=[4], pieces=pieces(piece([0], [4]) | {"chunk": [1 << 62]})),
            "piece 0: chunk",
        ),
        (tensor(shape=[4], pieces=pieces(piece([0], [4])) | {"shape": "no"}), "base64"),
        (tensor(shape=[4], pieces=0), "cut 0 of 0"),
        (tensor(shape=[4], pieces=-1), "cut -1 of 0"),
        ({"kind": "bytes", "name": "w", "type": "opaque", "size": -1, "chunk": 1}, "bytes"),
        ({"kind": "bytes", "name": "w", "type": "opaque", "size": 1, "chunk": 0}, "bytes"),
        ({"kind": "bytes", "name": "w", "type": "set", "size": 1, "chunk": 1}, "type"),
        ({"kind": "bytes", "name": "w", "type": "str", "size": 1 << 60, "chunk": 1}, "bytes"),
        ({"kind": "value", "name": "w", "type": "int", "value": "zz"}, "int"),
        ({"kind": "value", "name": "w", "type": "set", "value": ""}, "set"),
        ({"kind": "value", "name": "w", "type": "opaque", "value": ""}, "opaque"),
        ({"kind": "else", "name": "w"}, "kind"),
        ({"kind": "value", "name": "a//b", "type": "None", "value": ""}, "name"),
        ({"kind": "value", "name": "/", "type": "None", "value": ""}, "name"),
        ({"kind": "value", "name": "%zz", "type": "None", "value": ""}, "name"),
        ({"kind": "value", "name": "%2e%2e", "type": "None", "value": ""}, "name"),
        ({"kind": "value", "name": "/".join("a" * 70), "type": "None", "value": ""}, "deep"),
    ],
)
def test_an_absurd_leaf_is_refused_before_anything_is_allocated(leaf, problem):
    body = {**content(), **body_of(leaf), "containers": {}}
    data = sealed(body)
    np.unique([0])  # its first call imports a megabyte of NumPy
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match=problem):
            parse(data, digest)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


VALUE = {"kind": "value", "name": "w", "type": "None", "value": ""}


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"root": "/etc"}, "root"),
        ({"root": ".."}, "root"),
        ({"root": "a/../../b"}, "root"),
        ({"root": "a//b"}, "root"),
        ({"root": "a/"}, "root"),
        ({"root": "a\\b"}, "root"),
        ({"root": "a\x00b"}, "root"),
        ({"root": "a?b"}, "root"),
        ({"codecs": ["gzip"]}, "codecs"),
        ({"codecs": ["crc32c", "crc32c"]}, "codecs"),
        ({"leaves": [VALUE, VALUE]}, "two leaves"),
        ({"leaves": [VALUE, {**VALUE, "name": "w/x"}]}, "a leaf and a container"),
        ({"leaves": [VALUE], "containers": {"w": "list"}}, "a leaf and a container"),
        ({"leaves": [{**VALUE, "name": "l/1"}], "containers": {"l": "list"}}, "list"),
        ({"leaves": [VALUE], "containers": {"n": "namedtuple:class:x"}}, "namedtuple"),
        ({"leaves": [VALUE], "containers": {"a//b": "list"}}, "name"),
        ({"leaves": [VALUE], "containers": {"/".join("a" * 70): "list"}}, "deep"),
    ],
)
def test_an_absurd_manifest_is_refused(fields, problem):
    body = {"leaves": [], "digests": "", **fields}
    with pytest.raises(ManifestError, match=problem):
        parse(sealed(body), digest)
    with pytest.raises(ManifestError, match=problem):
        encode(msgspec.convert(body, Manifest), digest)


def test_every_problem_is_listed():
    body = {
        "digests": "",
        "leaves": [tensor(shape=[1 << 60], chunk=[1]), {**VALUE, "name": "v", "type": "set"}],
        "codecs": ["gzip"],
    }
    with pytest.raises(ManifestError) as caught:
        parse(sealed(body), digest)
    assert len(caught.value.problems) == 3


MANY = range(3 * rules.MOST_FAULTS)


@pytest.mark.parametrize(
    "leaves",
    [
        [{**VALUE, "name": f"w{n}"} for n in MANY] * 2,
        [{**VALUE, "name": f"w{n}{below}"} for n in MANY for below in ("", "/x")],
        [{**VALUE, "name": f"a//b{n}"} for n in MANY],
        [{**VALUE, "name": f"v{n}", "type": "set"} for n in MANY],
    ],
    ids=["twice", "leaf and container", "names", "types"],
)
def test_of_many_problems_some_are_listed(leaves: list[dict[str, Any]]) -> None:
    """A million leaves can be wrong, and each problem takes memory."""
    with pytest.raises(ManifestError, match="format in 1,024 places or more\n") as caught:
        parse(sealed({"digests": "", "leaves": leaves}), digest)
    assert len(caught.value.problems) == rules.MOST_FAULTS
    assert len(str(caught.value).splitlines()) == 22
    assert "and 1004 more" in str(caught.value)


def test_a_name_that_many_leaves_have_is_listed_once() -> None:
    leaves = [VALUE] * 5000 + [{**VALUE, "name": "v"}] * 2
    with pytest.raises(ManifestError) as caught:
        parse(sealed({"digests": "", "leaves": leaves}), digest)
    faults = "w: two leaves have this name", "v: two leaves have this name"
    assert caught.value.problems == faults


def test_many_pieces_are_checked_quickly_and_in_little_memory():
    """Pieces that halve what is left, in 32 dimensions: 2**32 cells for 33 boxes."""
    rows, offset, shape = [], [0] * 32, [2] * 32
    for axis in range(32):
        shape[axis] = 1
        rows.append(piece(list(offset), list(shape)))
        offset[axis] = 1
    rows.append(piece(list(offset), list(shape)))
    whole = tensor(shape=[2] * 32, pieces=pieces(*rows, rank=32))
    assert parse(sealed(body_of(whole)), digest)
    broken = tensor(shape=[2] * 32, pieces=pieces(*rows[:-1], rank=32))
    with pytest.raises(ManifestError, match="gap"):
        parse(sealed(body_of(broken)), digest)


def test_leaves_that_are_cut_alike_share_their_pieces():
    rows = [piece([n], [1]) for n in range(1000)]
    leaves = [tensor(shape=[1000], pieces=pieces(*rows)) | {"name": f"w{n}"} for n in range(50)]
    manifest = parse(sealed(body_of(*leaves)), digest)
    shared = {id(leaf.pieces) for leaf in manifest.leaves if isinstance(leaf, TensorEntry)}
    assert len(shared) == 1
    stored = encode(manifest, digest)
    assert len(stored) < 50 * 100 + 3 * 8 * 1000 * 4 / 3 + 1000
    assert parse(stored, digest) == manifest


def test_pieces_beyond_the_limit_are_refused_before_they_are_looked_at(monkeypatch):
    monkeypatch.setattr(rules, "MAX_PIECES", 99)
    monkeypatch.setattr(manifest_pieces, "cover_fault", None)
    rows = [piece([n], [1]) for n in range(50)]
    leaves = [tensor(shape=[50], pieces=pieces(*rows)) | {"name": f"w{n}"} for n in range(2)]
    with pytest.raises(ManifestError, match=r"100 pieces.*w0 alone has 50.*; at most 99"):
        parse(sealed(body_of(*leaves)), digest)


def test_deep_nesting_is_refused():
    for deep in (b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        raw = b'{"leaves":[],"digests":"","user":' + deep + b"}"
        seal = digest(raw).hex().encode()
        data = b'{"format":"xckpt","version":1,"digest":"%s","checkpoint":%s}' % (seal, raw)
        with pytest.raises(ManifestError):
            parse(data, digest)


def test_a_value_without_a_writer_is_missed():
    planned = Metadata({"step": BytesStorageMetadata("int")})
    with pytest.raises(ManifestError, match="step: no rank has written"):
        complete(draft(planned), planned, {})


def test_a_manifest_says_no_defaults():
    body = content()
    always = {"leaves", "digests", "codecs", "containers", "user", "planner"}
    assert set(body) == always | {"zarr_json", "cuts"}
    assert body["leaves"][0] == {
        "kind": "tensor",
        "name": "model/regular",
        "dtype": "bfloat16",
        "shape": [8, 4],
        "chunk": [8, 4],
        "sharding": {"axes": [["dp", 2]], "placements": ["Shard(0)"]},
    }


def test_a_manifest_is_one_line_of_plain_json():
    parsed = json.loads(ENCODED)
    assert list(parsed) == ["format", "version", "digest", "checkpoint"]
    assert isinstance(example().leaves[-1], BytesEntry)
    assert isinstance(example().leaves[0], TensorEntry)
    assert b"\n" not in ENCODED
