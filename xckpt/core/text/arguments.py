"""What to say of an argument of another type than a call takes."""

from typing import SupportsFloat


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
    if not isinstance(timeout, SupportsFloat):
        raise TypeError(f"timeout is a number of seconds, not {named(type(timeout).__name__)}")
    return float(timeout)


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
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
