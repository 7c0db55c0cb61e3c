"""Reading a pickle as a description: nothing named in it is imported, called or built.

torch's checkpoints describe themselves with pickles, and a pickle is a program that may call any
function by name. `opcodes` decodes it and runs nothing. This stack machine runs the opcodes that
Python's pickler writes (protocols 2 to 5); `pickle.Unpickler` would call and build.

1. Numbers, strings, bytes, None, lists, tuples and dicts become themselves.
2. A name becomes a `Symbol`, but only if the caller's table has it; any other is refused at once.
3. An instance becomes a `Record`: its type's name, arguments and state.
4. A call becomes the value of the table's own function for the name, or a `Record`.

Time is bounded by the pickle's length, memory by what the caller allows: there is no recursion, and
a memo has no number that the pickle has not used. A dict's keys are scalars, flat tuples of them,
or records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from xckpt.errors import ManifestError, UnsafePickleError, UnsupportedLeafError, XckptError
from xckpt.formats.torch_save.opcodes import after_keys, opcodes
from xckpt.storage.foreign.documents import Allowance

T = TypeVar("T")

Maker = Callable[..., object]
"""Computes the result of a call of a symbol from its arguments."""

Step = Callable[["_Machine", Any], None]
"""Carries out an opcode, given its argument."""

_SCALARS: Final = (str, int, float, bytes, type(None))


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """A described instance; equal only to itself.

    Example:
        >>> record = Record("module.Class", (1,))
        >>> record.name, record.arguments, record.state
        ('module.Class', (1,), None)
    """

    name: str
    arguments: tuple[object, ...] = ()
    state: object = None


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name in a pickle."""

    name: str
    """Module and qualified name, joined with a dot."""
    make: Maker | None = None
    """The result of a call: for `Record`, one of this name; None if it must not be called."""

    def call(self, arguments: tuple[object, ...]) -> object:
        """The value of a call of the name.

        Raises:
            UnsafePickleError: it must not be called.
            ManifestError: the arguments are not what torch writes.
        """
        if self.make is Record:
            return Record(self.name, arguments)
        if self.make is None:
            raise UnsafePickleError(f"it calls {self.name}, which is not a function or class")
        try:
            return self.make(*arguments)
        except XckptError:
            raise
        except (TypeError, ValueError, UnicodeError) as error:
            raise ManifestError(f"it calls {self.name} with unusable arguments") from error


def load(
    data: bytes,
    names: Mapping[str, Maker | None],
    persistent: Maker | None = None,
    memory: Allowance | None = None,
) -> object:
    r"""The value that a pickle describes.

    Args:
        data: the pickle.
        names: the names that may occur -> what a call gives: a function of the caller's,
            `Record`, or None for what is never called.
        persistent: gives the value of a persistent id.
        memory: what the objects may take.

    Raises:
        UnsafePickleError: it names what ``names`` lacks, or calls what must not be called.
        ManifestError: it is truncated, too large, or no pickle that Python's pickler would write.

    Example:
        >>> load(b"\x80\x02](K\x01NX\x01\x00\x00\x00ae.", {})
        [1, None, 'a']
        >>> load(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", {})
        Traceback (most recent call last):
        ...
        xckpt.errors.UnsafePickleError: it names os.system, ...
    """
    machine = _Machine(len(data), names, persistent)
    try:
        for name, argument, position in opcodes(data, memory or Allowance()):
            machine.position = position
            step = _STEPS.get(name)
            if step is None:
                what = f"byte {position:,} of the pickle is {name}"
                raise ManifestError(f"{what}, an opcode that torch does not write")
            step(machine, argument)
        return machine.stack[0]
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{error}{after_keys(machine.stack)}") from error
    except XckptError:
        raise
    except (IndexError, KeyError, ValueError, DeprecationWarning) as error:  # of escapes in names
        raise ManifestError(
            f"the pickle of {len(data):,} bytes is truncated or damaged near byte "
            f"{machine.position:,}: {str(error)[:200]}"
        ) from error


@dataclass(slots=True)
class _Machine:
    """The stack and the memo, and operations on them."""

    length: int
    names: Mapping[str, Maker | None]
    persistent: Maker | None
    position: int = 0
    """Where the current opcode is."""
    stack: list[object] = field(default_factory=list[object])
    marks: list[int] = field(default_factory=list[int])
    """How long the stack was at each open bracket."""
    memo: list[object] = field(default_factory=list[object])

    def pop(self) -> object:
        """The topmost value; what lies below an open bracket is out of reach."""
        if self.marks and self.marks[-1] == len(self.stack):
            raise self.misplaced("a closing bracket")
        return self.stack.pop()

    def since_mark(self) -> list[object]:
        """The values in the innermost bracket, which is closed."""
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def top(self, kind: type[T]) -> T:
        """The topmost value, which must be a list or dict of the pickle's own."""
        value = self.stack[-1]
        if not isinstance(value, kind):
            raise ManifestError(
                f"it adds entries to a {type(value).__name__} as if it were a {kind.__name__}"
            )
        return value

    def symbol(self, name: str) -> Symbol:
        if name not in self.names:
            what = f"it names {name[:200]}{after_keys(self.stack)}, which has no place here"
            raise UnsafePickleError(f"{what}; nothing was imported or run")
        return Symbol(name, self.names[name])

    def remember(self, number: int) -> None:
        """Put the topmost value into the memo; the pickler numbers its entries from 0 up."""
        if not self.stack:
            raise self.misplaced("a memo entry")
        if number > len(self.memo):
            raise ManifestError(f"memo entry {number:,} is written before the ones below it")
        self.memo[number : number + 1] = [self.stack[-1]]

    def misplaced(self, what: str) -> ManifestError:
        return ManifestError(f"{what} is misplaced at byte {self.position:,} of the pickle")


# One function an opcode, in the order of the table at the end; each takes the opcode's argument.


def _proto(m: _Machine, version: int) -> None:
    if not 2 <= version <= 5:
        raise ManifestError(f"pickle protocol {version}; torch writes 2 to 5")


def _frame(m: _Machine, length: int) -> None:
    if length > m.length - m.position:
        raise ManifestError(f"a frame of {length:,} bytes, in a pickle of {m.length:,}")


def _mark(m: _Machine, _: None) -> None:
    m.marks.append(len(m.stack))


def _push(m: _Machine, value: object) -> None:
    m.stack.append(value)


def _constant(value: object) -> Step:
    return lambda m, _: m.stack.append(value)


def _empty(kind: Callable[[], object]) -> Step:
    return lambda m, _: m.stack.append(kind())


def _tuple_of(count: int) -> Step:
    def make(m: _Machine, _: None) -> None:
        values = [m.pop() for _ in range(count)]
        m.stack.append(tuple(reversed(values)))

    return make


def _tuple(m: _Machine, _: None) -> None:
    m.stack.append(tuple(m.since_mark()))


def _append(m: _Machine, _: None) -> None:
    value = m.pop()
    m.top(list).append(value)


def _appends(m: _Machine, _: None) -> None:
    values = m.since_mark()
    m.top(list).extend(values)


def _set_item(m: _Machine, _: None) -> None:
    value, key = m.pop(), m.pop()
    _put(m, [key, value])


def _set_items(m: _Machine, _: None) -> None:
    _put(m, m.since_mark())


def _put(m: _Machine, values: list[object]) -> None:
    into = m.top(dict)
    if len(values) % 2:
        raise ManifestError("a dict has a key without a value")
    for key, value in zip(values[::2], values[1::2], strict=True):
        plain = isinstance(key, (*_SCALARS, Record)) or (
            isinstance(key, tuple) and all(isinstance(part, _SCALARS) for part in key)
        )
        if not plain:
            raise ManifestError(f"a dict has a {type(key).__name__} as a key")
        into[key] = value


def _global(m: _Machine, name: str) -> None:
    m.stack.append(m.symbol(name.replace(" ", ".", 1)))


def _stack_global(m: _Machine, _: None) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ManifestError("a name is not a string")
    m.stack.append(m.symbol(f"{module}.{name}"))


def _reduce(m: _Machine, _: None) -> None:
    arguments, function = m.pop(), m.pop()
    if not isinstance(function, Symbol) or not isinstance(arguments, tuple):
        raise UnsafePickleError(f"it calls a {type(function).__name__}, which is not a function")
    m.stack.append(function.call(arguments))


def _build(m: _Machine, _: None) -> None:
    state = m.pop()
    record = m.stack[-1]
    if isinstance(record, dict) and isinstance(state, dict) and all(map(_is_name, state)):
        return  # Attributes of an OrderedDict, such as the versions of a module's state dict.
    if not isinstance(record, Record) or record.state is not None:
        raise UnsafePickleError(f"it gives a state to a {type(record).__name__}, which has none")
    record.state = state


def _is_name(key: object) -> bool:
    return isinstance(key, str)


def _persistent(m: _Machine, _: None) -> None:
    identity = m.pop()
    if m.persistent is None or not isinstance(identity, tuple):
        raise UnsafePickleError("it refers to something outside itself")
    try:
        m.stack.append(m.persistent(*identity))
    except TypeError as error:
        raise ManifestError("it refers to a storage in a way that torch does not") from error


def _get(m: _Machine, number: int) -> None:
    m.stack.append(m.memo[number])


def _memoize(m: _Machine, _: None) -> None:
    m.remember(len(m.memo))


def _pop(m: _Machine, _: None) -> None:
    m.pop()


def _stop(m: _Machine, _: None) -> None:
    """The last opcode, which leaves one value."""
    if len(m.stack) != 1:
        raise m.misplaced("STOP")


_STEPS: Final[Mapping[str, Step]] = {
    "PROTO": _proto,
    "FRAME": _frame,
    "MARK": _mark,
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "LONG1", "LONG4", "BINFLOAT"), _push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _push),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _empty(list),
    "EMPTY_DICT": _empty(dict),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "TUPLE": _tuple,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,  # a class and its arguments, as a call
    "BUILD": _build,
    "BINPERSID": _persistent,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _memoize,
    "POP": _pop,
    "STOP": _stop,
}
