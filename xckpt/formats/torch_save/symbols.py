"""What stands in a description of a pickle for names, and for objects that are not built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xckpt.errors import ManifestError, UnsafePickleError, XckptError

Maker = Callable[..., object]
"""What a call of a symbol gives: a function that takes the call's arguments."""


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
