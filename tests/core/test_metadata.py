"""The words that planner, storage and user share."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import msgspec
import pytest

import xckpt.metadata
from xckpt.core import metadata as core
from xckpt.core.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Sharding,
    TensorProperties,
    TensorStorageMetadata,
)


def test_an_index_is_equal_by_name_and_offset():
    """The number is a hint, as it is in torch's protocol."""
    index = MetadataIndex("wte", (0, 8), 3)
    assert index == MetadataIndex("wte", (0, 8)) and hash(index) == hash(
        MetadataIndex("wte", (0, 8))
    )
    assert index != MetadataIndex("wte", (0, 0), 3) and index != MetadataIndex("wpe", (0, 8), 3)
    assert MetadataIndex("step") == MetadataIndex(fqn="step", offset=None, index=None)


@pytest.mark.parametrize(
    "value",
    [
        ChunkStorageMetadata(offsets=(0, 0), sizes=(4, 64)),
        TensorProperties(dtype="bfloat16"),
        MetadataIndex("w"),
        BytesStorageMetadata("int"),
        TensorStorageMetadata(TensorProperties("int8"), (), []),
        Metadata({}),
    ],
)
def test_values_do_not_change(value):
    field = next(iter(value.__slots__))
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, None)
    with pytest.raises((AttributeError, TypeError)):
        value.surprise = 1


@pytest.mark.parametrize(
    "sharding, text",
    [
        (Sharding((("x", 8),), spec=(("x",), ())), "PartitionSpec(x, -) on x=8"),
        (Sharding((("x", 8),), spec=()), "PartitionSpec() on x=8"),
        (Sharding((("d", 2), ("m", 4)), spec=(("d", "m"),)), "PartitionSpec(d+m) on d=2 x m=4"),
        (Sharding((("d", 2),), placements=("Shard(0)",)), "Shard(0) on d=2"),
    ],
)
def test_a_sharding_reads_as_its_framework_says_it(sharding, text):
    assert str(sharding) == text
    assert msgspec.json.decode(msgspec.json.encode(sharding), type=Sharding) == sharding
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sharding), type=Sharding) == sharding


def test_a_sharding_rejects_what_it_does_not_know():
    with pytest.raises(msgspec.ValidationError, match="mesh"):
        msgspec.json.decode(b'{"axes":[["x",8]],"mesh":1}', type=Sharding)


def test_the_public_names_are_the_same_types():
    for name in xckpt.metadata.__all__:
        assert getattr(xckpt.metadata, name) is getattr(core, name)
