"""What torch has written: DCP's ``.metadata`` and archives of `torch.save`.

Neither has digests, so other bytes may well be other data. What must hold: an error of xckpt's tree
or a description that keeps to its own rules; nothing outside the folder or the file is named, and
whatever is described as mapped can be read.

The originals in ``originals/`` were written by torch and are changed opcode by opcode.
"""

from __future__ import annotations

import base64
import pickletools
from functools import cache
from pathlib import Path

from tests.fuzz.checkpoints import home
from tests.fuzz.choices import Choices, edit_bytes
from xckpt.core.geometry.cover import cover_fault
from xckpt.errors import XckptError
from xckpt.formats.dcp.metadata import parse
from xckpt.formats.torch_save.archive import Archive, Where
from xckpt.formats.torch_save.values import MappedTensor

__all__ = ["archive", "metadata"]

MOST_EDITS = 8
# fmt: off
STRANGE = (
    b"N", b"\x88", b"]", b"}", b")", b"(", b"0", b".", b"R", b"\x81", b"b", b"Q", b"a", b"e", b"s",
    b"u", b"t", b"\x85", b"\x86", b"\x87", b"\x93", b"\x94", b"K\1", b"h\0", b"h\1", b"q\0",
    b"J\xff\xff\xff\xff", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"\x8a\xff" + b"\x7f" * 255,
    b"\x8b\xff\xff\xff\xff", b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096, b"G\x7f\xf8" + bytes(6),
    b"X\xff\xff\xff\xff", b"X\0\0\0\0", b"X\3\0\0\0../", b"\x8e" + b"\xff" * 8, b"\x8c\1\xff",
    b"\x95" + b"\xff" * 8, b"cos\nsystem\n", b"cbuiltins\ngetattr\n", b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n", b"ctorch\nfloat32\n", b"\x80\x05", b"\x80\x09", b"]0" * 9,
    b"\x8c\x15transform_descriptors", b"\x8c\x15transform_descriptors]", b"\x85" * 3000,
    b"(" * 3000, b"]q\1h\1a",
)
# fmt: on


@cache
def original(name: str) -> bytes:
    """A file as torch has written it."""
    text = (Path(__file__).parent / "originals" / f"{name}.txt").read_text()
    return base64.b64decode("".join(text.split()), validate=True)


@cache
def opcodes(pickled: bytes) -> list[bytes]:
    """A pickle cut into its opcodes, each with its argument."""
    starts = [at for _, _, at in pickletools.genops(pickled) if at is not None]
    ends = [*starts[1:], len(pickled)]
    return [pickled[a:b] for a, b in zip(starts, ends, strict=True)]


def edit_pickle(pickled: bytes, choices: Choices) -> bytes:
    """A pickle with some opcodes changed."""
    parts = list(opcodes(pickled))
    for _ in range(MOST_EDITS):
        if not choices.left:
            break
        at, how = choices.below(len(parts)), choices.below(7)
        if how == 0:
            parts[at] = b""
        elif how == 1:
            parts.insert(at, parts[choices.below(len(parts))])
        elif how == 2:
            other = choices.below(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif how == 3:
            parts[at] = edit_bytes(parts[at], choices)
        elif how == 4:
            parts.insert(at, choices.take())
        else:
            strange = STRANGE[choices.below(len(STRANGE))]
            parts[at : at + how - 5] = [strange]
    return b"".join(parts)


def metadata(data: bytes) -> str:
    """Parse a changed ``.metadata``."""
    choices = Choices(data)
    how = choices.below(4)
    if how == 0:
        changed = choices.rest()
    elif how == 1:
        changed = edit_bytes(original("metadata"), choices)
    else:
        changed = edit_pickle(original("metadata"), choices)
    try:
        found = parse(changed)
    except XckptError:
        return "refused"
    for tensor in found.tensors.values():
        assert cover_fault(tensor.shape, tensor.boxes) is None
        assert len(tensor.places) == len(tensor.boxes)
    places = [place for tensor in found.tensors.values() for place in tensor.places]
    for place in (*places, *found.objects.values()):
        assert place.offset >= 0 and place.length >= 0
        assert place.file and not place.file.startswith("/") and ".." not in place.file.split("/")
    return "read"


def archive(data: bytes) -> str:
    """Open a changed archive, and read all that it describes."""
    choices = Choices(data)
    content = original("archive")
    how = choices.below(4)
    if how == 0:
        changed = choices.rest()
    elif how == 1:
        changed = edit_bytes(content, choices)
    else:
        changed = _with_pickle(content, choices)
    before = b"x" * choices.below(3)
    file = home() / "file"
    file.unlink(missing_ok=True)  # what is mapped keeps its own
    file.write_bytes(before + changed)
    try:
        value = Archive.open(home(), Where("file", len(before), len(changed))).value()
        _read(value, len(before), len(before) + len(changed))
    except XckptError:
        return "refused"
    return "read"


def _with_pickle(content: bytes, choices: Choices) -> bytes:
    """An archive whose ``data.pkl`` has other opcodes and, padded, the length that it had."""
    start = content.index(b"\x80\x02")
    end = content.index(b".PK", start) + 1
    changed = edit_pickle(content[start:end], choices)
    return content[:start] + changed[: end - start].ljust(end - start, b".") + content[end:]


def _read(value: object, start: int, end: int) -> None:
    waiting = [value]
    while waiting:
        at = waiting.pop()
        if isinstance(at, MappedTensor):
            if at.extent:
                assert start <= at.position and at.position + at.extent <= end
            assert at.array().shape == at.shape
            at.array().tobytes()
        elif isinstance(at, dict):
            waiting.extend(at.values())
        elif isinstance(at, list | tuple):
            waiting.extend(at)
