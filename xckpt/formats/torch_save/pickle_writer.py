"""Writing a pickle from a description: the reverse of `xckpt.formats.torch_save.pickle_machine`.

Nothing is pickled, so nothing of torch is imported:

1. Plain values (None, bool, int, float, complex, str, bytes, list, tuple, dict) are written as
   Python's pickler writes them in protocol 2, which every version of torch loads.
2. A `Symbol` is written as a name, a `Call` as a call of one, a `PickledObject` as an object of a
   class with a state, and an `Outside` as a reference to something outside the pickle.
3. A name or string is spelled out once; after that the pickle refers to its memo.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from xckpt.formats.torch_save.pickle_machine import Symbol


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function or class."""

    function: str
    """Module and name, joined with a dot."""
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PickledObject:
    """An object that is made without a call of ``__init__``, and then given its state.

    Equal only to itself, so that it can be the key of a dict.
    """

    kind: str
    """Module and name of its class, joined with a dot."""
    state: object


@dataclass(frozen=True, slots=True)
class Outside:
    """A reference to something outside the pickle, by its persistent id."""

    identity: tuple[object, ...]


def dump(value: object, describe: Callable[[object], object] | None = None) -> bytes:
    """The pickle of a value, of protocol 2.

    Args:
        value: plain values and descriptions, nested.
        describe: gives a description of a value of any other type.

    Raises:
        TypeError: it holds a value of another type, and ``describe`` is None.

    Example:
        >>> import pickle
        >>> pickle.loads(dump({"step": 7, "when": Call("datetime.date", (2024, 2, 29))}))
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
            raise TypeError(f"a {type(value).__qualname__} is no plain value")

    def add(self, *opcodes: bytes) -> None:
        """Add opcodes as they are."""
        self.opcodes += opcodes

    def once(self, key: object, opcodes: bytes) -> None:
        """Add opcodes, or, if they were added before, what gets their value from the memo."""
        known = self._memo.get(key)
        if known is not None:
            self.add(known)
            return
        number = len(self._memo)
        size = "<I" if number > 255 else "<B"
        self._memo[key] = (b"h" if size == "<B" else b"j") + struct.pack(size, number)
        self.add(opcodes, b"q" if size == "<B" else b"r", struct.pack(size, number))


def _none(writer: _Writer, value: None) -> None:
    writer.add(b"N")


def _bool(writer: _Writer, value: bool) -> None:
    writer.add(b"\x88" if value else b"\x89")


def _int(writer: _Writer, value: int) -> None:
    if 0 <= value < 1 << 8:
        writer.add(b"K", struct.pack("<B", value))
    elif -(1 << 31) <= value < 1 << 31:
        writer.add(b"J", struct.pack("<i", value))
    else:
        size = value.bit_length() // 8 + 1
        short = size < 1 << 8
        writer.add(b"\x8a" if short else b"\x8b", struct.pack("<B" if short else "<i", size))
        writer.add(value.to_bytes(size, "little", signed=True))


def _float(writer: _Writer, value: float) -> None:
    writer.add(b"G", struct.pack(">d", value))


def _complex(writer: _Writer, value: complex) -> None:
    writer.write(Call("__builtin__.complex", (value.real, value.imag)))


def _str(writer: _Writer, value: str) -> None:
    text = value.encode("utf-8", "surrogatepass")
    writer.once(value, b"X" + struct.pack("<I", len(text)) + text)


def _bytes(writer: _Writer, value: bytes) -> None:
    writer.write(Call("_codecs.encode", (value.decode("latin-1"), "latin1")))


def _list(writer: _Writer, value: list[object]) -> None:
    writer.add(b"](")
    for part in value:
        writer.write(part)
    writer.add(b"e")


def _tuple(writer: _Writer, value: tuple[object, ...]) -> None:
    writer.add(b"(")
    for part in value:
        writer.write(part)
    writer.add(b"t")


def _dict(writer: _Writer, value: dict[object, object]) -> None:
    writer.add(b"}(")
    for key, part in value.items():
        writer.write(key)
        writer.write(part)
    writer.add(b"u")


def _symbol(writer: _Writer, value: Symbol) -> None:
    module, _, name = value.name.rpartition(".")
    writer.once(value, f"c{module}\n{name}\n".encode())


def _call(writer: _Writer, value: Call) -> None:
    writer.write(Symbol(value.function))
    writer.write(value.arguments)
    writer.add(b"R")


def _instance(writer: _Writer, value: PickledObject) -> None:
    writer.write(Symbol(value.kind))
    writer.add(b")\x81")
    writer.write(value.state)
    writer.add(b"b")


def _outside(writer: _Writer, value: Outside) -> None:
    writer.write(value.identity)
    writer.add(b"Q")


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
    Call: _call,
    PickledObject: _instance,
    Outside: _outside,
}
