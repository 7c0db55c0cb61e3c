"""Writing a pickle from a description: the reverse of `xckpt.formats.torch_save.pickle_machine`.

Nothing is pickled, so nothing of torch is imported:

1. Plain values (None, bool, int, float, complex, str, bytes, list, tuple, dict) are written in
   opcodes of protocol 2, which every version of torch loads.
2. A `Symbol` is written as a name. A `Built` is the result of an opcode with parts: a call, an
   object of a class with a state, or a reference to something outside the pickle.
3. A name or string is spelled out once; after that the pickle refers to its memo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from xckpt.core.text.arguments import named
from xckpt.formats.torch_save.pickle_machine import Symbol


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """The result of an opcode with parts; equal only to itself, so that it can be a dict's key."""

    parts: tuple[object, ...]
    opcode: bytes


def call(function: str, arguments: tuple[object, ...] = ()) -> Built:
    """A call of a function or class, which is named by module and name, joined with a dot.

    Example:
        >>> import pickle
        >>> pickle.loads(dump(call("fractions.Fraction", (1, 2))))
        Fraction(1, 2)
    """
    return Built((Symbol(function), arguments), b"R")


def instance(kind: str, state: object) -> Built:
    """An object of a class that is made without a call of ``__init__`` and given its state.

    Example:
        >>> import pickle
        >>> pickle.loads(dump(instance("types.SimpleNamespace", {"step": 7})))
        namespace(step=7)
    """
    return Built((Built((Symbol(kind), ()), b"\x81"), state), b"b")


def outside(identity: tuple[object, ...]) -> Built:
    """A reference to something outside the pickle, by its persistent id."""
    return Built((identity,), b"Q")


def dump(value: object, describe: Callable[[object], object] | None = None) -> bytes:
    """The pickle of a value, of protocol 2.

    Args:
        value: plain values and descriptions, nested.
        describe: gives a description of a value of any other type.

    Raises:
        TypeError: it holds a value of another type, and ``describe`` is None.

    Example:
        >>> import pickle
        >>> pickle.loads(dump({"step": 7, "when": call("datetime.date", (2024, 2, 29))}))
        {'step': 7, 'when': datetime.date(2024, 2, 29)}
    """
    writer = _Writer(describe)
    writer.write(value)
    return b"\x80\x02" + b"".join(writer.opcodes) + b"."


class _Writer:
    """The opcodes so far, and what the memo holds."""

    def __init__(self, describe: Callable[[object], object] | None) -> None:
        self.opcodes: list[bytes] = []
        self._describe = describe
        self._memo: dict[object, bytes] = {}
        """A string, or a `Symbol` -> the opcode that gets it from the memo."""

    def write(self, value: object) -> None:
        """Add the opcodes that put a value on the stack."""
        step = _STEPS.get(type(value))
        if step is not None:
            step(self, value)
        elif self._describe is not None:
            self.write(self._describe(value))
        else:
            raise TypeError(f"{named(type(value).__qualname__)} is not a plain value")

    def add(self, *opcodes: bytes) -> None:
        """Add opcodes as they are."""
        self.opcodes += opcodes

    def around(self, begin: bytes, parts: Iterable[object], end: bytes) -> None:
        """Add the parts, between opcodes."""
        self.add(begin)
        for part in parts:
            self.write(part)
        self.add(end)

    def once(self, key: object, opcodes: bytes) -> None:
        """Add opcodes; if they were added before, the one that gets their value from the memo."""
        if key in self._memo:
            self.add(self._memo[key])
        else:
            number = struct.pack("<I", len(self._memo))
            self._memo[key] = b"j" + number
            self.add(opcodes, b"r", number)


def _none(writer: _Writer, value: None) -> None:
    writer.add(b"N")


def _bool(writer: _Writer, value: bool) -> None:
    writer.add(b"\x88" if value else b"\x89")


def _int(writer: _Writer, value: int) -> None:
    if -(1 << 31) <= value < 1 << 31:
        writer.add(b"J", struct.pack("<i", value))
        return
    digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(digits) < 1 << 8:
        writer.add(b"\x8a", struct.pack("<B", len(digits)), digits)
    else:
        writer.add(b"\x8b", struct.pack("<i", len(digits)), digits)


def _float(writer: _Writer, value: float) -> None:
    writer.add(b"G", struct.pack(">d", value))


def _complex(writer: _Writer, value: complex) -> None:
    writer.write(call("__builtin__.complex", (value.real, value.imag)))


def _str(writer: _Writer, value: str) -> None:
    text = value.encode("utf-8", "surrogatepass")
    writer.once(value, b"X" + struct.pack("<I", len(text)) + text)


def _bytes(writer: _Writer, value: bytes) -> None:
    writer.write(call("_codecs.encode", (value.decode("latin-1"), "latin1")))


def _list(writer: _Writer, value: list[object]) -> None:
    writer.around(b"](", value, b"e")


def _tuple(writer: _Writer, value: tuple[object, ...]) -> None:
    writer.around(b"(", value, b"t")


def _dict(writer: _Writer, value: dict[object, object]) -> None:
    writer.around(b"}(", chain.from_iterable(value.items()), b"u")


def _symbol(writer: _Writer, value: Symbol) -> None:
    module, _, name = value.name.rpartition(".")
    writer.once(value, f"c{module}\n{name}\n".encode())


def _built(writer: _Writer, value: Built) -> None:
    writer.around(b"", value.parts, value.opcode)


_STEPS: dict[type, Callable[..., None]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    list: _list,
    tuple: _tuple,
    dict: _dict,
    Symbol: _symbol,
    Built: _built,
}
