"""Headers: what we write is what the library reads, what it writes we read, and damage is named."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

import xckpt
from tests.support.tilings import shapes
from xckpt.core.dtypes import item_size
from xckpt.formats.safetensors import header as safetensors_header
from xckpt.formats.safetensors.header import (
    MAX_HEADER_BYTES,
    NAMES,
    TensorSpan,
    check_tensors,
    header_length,
    lay_out,
    parse_header,
)

TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.tuples(st.sampled_from(sorted(NAMES.values())), shapes(max_rank=3)),
    max_size=6,
)
TEXTS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text(st.characters(exclude_categories=["Cs"])),
    max_size=3,
)


@given(TENSORS, TEXTS)
def test_the_library_reads_what_we_lay_out(
    tensors: dict[str, tuple[str, tuple[int, ...]]], texts: dict[str, str]
) -> None:
    tensors.pop("__metadata__", None)
    first, header = lay_out(tensors, texts)
    assert parse_header(first[8:], header.size) == header
    assert header_length(first, header.size) == len(first) - 8
    assert len(first) % 8 == 0
    assert all(p.start % item_size(p.dtype) == 0 for p in header.places.values())
    found = dict(safetensors.deserialize(first + bytes(header.size - len(first))))
    assert {name: (NAMES[t["dtype"]], tuple(t["shape"])) for name, t in found.items()} == tensors


def written(header: object, size: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def parsed(data: bytes) -> Mapping[str, TensorSpan]:
    length = header_length(data[:8], len(data))
    return parse_header(data[8 : 8 + length], len(data)).places


def entry(start: int, stop: int, dtype: str = "F32", shape: list[int] | None = None) -> dict:
    size = item_size(NAMES[dtype])
    counts = [(stop - start) // size] if shape is None else shape
    return {"dtype": dtype, "shape": counts, "data_offsets": [start, stop]}


DAMAGE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "has only 0 bytes"),
    "seven bytes": (bytes(7), "has only 7 bytes"),
    "a huge header": (struct.pack("<Q", 1 << 62) + b"{}", "4,611,686,018,427,387,904 bytes"),
    "just too long": (struct.pack("<Q", MAX_HEADER_BYTES + 1), "at most 100,000,000"),
    "a header beyond the file": (struct.pack("<Q", 100) + b"{}", "the whole file 10"),
    "no JSON": (written(b"hello"), "damaged"),
    "half of it": (written(b'{"w": {"dtype"'), "damaged"),
    "no UTF-8": (written(b'{"\xff": 1}'), "damaged"),
    "a list": (written([]), "not a JSON object"),
    "space first": (written(b" {}"), "not a JSON object"),
    "nested": (written(b'{"a":' * 100_000), "damaged"),
    "NaN": (written(b'{"w": NaN}'), "NaN is not a number"),
    "a key twice": (written(b'{"w": 1, "w": 2}'), "'w' is in it twice"),
    "a field twice": (written(b'{"w": {"dtype": "F32", "dtype": "F32"}}'), "twice"),
    "metadata of numbers": (written({"__metadata__": {"a": 1}}), "does not map names to texts"),
    "metadata that are none": (written({"__metadata__": "hello"}), "does not map"),
    "no entry": (written({"w": 1}), "w: Expected `object`"),
    "a field too many": (written({"w": {**entry(0, 4), "hello": 1}}, 4), "w: Object contains unkn"),
    "a field too few": (written({"w": {"dtype": "F32", "shape": []}}, 4), "`data_offsets`"),
    "a dtype that is none": (written({"w": {**entry(0, 4), "dtype": 1}}, 4), "`$.dtype`"),
    "a size below 0": (written({"w": entry(0, 4, shape=[-1])}, 4), "`int` >= 0 - at `$.shape[0]`"),
    "a size that is none": (written({"w": {**entry(0, 4), "shape": [True]}}, 4), "got `bool` - at"),
    "a size of 1.0": (written({"w": {**entry(0, 4), "shape": [1.0]}}, 4), "got `float` - at"),
    "a product beyond all": (written({"w": entry(0, 4, shape=[1 << 40] * 3)}, 4), "w: shape ("),
    "a size beyond all": (written({"w": entry(0, 4, shape=[1 << 63])}, 4), "at `$.shape[0]`"),
    "a product beyond all, of nothing": (
        written({"w": entry(0, 0, shape=[1 << 40, 1 << 40, 0])}),
        "w: shape (1099511627776, 1099511627776, 0) is more than",
    ),
    "a giant": (written({"w": entry(0, 4, shape=[1 << 60])}, 4), "w: impossible shape"),
    "33 dimensions": (written({"w": entry(0, 4, shape=[1] * 33)}, 4), "length <= 32 - at `$.shape"),
    "digits without end": (written(b'{"w": ' + b"9" * 10_000 + b"}"), "damaged"),
    "offsets below 0": (written({"w": entry(-4, 0)}, 4), "`int` >= 0 - at `$.data_offsets[0]`"),
    "offsets backwards": (written({"w": entry(4, 0, shape=[1])}, 4), "its range [4, 0) has -4"),
    "three offsets": (
        written({"w": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, 4),
        "w: Expected `array` of length 2, got 3 - at `$.data_offsets`",
    ),
    "another length": (written({"w": entry(0, 8, shape=[3])}, 8), "takes 12 bytes, but its range"),
    "an overlap": (
        written({"v": entry(0, 8), "w": entry(4, 12)}, 12),
        "w: its bytes [4, 12) overl",
    ),
    "one inside": (
        written({"v": entry(0, 16), "w": entry(4, 8)}, 16),
        "w: its bytes [4, 8) overlap",
    ),
    "a gap": (written({"v": entry(0, 8), "w": entry(12, 16)}, 16), "w: bytes [8, 12) before it"),
    "a gap at the start": (written({"w": entry(4, 8)}, 8), "w: bytes [0, 4) before it"),
    "more bytes": (written({"w": entry(0, 4)}, 6), "[4, 6) at the end of the file"),
    "truncated": (written({"w": entry(0, 4)}, 3), "w: truncated"),
    "half a character": (written({"\ud800": entry(0, 4)}, 4), "half a character"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str) -> None:
    data, words = DAMAGE[damage]
    with pytest.raises(xckpt.ManifestError) as caught:
        parsed(data)
    assert words in str(caught.value)


def test_all_faults_at_once() -> None:
    header = {"a": entry(4, 8), "b": entry(6, 10), "c": 1, "d": entry(20, 24, shape=[2])}
    with pytest.raises(xckpt.ManifestError) as caught:
        parsed(written(header, 24))
    assert [line.partition(":")[0] for line in caught.value.problems] == ["c", "d", "a", "b", "d"]


@pytest.mark.parametrize(
    "dtype, words", [("F4", "packs"), ("F6_E2M3", "packs"), ("F99", "unknown")]
)
def test_foreign_dtypes_are_refused_by_name(dtype: str, words: str) -> None:
    header = {"dtype": dtype, "shape": [2], "data_offsets": [0, 1]}
    with pytest.raises(xckpt.UnsupportedLeafError, match=f"w: .*{dtype}.*{words}"):
        parsed(written({"w": header}, 1))


def test_what_cannot_be_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": ("int4", (2,)), "__metadata__": ("int8", ()), "\ud800": ("int8", ())}
    with pytest.raises(xckpt.UnsupportedLeafError) as caught:
        check_tensors({**tensors, "b": ("complex128", (1,))})
    assert len(caught.value.problems) == 4
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(xckpt.ManifestError, match="write several files"):
        lay_out({"w" * 100 + str(n): ("int8", ()) for n in range(11)}, {})


GOOD = written({"a.weight": entry(0, 8), "b": entry(8, 10, "BF16"), "c": entry(10, 10, "U8")}, 10)


@given(st.integers(0, len(GOOD) - 11), st.integers(1, 255))
def test_an_altered_byte_is_refused_or_harmless(at: int, change: int) -> None:
    """Nothing but our errors; what is still read fits the file, and the library agrees on it."""
    data = bytearray(GOOD)
    data[at] ^= change
    try:
        places = parsed(bytes(data))
    except (xckpt.ManifestError, xckpt.UnsupportedLeafError):
        return
    assert sum(prod(p.shape) * item_size(p.dtype) for p in places.values()) == 10
    assert set(load(bytes(data))) == set(places)


def test_torch_writes_what_we_read() -> None:
    from safetensors.torch import save

    data = save({"w": torch.zeros(2, 3, dtype=torch.bfloat16), "n": torch.tensor(3)})
    places = parsed(data)
    described = {name: (p.dtype, p.shape) for name, p in places.items()}
    assert described == {"w": ("bfloat16", (2, 3)), "n": ("int64", ())}
