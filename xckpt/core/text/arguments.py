"""What to say of an argument of another type than a call takes."""

import math
from typing import SupportsFloat, cast


def wrong_argument(call: str, name: str, takes: str, value: object) -> TypeError:
    """The error about one argument; a long value is cut.

    Example:
        >>> str(wrong_argument("LoadOptions", "host", "a name or None", 3))
        'LoadOptions(host=) takes a name or None, not the int 3'
    """
    return TypeError(f"{call}({name}=) takes {takes}, not {shown_value(value)}")


def check_function(call: str, name: str, takes: str, value: object) -> None:
    """Refuse an argument that is neither a function nor None.

    Raises:
        TypeError: it is neither.

    Example:
        >>> check_function("verify", "progress", "a function", 3)
        Traceback (most recent call last):
        TypeError: verify(progress=) takes a function, not the int 3
    """
    if value is not None and not callable(value):
        raise wrong_argument(call, name, takes, value)


def seconds_of(timeout: object) -> float:
    """The seconds of a timeout.

    Raises:
        TypeError: it is not a number.

    Example:
        >>> seconds_of("5")
        Traceback (most recent call last):
        TypeError: timeout is a number of seconds, not a str
    """
    if (seconds := as_float(timeout)) is None:
        raise TypeError(f"timeout is a number of seconds, not {named(type(timeout).__name__)}")
    return seconds


def as_float(value: object) -> float | None:
    """A number as a float, an infinite one where it is too large; None if it is no number.

    Example:
        >>> as_float(3), as_float(-(10**400)), as_float("3"), as_float(int), as_float(True)
        (3.0, -inf, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, 1 if cast(int, value) > 0 else -1)
    except (TypeError, ValueError, RuntimeError):  # a class, an array or a tensor of several
        return None


def named(kind: str) -> str:
    """What something is, after its article.

    Example:
        >>> named("int64"), named("float32"), named("uint8"), named("ndarray"), named("XLATensor")
        ('an int64', 'a float32', 'a uint8', 'an ndarray', 'an XLATensor')
    """
    return f"an {kind}" if kind.lower().startswith(("a", "e", "i", "o", "nd", "x")) else f"a {kind}"


def named_class(value: object) -> str:
    """The class of something, with its module, after its article.

    Example:
        >>> from fractions import Fraction
        >>> named_class({1}), named_class(Fraction(1, 2))
        ('a builtins.set', 'a fractions.Fraction')
    """
    return named(f"{type(value).__module__}.{type(value).__qualname__}")


def shown_value(value: object) -> str:
    """A value and its type, in an error.

    Example:
        >>> shown_value("no")
        "the str 'no'"
    """
    text = any_repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


def any_repr(value: object) -> str:
    """What a value's class makes of it, or that it makes nothing of it.

    Example:
        >>> any_repr("no"), any_repr(10**5000)
        ("'no'", '(its repr raises ValueError)')
    """
    try:
        return repr(value)
    except Exception as fault:
        return f"(its repr raises {type(fault).__name__})"
