"""Reading a pickle as a description: nothing that it names is imported, called or built.

torch's checkpoints describe themselves with pickles, and a pickle is a program that may call any
function by name. This is a machine of our own for the opcodes that Python's pickler writes
(protocols 2 to 5), over values that cannot do anything:

1. Numbers, strings, bytes, None, lists, tuples and dicts become themselves.
2. A name becomes a `Symbol`, but only if the caller's table has it; any other is refused at once.
3. What would be an instance becomes a `Record`: its type's name, arguments and state.
4. What would be a call becomes the value of the table's own function for the name, or a `Record`.

Memory and time are bounded by a small multiple of the pickle's length: there is no recursion, no
length is believed before the bytes are there, and a memo has no number that the pickle has not
used. A dict's keys are scalars, flat tuples of them, or records.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from xckpt.errors import ManifestError, UnsafePickleError, XckptError

__all__ = ["Maker", "Record", "Symbol", "as_record", "load"]

Maker = Callable[..., object]
"""What a call of a symbol gives: a function of ours, which takes the call's arguments."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name in a pickle."""

    name: str
    """Module and qualified name, joined with a dot."""
    make: Maker | None = None
    """None if nothing may be made of it; `as_record` makes a `Record`."""

    def call(self, arguments: tuple[object, ...]) -> object:
        """The value of a call of the name.

        Raises:
            UnsafePickleError: it is nothing to be called.
            ManifestError: the arguments are not what torch writes.
        """
        if self.make is as_record:
            return Record(self.name, arguments)
        if self.make is None:
            raise UnsafePickleError(f"it calls {self.name}, which is no function or class")
        try:
            return self.make(*arguments)
        except XckptError:
            raise
        except (TypeError, ValueError, UnicodeError) as error:
            raise ManifestError(f"it calls {self.name} with unusable arguments") from error


class Record:
    """What would have been an instance; equal only to itself.

    Example:
        >>> record = Record("module.Class", (1,))
        >>> record.name, record.arguments, record.state
        ('module.Class', (1,), None)
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[object, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: object = None

    def __repr__(self) -> str:
        return f"<{self.name}>"


def as_record() -> None:
    """Stands in a table for "make a `Record` of the name's own"."""


class _Mark:
    """Where a pickle's open bracket is on the stack."""

    __slots__ = ()


_MARK: Final = _Mark()
_SCALARS: Final = (str, int, float, bytes, type(None))


class _Truncated(Exception):
    """The pickle ends too early."""


def load(
    data: bytes,
    names: Mapping[str, Maker | None],
    persistent: Maker | None = None,
) -> object:
    r"""The value that a pickle describes.

    Args:
        data: the pickle.
        names: the names that may occur -> what a call gives: a function of ours, `as_record`, or
            None for what is never called.
        persistent: gives the value of a persistent id.

    Raises:
        UnsafePickleError: it names what ``names`` has not, or calls what cannot be called.
        ManifestError: it is truncated, or no pickle that Python's pickler would write.

    Example:
        >>> load(b"\x80\x02](K\x01NX\x01\x00\x00\x00ae.", {})
        [1, None, 'a']
        >>> load(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", {})
        Traceback (most recent call last):
        ...
        xckpt.errors.UnsafePickleError: it names os.system, ...
    """
    machine = _Machine(data, names, persistent)
    try:
        return machine.run()
    except (_Truncated, struct.error) as error:
        raise ManifestError(f"the pickle ends too early, after {len(data):,} bytes") from error
    except (IndexError, KeyError) as error:
        where = f"near byte {machine.position:,}"
        raise ManifestError(f"the pickle is damaged {where}: {type(error).__name__}") from error


class _Machine:
    """The stack machine; a method for each opcode."""

    def __init__(
        self, data: bytes, names: Mapping[str, Maker | None], persistent: Maker | None
    ) -> None:
        self.data = data
        self.names = names
        self.persistent = persistent
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: list[object] = []
        self.symbols: dict[str, Symbol] = {}

    def run(self) -> object:
        data, steps = self.data, _STEPS
        while True:
            if self.position >= len(data):
                raise _Truncated
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                (value,) = self.stack if len(self.stack) == 1 else (self._misplaced("STOP"),)
                return value
            step = steps[opcode]
            if step is None:
                raise ManifestError(
                    f"byte {self.position - 1:,} of the pickle is {bytes([opcode])!r}, an opcode "
                    f"that torch does not write"
                )
            step(self)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise _Truncated
        return self.data[start : self.position]

    def number(self, layout: struct.Struct) -> int:
        """The next number."""
        (number,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return number

    def line(self) -> str:
        """The text up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise _Truncated
        start, self.position = self.position, end + 1
        return self.text(self.data[start:end])

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ManifestError(f"a string before byte {self.position:,} is no UTF-8") from error

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> object:
        """The topmost value; what lies below an open bracket is out of reach."""
        if self.marks and self.marks[-1] == len(self.stack):
            self._misplaced("a closing bracket")
        return self.stack.pop()

    def since_mark(self) -> list[object]:
        """The values in the innermost bracket, which is closed."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def symbol(self, name: str) -> Symbol:
        known = self.symbols.get(name)
        if known is None:
            if name not in self.names:
                raise UnsafePickleError(
                    f"it names {name[:200]}, which has no place here; nothing was imported or run"
                )
            known = self.symbols[name] = Symbol(name, self.names[name])
        return known

    def remember(self, number: int) -> None:
        """Put the topmost value into the memo; the pickler numbers its entries from 0 up."""
        if not self.stack:
            self._misplaced("a memo entry")
        if number < len(self.memo):
            self.memo[number] = self.stack[-1]
        elif number == len(self.memo):
            self.memo.append(self.stack[-1])
        else:
            raise ManifestError(f"memo entry {number:,} is written before the ones below it")

    def _misplaced(self, what: str) -> object:
        raise ManifestError(f"{what} is misplaced before byte {self.position:,} of the pickle")


# One function an opcode, in the order of the table at the end.


def _proto(m: _Machine) -> None:
    version = m.take(1)[0]
    if not 2 <= version <= 5:
        raise ManifestError(f"pickle protocol {version}; torch writes 2 to 5")


def _mark(m: _Machine) -> None:
    m.marks.append(len(m.stack))


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def make(m: _Machine) -> None:
        values = [m.pop() for _ in range(count)]
        m.push(tuple(reversed(values)))

    return make


def _tuple(m: _Machine) -> None:
    m.push(tuple(m.since_mark()))


def _append(m: _Machine) -> None:
    value = m.pop()
    _list(m).append(value)


def _appends(m: _Machine) -> None:
    values = m.since_mark()
    _list(m).extend(values)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    _put(_dict(m), [key, value])


def _set_items(m: _Machine) -> None:
    values = m.since_mark()
    _put(_dict(m), values)


def _list(m: _Machine) -> list[object]:
    """The topmost value, which must be a list of the pickle's own."""
    value = m.stack[-1]
    if not isinstance(value, list):
        raise ManifestError(f"it adds entries to a {type(value).__name__} as if it were a list")
    return value


def _dict(m: _Machine) -> dict[object, object]:
    """The topmost value, which must be a dict of the pickle's own."""
    value = m.stack[-1]
    if not isinstance(value, dict):
        raise ManifestError(f"it adds entries to a {type(value).__name__} as if it were a dict")
    return value


def _put(into: dict[object, object], values: list[object]) -> None:
    if len(values) % 2:
        raise ManifestError("a dict has a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        plain = isinstance(key, (*_SCALARS, Record)) or (
            isinstance(key, tuple) and all(isinstance(part, _SCALARS) for part in key)
        )
        if not plain:
            raise ManifestError(f"a dict has a {type(key).__name__} as a key")
        into[key] = value


def _counted(layout: struct.Struct) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        m.push(m.text(m.take(m.number(layout))))

    return read


def _counted_bytes(layout: struct.Struct) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        m.push(m.take(m.number(layout)))

    return read


def _long(layout: struct.Struct) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        count = m.number(layout)
        if count < 0:
            raise ManifestError("an int of negative length")
        m.push(int.from_bytes(m.take(count), "little", signed=True))

    return read


def _integer(layout: struct.Struct) -> Callable[[_Machine], None]:
    def read(m: _Machine) -> None:
        m.push(m.number(layout))

    return read


def _constant(value: object) -> Callable[[_Machine], None]:
    def push(m: _Machine) -> None:
        m.push(value)

    return push


def _global(m: _Machine) -> None:
    module = m.line()
    m.push(m.symbol(f"{module}.{m.line()}"))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ManifestError("a name is no string")
    m.push(m.symbol(f"{module}.{name}"))


def _reduce(m: _Machine) -> None:
    arguments, function = m.pop(), m.pop()
    if not isinstance(function, Symbol) or not isinstance(arguments, tuple):
        raise UnsafePickleError(f"it calls a {type(function).__name__}, which is no function")
    m.push(function.call(arguments))


def _build(m: _Machine) -> None:
    state = m.pop()
    record = m.stack[-1]
    if isinstance(record, dict) and isinstance(state, dict) and all(map(_is_name, state)):
        return  # Attributes of an OrderedDict, such as the versions of a module's state dict.
    if not isinstance(record, Record) or record.state is not None:
        raise UnsafePickleError(f"it gives a state to a {type(record).__name__}, which has none")
    record.state = state


def _is_name(key: object) -> bool:
    return isinstance(key, str)


def _persistent(m: _Machine) -> None:
    identity = m.pop()
    if m.persistent is None or not isinstance(identity, tuple):
        raise UnsafePickleError("it refers to something outside itself")
    try:
        m.push(m.persistent(*identity))
    except TypeError as error:
        raise ManifestError("it refers to a storage in a way that torch does not") from error


def _get(layout: struct.Struct) -> Callable[[_Machine], None]:
    def get(m: _Machine) -> None:
        m.push(m.memo[m.number(layout)])

    return get


def _put_memo(layout: struct.Struct) -> Callable[[_Machine], None]:
    def put(m: _Machine) -> None:
        m.remember(m.number(layout))

    return put


def _frame(m: _Machine) -> None:
    if m.number(_U64) > len(m.data) - m.position:
        raise _Truncated


_U8, _U16, _U32, _U64 = (struct.Struct(code) for code in ("<B", "<H", "<I", "<Q"))
_I32 = struct.Struct("<i")
_STOP: Final = ord(".")

_TABLE: Final[dict[bytes, Callable[[_Machine], None]]] = {
    b"\x80": _proto,
    b"\x95": _frame,
    b"(": _mark,
    b")": _constant(()),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": _tuple,
    b"]": lambda m: m.push([]),
    b"a": _append,
    b"e": _appends,
    b"}": lambda m: m.push({}),
    b"s": _set_item,
    b"u": _set_items,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": _integer(_U8),
    b"M": _integer(_U16),
    b"J": _integer(_I32),
    b"\x8a": _long(_U8),
    b"\x8b": _long(_I32),
    b"G": _integer(struct.Struct(">d")),
    b"\x8c": _counted(_U8),
    b"X": _counted(_U32),
    b"\x8d": _counted(_U64),
    b"C": _counted_bytes(_U8),
    b"B": _counted_bytes(_U32),
    b"\x8e": _counted_bytes(_U64),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,  # NEWOBJ: a class and its arguments, as a call
    b"b": _build,
    b"Q": _persistent,
    b"h": _get(_U8),
    b"j": _get(_U32),
    b"q": _put_memo(_U8),
    b"r": _put_memo(_U32),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"0": lambda m: (m.pop(), None)[1],
}
_STEPS: Final = [_TABLE.get(bytes([opcode])) for opcode in range(256)]
