"""What every sink owes; the formats' own tests have other libraries read what they wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xckpt
from tests.formats.arrays import check_source, filled
from tests.formats.sinks import boxes_of, specs_of, write, write_box
from xckpt.core.metadata import ChunkStorageMetadata
from xckpt.formats.dcp import sink as dcp_sink
from xckpt.formats.dcp.sink import DCPSink
from xckpt.formats.detect import open_source
from xckpt.formats.orbax import sink as orbax_sink
from xckpt.formats.orbax.sink import OrbaxSink
from xckpt.formats.safetensors.sink import SafetensorsSink
from xckpt.formats.sink import Contents, TensorSink

Open = Callable[..., TensorSink]

SINKS: dict[str, tuple[str, Open]] = {
    "one safetensors file": ("w.safetensors", SafetensorsSink),
    "safetensors files": ("model", partial(SafetensorsSink, max_shard_bytes=100)),
    "orbax": ("ckpt", OrbaxSink),
    "dcp": ("dcp", DCPSink),
}
"""Kind -> the output's name, and what opens a sink."""

ARRAYS = {
    "w.weight": np.arange(120, dtype=np.float32).reshape(12, 10),
    "b": filled("bfloat16", (3,)),
    "mask": np.array([True, False, True]),
    "scalar": np.array(3, np.int32),
    "zeros": np.zeros((5, 4, 3)),
    "empty": np.zeros((0, 3)),
}
VALUES: dict[str, Any] = {"step": 7, "rate": 0.5, "on": True, "name": "h\u00e9", "none": None}


@pytest.fixture(params=SINKS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Open]:
    """A format whose chunks are small enough for a tensor to have several."""
    monkeypatch.setattr(dcp_sink, "CHUNK_BYTES", 100)
    monkeypatch.setattr(orbax_sink, "CHUNK_BYTES", 100)
    return SINKS[request.param]


@pytest.fixture
def path(tmp_path: Path, kind: tuple[str, Open]) -> Path:
    return tmp_path / kind[0]


@pytest.fixture
def sink_to(kind: tuple[str, Open]) -> Open:
    return kind[1]


@pytest.mark.filterwarnings("ignore:.*DCP has no place for user metadata")
def test_boxes_in_any_order_and_some_twice(path: Path, sink_to: Open) -> None:
    sink = sink_to(path)
    assert isinstance(sink, TensorSink)
    sink.prepare(Contents(specs_of(ARRAYS), VALUES, {"by": "me"}))
    boxes = boxes_of(sink, ARRAYS, chunks_each=1)
    order = np.random.default_rng(0).permutation(len(boxes))
    for number in (*order, *order[:3]):
        name, box = boxes[number]
        write_box(sink, name, box, ARRAYS[name])
    assert not path.exists()
    sink.commit()
    source = open_source(path)
    check_source(source, ARRAYS)
    assert source.values == VALUES
    assert os.listdir(path.parent) == [path.name]


def test_bools_are_0_or_1(path: Path, sink_to: Open) -> None:
    """Memory may hold other bytes for them; readers take a 2 for anything."""
    raw = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    write(sink_to(path), {"mask": raw})
    check_source(open_source(path), {"mask": np.array([False, True, True, True])})


def test_another_process_attaches_and_goes_on(path: Path, sink_to: Open) -> None:
    specs = specs_of(ARRAYS)
    first = sink_to(path)
    token = first.prepare(Contents(specs, VALUES))
    boxes = boxes_of(first, ARRAYS)
    for name, box in boxes[::2]:
        write_box(first, name, box, ARRAYS[name])
    first.close()
    second = sink_to(path)
    assert second.prepare(Contents(specs, VALUES), attach=token) == token
    for name, box in boxes[1::2]:
        write_box(second, name, box, ARRAYS[name])
    assert not path.exists()
    second.commit()
    check_source(open_source(path), ARRAYS)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.filterwarnings("ignore:.*DCP has no place for user metadata")
def test_only_the_same_output_is_attached_to(path: Path, sink_to: Open) -> None:
    array = ARRAYS["w.weight"]
    specs = specs_of({"w": array})
    sink = sink_to(path)
    token = sink.prepare(Contents(specs, {"step": 7}, {"by": "me"}))
    others: list[tuple[Any, Any, Any, str]] = [
        (specs_of({"v": array}), {"step": 7}, {"by": "me"}, "other tensors"),
        (specs_of({"w": array[1:]}), {"step": 7}, {"by": "me"}, "other tensors"),
        (specs_of({"w": array, "b": array}), {"step": 7}, {"by": "me"}, "other tensors"),
        (specs, {"step": 8}, {"by": "me"}, "other tensors"),
        (specs, {"step": 7}, {"by": "you"}, "other tensors"),
    ]
    for *other, words in others:
        with pytest.raises(xckpt.NotACheckpointError, match=words):
            sink_to(path).prepare(Contents(*other), attach=token)
    for gone in ("0" * 12, f"../{token}"):
        with pytest.raises(xckpt.NotACheckpointError, match="start again"):
            sink_to(path).prepare(Contents(specs, {"step": 7}, {"by": "me"}), attach=gone)
    sink.abort()
    with pytest.raises(xckpt.NotACheckpointError, match="start again"):
        sink_to(path).prepare(Contents(specs, {"step": 7}, {"by": "me"}), attach=token)


def test_what_is_given_up_or_refused_leaves_nothing(
    path: Path, sink_to: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_to(path)
    sink.prepare(Contents(specs_of({"w": np.zeros(3)}), VALUES))
    sink.write("w", ChunkStorageMetadata((0,), (3,)), np.ones(3))
    assert os.listdir(path.parent) != []
    sink.abort()
    with pytest.raises(xckpt.UnsupportedLeafError, match=r"s: .* set") as caught:
        sink_to(path).prepare(Contents({}, {"s": {1}, "t": {2}}))
    assert len(caught.value.problems) == 2
    with pytest.raises(
        xckpt.UnsupportedLeafError,
        match=r"a/b: joined with dots, .* of a\.b|one name;.*\n.*a\.b: both a\.b and a/b",
    ):
        sink_to(path).prepare(Contents(specs_of({"a.b": np.zeros(3), "a/b": np.zeros(3)})))
    with pytest.raises(xckpt.StorageError, match="local"):
        sink_to("s3://bucket/w")
    refusing = sink_to(path)

    def full() -> None:
        raise xckpt.StorageError("no space is left")

    monkeypatch.setattr(refusing, "_open", full)
    with pytest.raises(xckpt.StorageError, match="no space"):
        refusing.prepare(Contents(specs_of({"w": np.zeros(3)}), VALUES))
    assert os.listdir(path.parent) == []


def test_an_output_of_the_format_is_replaced_with_leave(path: Path, sink_to: Open) -> None:
    write(sink_to(path), {"w": np.arange(3), "b": np.arange(2)})
    with pytest.raises(xckpt.CheckpointExistsError, match="overwrite=True"):
        write(sink_to(path), {"w": np.arange(9)})
    write(sink_to(path, overwrite=True), {"w": np.arange(9)})
    check_source(open_source(path), {"w": np.arange(9)})
    assert os.listdir(path.parent) == [path.name]


def test_nothing_else_is_replaced(path: Path, sink_to: Open) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(xckpt.CheckpointExistsError):
            write(sink_to(path, overwrite=overwrite), {"w": np.arange(3)})
    assert (path / "notes.txt").read_text() == "mine"
    assert os.listdir(path.parent) == [path.name]


def test_what_another_writer_made_meanwhile_is_kept(path: Path, sink_to: Open) -> None:
    late = sink_to(path)
    late.prepare(Contents(specs_of({"w": np.arange(3)})))
    late.write("w", ChunkStorageMetadata((0,), (3,)), np.arange(3))
    write(sink_to(path), {"w": np.arange(2)})
    with pytest.raises(xckpt.CheckpointExistsError, match="meanwhile"):
        late.commit()
    late.abort()
    check_source(open_source(path), {"w": np.arange(2)})
    assert os.listdir(path.parent) == [path.name]


def test_an_empty_folder_or_a_link_is_filled(tmp_path: Path, path: Path, sink_to: Open) -> None:
    """The link stays one."""
    (tmp_path / "elsewhere").mkdir()
    there = tmp_path / "elsewhere" / f"other-{path.name}"
    if path.suffix != ".safetensors":
        there.mkdir()
    path.symlink_to(there)
    write(sink_to(path), {"w": np.arange(3)})
    assert path.is_symlink() and there.exists()
    check_source(open_source(path), {"w": np.arange(3)})
    assert os.listdir(there.parent) == [there.name]
