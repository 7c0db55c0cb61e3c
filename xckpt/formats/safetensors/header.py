"""The header of a safetensors file: read strictly, and written as the safetensors library does.

A file is 8 bytes with the header's length N (little-endian), N bytes of JSON, and the tensors'
bytes without gaps. The JSON is an object: name -> dtype, shape and the range of its bytes, counted
from the end of the header; ``__metadata__`` -> texts by name.

`parse_header` takes nothing on trust: a length beyond the file, a duplicate key, a range whose
length does not fit shape and dtype, a gap, an overlap and bytes of no tensor are refused and
listed, before any memory for a tensor is allocated. `check_tensors` finds what the format cannot
carry, and `lay_out` puts tensors in the order that the safetensors library gives them, so that each
begins at a multiple of its element's size.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Final, NoReturn

import msgspec

from xckpt.core.dtypes import item_size
from xckpt.core.geometry.box import Box
from xckpt.core.manifest.rules import shape_fault
from xckpt.core.names import is_utf8
from xckpt.core.struct_types import prepare_structs
from xckpt.core.text.advice import OTHER_DTYPE
from xckpt.errors import RESTORE, ManifestError, UnsupportedLeafError

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header; the safetensors library has the same limit."""
MOST_DIMENSIONS: Final = 32
MOST_BYTES: Final = 1 << 62

NAMES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""safetensors' element types -> the format's; those of whole bytes."""

PACKED: Final = frozenset(("F4", "F6_E2M3", "F6_E3M2"))
"""Types of less than a byte, several elements in one."""

_SPELLED: Final = {name: spelling for spelling, name in NAMES.items()}
_METADATA: Final = "__metadata__"

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_BYTES)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON entry of a tensor."""

    dtype: str
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


prepare_structs(_Entry)


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor of a file.

    Example:
        >>> TensorSpan("bfloat16", (2, 3), start=72).nbytes
        12
    """

    dtype: str
    """The format's name of the element type."""
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which it begins."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * item_size(self.dtype)


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a file."""

    places: Mapping[str, TensorSpan]
    """Name -> tensor, in the header's order."""
    metadata: Mapping[str, str]
    """The texts under ``__metadata__``."""
    size: int
    """Bytes of the whole file."""


def header_length(first: bytes, file_size: int) -> int:
    """The length of the header, from the file's first 8 bytes.

    Raises:
        ManifestError: there is no such header in a file of that size.

    Example:
        >>> header_length(struct.pack("<Q", 56), file_size=80)
        56
    """
    if len(first) < 8 or file_size < 8:
        raise ManifestError(f"not a safetensors file: it has only {file_size:,} bytes")
    (length,) = struct.unpack("<Q", first[:8])
    if length > MAX_HEADER_BYTES:
        raise ManifestError(
            f"not a safetensors file: its header would have {length:,} bytes, at most "
            f"{MAX_HEADER_BYTES:,} are read"
        )
    if 8 + length > file_size:
        raise ManifestError(
            f"truncated: its header has {length:,} bytes, the whole file {file_size:,}; {RESTORE}"
        )
    return length


def parse_header(text: bytes, file_size: int) -> Header:
    """The header of a file of ``file_size`` bytes, from its JSON.

    Raises:
        ManifestError: it is no such JSON, or the ranges do not fill the file; all is listed.
        UnsupportedLeafError: tensors of a dtype that the format lacks; all are listed.

    Example:
        >>> text = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
        >>> parse_header(text, 8 + len(text) + 8).places["w"].shape
        (2,)
    """
    entries = _decode(text)
    metadata = _metadata(entries.pop(_METADATA, None))
    problems = _name_problems(entries)
    if problems:
        raise ManifestError.listing("its header cannot be trusted", problems)
    data_at = 8 + len(text)
    unsupported: list[str] = []
    places: dict[str, TensorSpan] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, decoded in entries.items():
        try:
            entry = msgspec.convert(decoded, _Entry)
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        start, stop = entry.data_offsets
        ranges.append((start, stop, name))
        if entry.dtype in PACKED:
            unsupported.append(f"{name}: {entry.dtype}, which packs several elements into a byte")
        elif entry.dtype not in NAMES:
            unsupported.append(f"{name}: dtype {entry.dtype[:40]!r}, which is unknown")
        else:
            places[name] = TensorSpan(NAMES[entry.dtype], entry.shape, data_at + start)
            if fault := _size_fault(entry, places[name]):
                problems.append(f"{name}: {fault}")
    problems += _range_problems(ranges, file_size - data_at)
    if problems:
        raise ManifestError.listing("its header cannot be trusted", problems)
    if unsupported:
        raise UnsupportedLeafError.listing("it holds what cannot be read", unsupported)
    return Header(places, metadata, file_size)


def _size_fault(entry: _Entry, span: TensorSpan) -> str:
    """What is wrong with a tensor's shape, or with the length of its range; empty if nothing is."""
    if fault := shape_fault(span.shape, item_size(span.dtype)):
        return fault
    start, stop = entry.data_offsets
    if span.nbytes == stop - start:
        return ""
    return (
        f"{entry.dtype} {Box.whole(span.shape)} takes {span.nbytes:,} bytes, but its range "
        f"[{start:,}, {stop:,}) has {stop - start:,}"
    )


def stated_size(text: bytes) -> int:
    """The file length that a header's JSON implies, for files whose length is unknown; nothing is
    checked.

    Example:
        >>> stated_size(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}')
        77
    """
    entries = _decode(text)
    entries.pop(_METADATA, None)
    end = 0
    for entry in entries.values():
        match entry:
            case {"data_offsets": [_, int(stop)]}:
                end = max(end, stop)
    return 8 + len(text) + end


def _decode(text: bytes) -> dict[str, object]:
    try:
        decoded = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ManifestError(f"its header is damaged: {problem[:200]}") from error
    if not isinstance(decoded, dict) or not text.startswith(b"{"):
        raise ManifestError("its header is damaged: it is not a JSON object")
    return decoded


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:200]!r} is in it twice")
    return unique


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _metadata(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
        raise ManifestError(f"its header is damaged: {_METADATA} does not map names to texts")
    return given


def _name_problems(names: Iterable[str]) -> list[str]:
    """What is wrong with names that UTF-8 cannot carry."""
    return [
        f"{name!a}: a name with half a character (a lone surrogate)"
        for name in names
        if not is_utf8(name)
    ]


def _range_problems(ranges: list[tuple[int, int, str]], size: int) -> list[str]:
    """A line for each place where the ranges do not fill ``size`` bytes, one after the other."""
    problems: list[str] = []
    end, before = 0, "the header"
    for start, stop, name in sorted(ranges):
        if start < end:
            problems.append(
                f"{name}: its bytes [{start:,}, {stop:,}) overlap those of {before}, up to {end:,}"
            )
        elif start > end:
            problems.append(f"{name}: bytes [{end:,}, {start:,}) before it belong to no tensor")
        if stop > size:
            problems.append(
                f"{name}: truncated: its bytes [{start:,}, {stop:,}) lie beyond the file's {size:,}"
            )
        if stop > end:
            end, before = stop, name
    if end < size:
        problems.append(f"bytes [{end:,}, {size:,}) at the end of the file belong to no tensor")
    return problems


def check_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Refuse tensors (name -> dtype, shape) that no file can carry.

    Raises:
        UnsupportedLeafError: dtypes that safetensors lacks, or a name that it keeps for itself;
            all are listed.

    Example:
        >>> check_tensors({"w": ("int4", (2,))})
        Traceback (most recent call last):
        xckpt.errors.UnsupportedLeafError: safetensors cannot carry this
          - w: safetensors has no int4; cast it by a rule of a mapping, or choose another format
    """
    problems = [
        f"{name}: safetensors has no {dtype}; {OTHER_DTYPE}"
        for name, (dtype, _) in tensors.items()
        if dtype not in _SPELLED
    ]
    problems += _name_problems(tensors)
    if _METADATA in tensors:
        problems.append(f"{_METADATA}: a name that safetensors reserves")
    if problems:
        raise UnsupportedLeafError.listing("safetensors cannot carry this", problems)


def lay_out(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """The first bytes of a file for tensors (name -> dtype, shape), and where each of them goes.

    The tensors have passed `check_tensors`.

    Raises:
        ManifestError: the header would be longer than is read.

    Example:
        >>> first, header = lay_out({"w": ("float32", (2,))}, {"format": "pt"})
        >>> header.size - len(first), header.places["w"].start == len(first)
        (8, True)
        >>> parse_header(first[8:], header.size) == header
        True
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-item_size(tensors[name][0]), name)):
        dtype, shape = tensors[name]
        starts[name], end = end, end + prod(shape) * item_size(dtype)
        entries[name] = {
            "dtype": _SPELLED[dtype],
            "shape": list(shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ManifestError(
            f"{len(tensors):,} tensors make a header of {len(text):,} bytes; at most "
            f"{MAX_HEADER_BYTES:,} are read: write several files"
        )
    first = struct.pack("<Q", len(text)) + text
    places = {name: TensorSpan(*tensors[name], len(first) + at) for name, at in starts.items()}
    return first, Header(places, dict(metadata), len(first) + end)
