"""``.metadata`` of every torch since 2.2 are read; the oracle is what torch's own classes say.

Older torch is not at hand, so its pickles are made of today's: the same objects without the fields
that it lacked, under the names that it gave.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.examples import examples
from tests.torch.dcp.folders import save_alone
from xckpt.errors import (
    ManifestError,
    PlanError,
    UnsafePickleError,
    UnsupportedLeafError,
)
from xckpt.formats.dcp import metadata as pickled_metadata
from xckpt.formats.dcp.metadata import DCPMetadata, parse
from xckpt.formats.torch_save.archive import Where


def written(tmp_path: Path) -> Metadata:
    """What torch says of a small state."""
    state = {
        "model": {"w": torch.ones(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)},
        "list": [torch.zeros(()), {"x": torch.zeros(0, 2)}],
        "lr": 0.1,
    }
    folder = save_alone(state, tmp_path / "dcp")
    return pickle.loads((folder / ".metadata").read_bytes())


def check(found: DCPMetadata, torchs: Metadata) -> None:
    """Both say the same."""
    assert found.order == tuple(torchs.state_dict_metadata)
    assert found.paths == torchs.planner_data
    for name, entry in torchs.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = torchs.storage_data[MetadataIndex(name)]
            assert found.objects[name] == Where(info.relative_path, info.offset, info.length)
            continue
        tensor = found.tensors[name]
        assert (f"torch.{tensor.dtype}", tensor.shape) == (
            str(entry.properties.dtype),
            tuple(entry.size),
        )
        chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
        assert [(b.offsets, b.sizes) for b in tensor.boxes] == [
            (tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks
        ]
        for place, chunk in zip(tensor.places, chunks, strict=True):
            info = torchs.storage_data[MetadataIndex(name, chunk.offsets)]
            assert place == Where(info.relative_path, info.offset, info.length)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    torchs = written(tmp_path)
    check(parse(pickle.dumps(torchs, protocol)), torchs)


METADATA = b"torch.distributed.checkpoint.metadata"
SHARDED = b"torch.distributed._shard.sharded_tensor.metadata"


def of_torch_2_2(data: bytes) -> bytes:
    """Under the names of the classes that torch 2.2 used; protocol 2 spells names out."""
    data = data.replace(METADATA + b"\nTensorProperties\n", SHARDED + b"\nTensorProperties\n")
    return data.replace(
        METADATA + b"\n_MEM_FORMAT_ENCODING\n", SHARDED + b"\nMEM_FORMAT_ENCODING\n"
    )


def test_torch_2_2(tmp_path: Path) -> None:
    torchs = written(tmp_path)
    old = Metadata(torchs.state_dict_metadata, torchs.planner_data, torchs.storage_data)
    for field in ("storage_meta", "version"):
        del old.__dict__[field]
    data = of_torch_2_2(pickle.dumps(old, 2))
    assert SHARDED in data and b"StorageMeta\n" not in data
    check(parse(data), torchs)


@pytest.mark.parametrize("fields", [["version"], ["storage_meta"], []], ids=str)
def test_fields_that_came_later(fields: list[str], tmp_path: Path) -> None:
    torchs = written(tmp_path)
    for field in fields:
        del torchs.__dict__[field]
    check(parse(pickle.dumps(torchs)), torchs)


def test_enums_as_python_3_11_0_pickled_them(tmp_path: Path) -> None:
    torchs = written(tmp_path)

    class Pickler(pickle._Pickler):  # type: ignore[name-defined, attr-defined]
        def reducer_override(self, obj: Any) -> Any:
            return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented

    stream = io.BytesIO()
    Pickler(stream, 4).dump(torchs)
    assert b"getattr" in stream.getvalue()
    check(parse(stream.getvalue()), torchs)


@pytest.mark.parametrize("path", [Path("/a/b"), "/a/b", PurePosixPath("c"), None], ids=repr)
def test_where_it_was_written_to_does_not_matter(path: Any, tmp_path: Path) -> None:
    torchs = written(tmp_path)
    assert torchs.storage_meta is not None
    torchs.storage_meta.checkpoint_id = path
    torchs.storage_meta.modules = ["a", "b"]
    check(parse(pickle.dumps(torchs)), torchs)


@examples(30)
@given(
    names=st.dictionaries(
        st.text(min_size=1),
        st.lists(st.text() | st.integers(0, 9), min_size=1).map(tuple),
        min_size=1,
        max_size=5,
    ),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    columns=st.integers(0, 3),
)
def test_any_names_and_chunks(
    names: dict[str, tuple[str | int, ...]], rows: list[int], columns: int
) -> None:
    starts = [sum(rows[:n]) for n in range(len(rows))]
    chunks = [
        ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([n, columns]))
        for a, n in zip(starts, rows, strict=True)
    ]
    described = TensorStorageMetadata(
        TensorProperties(torch.int16), torch.Size([sum(rows), columns]), chunks
    )
    info = dcp.filesystem._StorageInfo  # type: ignore[attr-defined]
    places = {
        MetadataIndex(name, [a, 0], n): info(f"{n}.distcp", a, columns + a)
        for name in names
        for n, a in enumerate(starts)
        if rows[n] or a not in [s for m, s in enumerate(starts) if rows[m]]
    }
    torchs = Metadata(dict.fromkeys(names, described), names, places)
    check(parse(pickle.dumps(torchs)), torchs)


# What is refused.


def refused(change: Callable[[Metadata], object], tmp_path: Path) -> bytes:
    torchs = written(tmp_path)
    change(torchs)
    return pickle.dumps(torchs)


class Foreign:
    """A class of another package's planner."""


PLACES: dict[str, Callable[[Metadata], object]] = {
    "planner_data": lambda m: setattr(m, "planner_data", Foreign()),
    "in planner_data": lambda m: m.planner_data.update(x=[Foreign()]),
    "entry": lambda m: m.state_dict_metadata.update(x=cast(Any, Foreign())),
    "storage_data": lambda m: setattr(m, "storage_data", Foreign()),
    "storage info": lambda m: m.storage_data.update({MetadataIndex("lr"): Foreign()}),
    "storage_meta": lambda m: setattr(m, "storage_meta", Foreign()),
    "path": lambda m: setattr(m.storage_meta, "checkpoint_id", Foreign()),
    "version": lambda m: setattr(m, "version", Foreign()),
    "a field of its own": lambda m: m.__dict__.update(extra=Foreign()),
}


@pytest.mark.parametrize("place", PLACES)
def test_foreign_classes_are_refused_by_name_wherever_they_stand(
    place: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsafePickleError, match="Foreign"):
        parse(refused(PLACES[place], tmp_path))


def tensor_of(metadata: Metadata) -> TensorStorageMetadata:
    return cast(TensorStorageMetadata, metadata.state_dict_metadata["model.w"])


def w_info(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("model.w", [0, 0])]


WRONG: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "no entries": (lambda m: setattr(m, "state_dict_metadata", None), "not a dict of names"),
    "int names": (
        lambda m: m.state_dict_metadata.update(cast(Any, {1: None})),
        "not a dict of names",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), "FileSystemWriter"),
    "no such entry": (lambda m: m.state_dict_metadata.update(x=cast(Any, 3)), "x: an int stands"),
    "no place": (
        lambda m: m.storage_data.pop(MetadataIndex("lr")),
        "lr: its storage_data does not say where it",
    ),
    "no chunk's place": (
        lambda m: m.storage_data.pop(MetadataIndex("model.w", [0, 0])),
        r"model.w: its storage_data does not say where its chunk at \(0, 0\)",
    ),
    "negative offset": (lambda m: setattr(w_info(m), "offset", -1), "file and a range"),
    "absurd length": (lambda m: setattr(w_info(m), "length", 1 << 80), "file and a range"),
    "no path": (lambda m: setattr(w_info(m), "relative_path", 3), "file and a range"),
    "index": (
        lambda m: m.storage_data.update({MetadataIndex(cast(str, 3)): w_info(m)}),
        "has no name",
    ),
    "negative size": (lambda m: setattr(tensor_of(m), "size", (-1, 3)), "without a size"),
    "list for a size": (lambda m: setattr(tensor_of(m), "size", [2, 3]), "without a size"),
    "absurd shape": (
        lambda m: setattr(tensor_of(m), "size", torch.Size([1 << 40, 1 << 40])),
        "absurd shape",
    ),
    "absurd shape of nothing": (
        lambda m: setattr(tensor_of(m), "size", torch.Size([1 << 40, 1 << 40, 0])),
        "absurd shape",
    ),
    "absurd rank": (
        lambda m: setattr(tensor_of(m), "size", torch.Size([1] * 40)),
        "absurd shape, of 40 dimensions",
    ),
    "no chunks": (lambda m: setattr(tensor_of(m), "chunks", None), "without a size or chunks"),
    "rank of a chunk": (
        lambda m: setattr(tensor_of(m).chunks[0], "sizes", torch.Size([2])),
        "do not fit its shape",
    ),
    "no properties": (lambda m: setattr(tensor_of(m), "properties", None), "without properties"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_torch_does_not_write_is_refused(what: str, tmp_path: Path) -> None:
    change, words = WRONG[what]
    with pytest.raises(ManifestError, match=words):
        parse(refused(change, tmp_path))


def test_other_layouts_and_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        tensor_of(metadata).properties.dtype = torch.complex32
        entry = cast(TensorStorageMetadata, metadata.state_dict_metadata["model.b"])
        entry.properties.layout = torch.sparse_coo

    with pytest.raises(UnsupportedLeafError) as caught:
        parse(refused(change, tmp_path))
    assert caught.value.problems == (
        "model.w: dtype complex32, which the format lacks",
        "model.b: a tensor of layout torch.sparse_coo",
    )


def test_all_gaps_are_reported(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        tensor_of(metadata).size = torch.Size([4, 3])
        cast(TensorStorageMetadata, metadata.state_dict_metadata["model.b"]).chunks.clear()

    with pytest.raises(PlanError) as caught:
        parse(refused(change, tmp_path))
    assert caught.value.problems == (
        "model.w: [2, 4) x [0, 3) is in no chunk",
        "model.b: [0, 3) is in no chunk",
    )


def test_truncated_metadata_are_refused(tmp_path: Path) -> None:
    data = pickle.dumps(written(tmp_path))
    for length in range(0, len(data), 7):
        with pytest.raises(ManifestError):
            parse(data[:length])


def test_absurdly_long_metadata_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(written(tmp_path))
    monkeypatch.setattr(pickled_metadata, "MAX_BYTES", len(data))
    parse(data)
    with pytest.raises(ManifestError, match="at most"):
        parse(data + b"x")


def test_another_pickle_is_refused() -> None:
    for value in (None, [], {"a": 1}, torch.Size([1])):
        with pytest.raises(ManifestError, match="where a Metadata belongs"):
            parse(pickle.dumps(value))


def test_entries_that_were_transformed_by_anything_are_refused_by_name(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        w_info(metadata).transform_descriptors = [10**5000, "zstd"]

    with pytest.raises(UnsupportedLeafError, match=r"model\.w: .* the extension int, zstd; load"):
        parse(refused(change, tmp_path))
