"""Twins whose manifest is well sealed and wrong inside, as an attacker or a bad writer makes them.

`sealed_twins` edits the JSON of the manifest, computes the digest again, and so gets past the check
that the manifest is what was saved. Everything here must be refused for what it says: a field that
no reader knows, a gap, an overlap, a path that climbs out, a number that no memory can hold.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from conformance.twins.pieces import Row, cut_of, lengthened, rows_of
from conformance.twins.twins import Bar, Twin

__all__ = ["seal", "sealed_twins"]

Body = dict[str, Any]
Edit = Callable[[Body], object]
Digest = Callable[[bytes], str]

DEEP = 100_000


def seal(body: bytes, digest: str, *, version: object = 1, name: str = "xckpt") -> bytes:
    """The manifest with a body, spelled as writers do."""
    head = encoded({"format": name, "version": version, "digest": digest})
    return head[:-1] + b',"checkpoint":' + body + b"}"


def encoded(body: Body) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


def sealed_twins(checkpoint: Path, digest: Digest) -> Iterator[Twin]:
    """Every twin with an edited manifest that differs from the original and can be made of it."""
    raw = (checkpoint / "xckpt.json").read_bytes()
    own = json.loads(raw)["checkpoint"]
    for name, edit in {**_edits(), **_sizes(), **_names()}.items():
        body = copy.deepcopy(own)
        try:
            edit(body)
        except LookupError:
            continue  # the checkpoint has nothing of the kind
        if body != own:
            # Encoded when it is written: some bodies are large, and most twins are only counted.
            yield Twin(f"manifest: {name}", partial(_write_edited, own, edit, digest), Bar.REFUSE)
    yield from _heads(encoded(own), digest)
    yield from _texts(encoded(own), digest)
    yield from _with_digests(own, digest)
    yield from _climbing(own, digest)


def _twin(name: str, body: bytes, digest: Digest) -> Twin:
    return _document(name, seal(body, digest(body)))


def _document(name: str, content: bytes) -> Twin:
    return Twin(f"manifest: {name}", partial(_write, {"xckpt.json": content}), Bar.REFUSE)


def _write_edited(own: Body, edit: Edit, digest: Digest, checkpoint: Path) -> None:
    body = copy.deepcopy(own)
    edit(body)
    text = encoded(body)
    _write({"xckpt.json": seal(text, digest(text))}, checkpoint)


def _write(contents: dict[str, bytes], checkpoint: Path) -> None:
    for file, content in contents.items():
        (checkpoint / file).write_bytes(content)


def _first(body: Body, kind: str, has: str = "") -> dict[str, Any]:
    """The first leaf of a kind that has elements and a field."""
    for leaf in body["leaves"]:
        if leaf["kind"] == kind and 0 not in leaf.get("shape", ()) and (not has or has in leaf):
            return leaf
    raise LookupError(kind)


def _cut(body: Body) -> dict[str, Any]:
    """The pieces of the first leaf that has some."""
    return body["cuts"][_first(body, "tensor", "pieces")["pieces"]]


def _rows(edit: Callable[[list[Row]], object]) -> Edit:
    """An edit of pieces as rows."""

    def edited(body: Body) -> None:
        cut = _cut(body)
        rows = rows_of(cut)
        edit(rows)
        cut.update(cut_of(rows, cut["rank"]))

    return edited


def _tensor(body: Body) -> dict[str, Any]:
    return _first(body, "tensor", "chunk")


def _edits() -> dict[str, Edit]:
    """Contradictions and what the format does not know."""
    return {
        "an unknown field": lambda b: b.update(extra=1),
        "an unknown field of a leaf": lambda b: b["leaves"][0].update(extra=1),
        "an unknown field of a cut": lambda b: _cut(b).update(extra=1),
        "an unknown field of a sharding": lambda b: _first(b, "tensor", "sharding")[
            "sharding"
        ].update(extra=1),
        "an unknown kind of leaf": lambda b: b["leaves"][0].update(kind="pickle"),
        "a leaf without a name": lambda b: b["leaves"][0].pop("name"),
        "a leaf without a dtype": lambda b: _tensor(b).pop("dtype"),
        "a leaf that is null": lambda b: b["leaves"].append(None),
        "no leaves": lambda b: b.pop("leaves"),
        "no digests": lambda b: b.pop("digests"),
        "empty digests": lambda b: b.update(digests=""),
        "digests in capitals": lambda b: b.update(digests=b["digests"].upper() + " "),
        "a name twice": lambda b: b["leaves"].append(b["leaves"][0]),
        "a leaf left out": lambda b: b["leaves"].remove(_tensor(b)),
        "leaves reversed": _reverse,
        "two names exchanged": _exchange_names,
        "neither chunk nor pieces": lambda b: _tensor(b).pop("chunk"),
        "chunk and pieces": lambda b: _first(b, "tensor", "pieces").update(chunk=[1, 1]),
        "an unknown dtype": lambda b: _tensor(b).update(dtype="float31"),
        "an object dtype": lambda b: _tensor(b).update(dtype="object"),
        "a dtype of the same size": _same_size,
        "axes swapped": _swap_axes,
        "an unknown codec": lambda b: b.update(codecs=["gzip"]),
        "the other codecs": lambda b: (
            b["leaves"][_has_tensor(b)] and b.update(codecs=[] if b.get("codecs") else ["crc32c"])
        ),
        "shape as text": lambda b: _tensor(b).update(shape="8"),
        "shape of fractions": lambda b: _tensor(b).update(shape=[8.5]),
        "a gap": _rows(lambda rows: rows.pop()),
        "an overlap": _rows(lambda rows: rows.append(rows[0])),
        "a piece moved": _rows(lambda rows: rows[1].update(offset=rows[0]["offset"])),
        "a piece outside": _rows(lambda rows: rows[0]["offset"].__setitem__(0, 1 << 40)),
        "a piece at the last number": _rows(
            lambda rows: rows[0]["offset"].__setitem__(0, (1 << 63) - 1)
        ),
        "a piece before the beginning": _rows(lambda rows: rows[0]["offset"].__setitem__(0, -1)),
        "a piece of negative size": _rows(lambda rows: rows[0]["shape"].__setitem__(0, -1)),
        "a piece in chunks of nothing": _rows(lambda rows: rows[0]["chunk"].__setitem__(0, 0)),
        "a piece in absurd chunks": _rows(
            lambda rows: rows[0].update(chunk=[1 << 62] * len(rows[0]["chunk"]))
        ),
        "a column left out": lambda b: _cut(b).pop("chunk"),
        "a column cut short": lambda b: _cut(b).update(shape=_cut(b)["shape"][:-12]),
        "a column that is no base64": lambda b: _cut(b).update(shape="*" + _cut(b)["shape"][1:]),
        "an empty cut": lambda b: _cut(b).update(cut_of([], 1) | {"rank": _cut(b)["rank"]}),
        "a cut of no dimensions": lambda b: _cut(b).update(rank=0),
        "a cut of fewer than no dimensions": lambda b: _cut(b).update(rank=-1),
        "a cut that is not there": lambda b: _first(b, "tensor", "pieces").update(
            pieces=len(b["cuts"])
        ),
        "a cut before the first": lambda b: _first(b, "tensor", "pieces").update(pieces=-1),
        "no cuts": lambda b: b.pop("cuts"),
        "pieces of another rank": lambda b: _cut(b).update(rank=_cut(b)["rank"] + 1),
        "two pieces exchanged": _rows(lambda rows: rows.reverse()),
        "an unknown type of value": lambda b: _first(b, "value").update(type="function"),
        "an int that is none": lambda b: _first(b, "value").update(type="int", value="zz"),
        "a bool that is none": lambda b: _first(b, "value").update(type="bool", value="perhaps"),
        "bytes that are none": lambda b: _first(b, "value").update(type="bytes", value="*"),
        "a complex that is none": lambda b: _first(b, "value").update(type="complex", value="1"),
        "a namedtuple with code": lambda b: b.update(
            containers={"": "namedtuple:__import__('os'):x"}
        ),
        "a list with other keys": lambda b: b["leaves"][0] and b.update(containers={"": "list"}),
        "a container below a leaf": lambda b: b.update(
            containers={f"{b['leaves'][0]['name']}/x": "dict"}
        ),
        "containers that are a list": lambda b: b.update(containers=[1]),
    }


def _has_tensor(body: Body) -> int:
    return body["leaves"].index(_first(body, "tensor"))


def _reverse(body: Body) -> None:
    """Digests are counted in the order of the leaves."""
    if len([leaf for leaf in body["leaves"] if leaf["kind"] == "tensor"]) < 2:
        raise LookupError
    if len({json.dumps({**leaf, "name": ""}) for leaf in body["leaves"]}) < 2:
        raise LookupError
    body["leaves"].reverse()


def _exchange_names(body: Body) -> None:
    tensors = [leaf for leaf in body["leaves"] if leaf["kind"] == "tensor"]
    if len(tensors) < 2:
        raise LookupError
    one, other = tensors[:2]
    one["name"], other["name"] = other["name"], one["name"]


def _same_size(body: Body) -> None:
    leaf = _tensor(body)
    leaf["dtype"] = {"float32": "int32", "int16": "uint16", "uint8": "int8", "bool": "int8"}[
        leaf["dtype"]
    ]


def _swap_axes(body: Body) -> None:
    leaf = _tensor(body)
    leaf["shape"], leaf["chunk"] = leaf["shape"][::-1], leaf["chunk"][::-1]


def _sizes() -> dict[str, Edit]:
    """Numbers that no memory can hold, and numbers that are none."""

    def tensor(**fields: object) -> Edit:
        return lambda b: _tensor(b).update(fields)

    def long(**fields: object) -> Edit:
        return lambda b: _first(b, "bytes").update(fields)

    return {
        "2^60 elements": tensor(shape=[1 << 60], chunk=[1 << 20]),
        "2^62 x 2^62 elements": tensor(shape=[1 << 62, 1 << 62], chunk=[1, 1]),
        "more than 64 bits": tensor(shape=[1 << 64], chunk=[1]),
        "no elements in absurd dimensions": tensor(shape=[0, 1 << 62], chunk=[1, 1]),
        "2^50 elements in chunks of one": tensor(shape=[1 << 50], chunk=[1]),
        "2^31 elements in chunks of one": tensor(shape=[1 << 31], chunk=[1]),
        "2^40 elements": tensor(shape=[1 << 40], chunk=[1 << 28]),
        "a chunk of 2^40 elements": tensor(chunk=[1 << 40]),
        "a chunk of no elements": tensor(chunk=[0, 0]),
        "a negative chunk": tensor(chunk=[-1, -1]),
        "a negative shape": tensor(shape=[-4, -4]),
        "a shard that is no multiple": lambda b: _tensor(b).update(
            shard=[n * 2 + 1 for n in _tensor(b)["chunk"][:1]] + _tensor(b)["chunk"][1:]
        ),
        "a shard of absurd size": lambda b: _tensor(b).update(
            shard=[n << 40 for n in _tensor(b)["chunk"]] or [1]
        ),
        "33 dimensions": tensor(shape=[1] * 33, chunk=[1] * 33),
        "100,000 dimensions": tensor(shape=[1] * DEEP, chunk=[1] * DEEP),
        "a value of 2^50 bytes": long(size=1 << 50, chunk=1 << 32),
        "a value of 2^62 bytes": long(size=1 << 62, chunk=1),
        "a value of negative size": long(size=-1),
        "a value in chunks of nothing": long(chunk=0),
        "100,000 pieces": lambda b: _cut(b).update(lengthened(_cut(b), DEEP)),
        "25 million pieces": _very_many_pieces,
        "100,000 leaves of one name": lambda b: b.update(leaves=[b["leaves"][0]] * DEEP),
        "20,000 absurd leaves": _absurd_leaves,
    }


def _absurd_leaves(body: Body) -> None:
    absurd = {**_tensor(body), "shape": [1 << 55], "chunk": [1 << 30]}
    body["leaves"] = [{**absurd, "name": f"x{number}"} for number in range(20_000)]


def _very_many_pieces(body: Body) -> None:
    """5,000 leaves that share 5,000 pieces: more than there may be, in few bytes."""
    leaf = _first(body, "tensor", "pieces")
    _cut(body).update(lengthened(_cut(body), 5000))
    body["leaves"] = [{**leaf, "name": f"p{number}"} for number in range(5000)]


def _names() -> dict[str, Edit]:
    """Names and roots that lead elsewhere, or nowhere."""

    def named(name: str) -> Edit:
        return lambda b: _tensor(b).update(name=name)

    names = {
        "..": "..", "../x": "../decoy", "/etc/passwd": "/etc/passwd", "a//b": "a//b", "a/": "a/",
        "%2E%2E": "%2E%2E", "backslashes": "..\\..\\x", "NUL": "a\0b", "wrong escape": "%zz",
        "lower-case escape": "a%2fb", "an int with zeros": "x/%300",
        "a deep name": "/".join("a" * 5000),
        "a long name": "n" * 1_000_000, "a surrogate": "\ud800",
    }  # fmt: skip
    roots = {
        "..": "..", "../decoy": "../decoy", "/": "/", "/tmp": "/tmp", "inside and out": "a/../..",
        ".": ".", "a//b": "a//b", "a home": "~", "a URL": "memory://golden", "a NUL": "a\0",
        "elsewhere": "elsewhere", "a backslash": "..\\decoy", "a line's end": "..\n",
    }  # fmt: skip
    found = {f"named {label}": named(name) for label, name in names.items()}
    for label, root in roots.items():
        found[f"the root {label}"] = lambda b, root=root: (
            b["leaves"][_has_tensor(b)] and b.update(root=root)
        )
    return found


def _heads(body: bytes, digest: Digest) -> Iterator[Twin]:
    """Other versions and formats, and wrong digests, around the right body."""
    own = digest(body)
    for version in (2, 10**9, 0, -1, "1", 1.5, None, True, 1 << 80):
        yield _document(f"version {version!r}", seal(body, own, version=version))
    for name in ("zarr", "", "xckpt2", "XCKPT"):
        yield _document(f"format {name!r}", seal(body, own, name=name))
    yield _document("no digest", seal(body, ""))
    yield _document("a digest in capitals", seal(body, own.upper() if own.upper() != own else "F"))
    yield _document("the digest of something else", seal(body, digest(body + b" ")))
    yield _document("an unknown field around", seal(body, own)[:-1] + b',"more":1}')
    yield _document("two bodies", seal(body, own)[:-1] + b',"checkpoint":{}}')
    yield _document("twice", seal(body, own) * 2)


def _texts(body: bytes, digest: Digest) -> Iterator[Twin]:
    """Bodies that no encoder writes, under the right digest."""
    for name, text in {
        "user metadata nested deep": body[:-1] + b',"user":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "planner data nested deep": body[:-1] + b',"planner":' + b'{"a":' * DEEP + b"1"
        + b"}" * DEEP + b"}",
        "containers a thousand deep": body[:-1] + b',"containers":{"' + b"/".join([b"x"] * 1000)
        + b'":"list"}}',
        "a body that is a list": b"[]",
        "a body that is null": b"null",
        "a body that is a number": b"1e999",
        "a field twice": b'{"digests":"",' + body[1:],
        "a field twice, once as a number": b'{"digests":1,' + body[1:],
        "a field twice, spelled otherwise": b'{"\\u0064igests":"",' + body[1:],
        "a name twice in user metadata": body[:-1] + b',"user":{"a":[{"b":1,"b":2}]}}',
        "no UTF-8": body.replace(b'"leaves"', b'"le\xffves"'),
    }.items():  # fmt: skip
        yield _twin(name, text, digest)


def _with_digests(own: Body, digest: Digest) -> Iterator[Twin]:
    """Absurd sizes for which as many digests are there: only the chunks are missing."""
    for name, kind, fields, chunks in (
        ("2^40 elements", "tensor", {"shape": [1 << 40], "chunk": [1 << 28]}, 1 << 12),
        ("2^45 bytes", "bytes", {"size": 1 << 45, "chunk": 1 << 32}, 1 << 13),
    ):
        body = copy.deepcopy(own)
        try:
            leaf = _first(body, kind, "chunk")
        except LookupError:
            continue
        # Alone, so that nothing else is missed before it.
        body.update(leaves=[{**leaf, **fields}], containers={})
        yield _sealed_with(f"{name}, with digests", body, bytes(16 * chunks), digest)


def _sealed_with(name: str, body: Body, digests: bytes, digest: Digest) -> Twin:
    body = {**body, "digests": digest(digests)}
    text = encoded(body)
    root = f"{body['root']}/" if body.get("root") else ""
    contents = {"xckpt.json": seal(text, digest(text)), f"{root}xckpt.digests": digests}
    return Twin(f"manifest: {name}", partial(_write, contents), Bar.REFUSE)


def _climbing(own: Body, digest: Digest) -> Iterator[Twin]:
    """A root outside the checkpoint, where a whole copy of it waits."""
    if not any(leaf["kind"] != "value" for leaf in own["leaves"]):
        return
    inner = f"/{own['root']}" if own.get("root") else ""
    for root in (f"../decoy{inner}", f"a/../../decoy{inner}", f"./../decoy{inner}"):
        text = encoded({**own, "root": root})
        manifest = seal(text, digest(text))
        damage = partial(_leave_decoy, manifest)
        yield Twin(f"manifest: the root {root}, which exists", damage, Bar.REFUSE)


def _leave_decoy(manifest: bytes, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, checkpoint.parent / "decoy")
    (checkpoint / "xckpt.json").write_bytes(manifest)
