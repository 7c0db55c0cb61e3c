"""Something that was pickled open and cannot be opened by the process that unpickles it.

An error while a task is unpickled costs a pool its process: `concurrent.futures` loses all tasks,
and `multiprocessing` waits for this one without an end. So that error is kept until the first use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from xckpt.errors import XckptError

P = ParamSpec("P")
Kind = TypeVar("Kind")


class Unopened:
    """Raises why it is not open, whatever is asked of it."""

    __slots__ = ()
    why: XckptError

    def __init__(self, why: XckptError) -> None:
        object.__setattr__(self, "why", why)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for what there may be
            raise AttributeError(name)
        raise self.why

    def __repr__(self) -> str:
        return f"<not open: {self.why}>"

    def __reduce__(self) -> tuple[object, ...]:
        return unopened, (type(self).__mro__[2], self.why)


def unopened(kind: type[Kind], why: XckptError) -> Kind:
    """An instance of a class that raises an error with its first use.

    Example:
        >>> class Book:
        ...     __slots__ = ("pages",)
        ...     def read(self) -> int:
        ...         return self.pages
        >>> unopened(Book, XckptError("it is locked")).read()
        Traceback (most recent call last):
        xckpt.errors.XckptError: it is locked
    """
    made: Any = type(f"Unopened{kind.__name__}", (Unopened, kind), {"__slots__": ("why",)})
    return cast(Kind, made(why))


def or_unopened(kind: type[Kind]) -> Callable[[Callable[P, Kind]], Callable[P, Kind]]:
    """Have a function that opens something keep an error of xckpt until the first use.

    Args:
        kind: what it opens.
    """

    def keeping(opening: Callable[P, Kind]) -> Callable[P, Kind]:
        @functools.wraps(opening)
        def opened(*args: P.args, **kwargs: P.kwargs) -> Kind:
            try:
                return opening(*args, **kwargs)
            except XckptError as error:
                return unopened(kind, error)

        return opened

    return keeping
