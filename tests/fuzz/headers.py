"""Headers of safetensors files: refused, or tensors that fill the file without sharing a byte."""

from __future__ import annotations

import json
import struct

from tests.fuzz.choices import Choices, edit_bytes, edit_json, spelled
from xckpt.errors import XckptError
from xckpt.formats.safetensors.header import header_length, lay_out, parse_header

__all__ = ["safetensors"]

START, HEADER = lay_out(
    {
        "w": ("float32", (2, 3)),
        "b": ("bfloat16", (3,)),
        "none": ("int8", (0, 4)),
        "s": ("bool", ()),
    },
    {"format": "pt"},
)
FILE = START + bytes(HEADER.size - len(START))


def safetensors(data: bytes) -> str:
    """Read the header of a changed file."""
    choices = Choices(data)
    how = choices.below(4)
    if how == 0:
        changed = edit_bytes(FILE, choices)
    elif how == 1:
        text = edit_bytes(START[8:], choices)
        changed = struct.pack("<Q", len(text)) + text + FILE[len(START) :]
    else:
        document = json.loads(START[8:])
        edit_json(document, choices)
        text = spelled(document)
        changed = struct.pack("<Q", len(text)) + text + FILE[len(START) :]
    try:
        length = header_length(changed[:8], len(changed))
        header = parse_header(changed[8 : 8 + length], len(changed))
    except XckptError:
        return "refused"
    held = bytearray(len(changed) - 8 - length)
    for place in header.places.values():
        start = place.start - 8 - length
        for at in range(start, start + place.nbytes):
            held[at] += 1
    assert held == b"\1" * len(held), "not every byte belongs to one tensor"
    return "read"
