"""Numbers of steps and of minutes that users give: Python's, or scalars of an array library."""

from __future__ import annotations

import math
from operator import index
from typing import Any, cast

from xckpt.core.run.names import DIGITS, MOST_STEPS
from xckpt.core.text.arguments import as_float, named


def whole(given: object) -> int:
    """A whole number of any type as an int; a bool does not count.

    Raises:
        TypeError: it is not a whole number.

    Example:
        >>> import numpy as np
        >>> whole(np.int32(5))
        5
    """
    if isinstance(given, bool):
        raise TypeError("a bool is not a number")
    return index(cast(Any, given))


def checked_step(step: object) -> int:
    """The number of a step.

    Raises:
        TypeError, ValueError: it is not a step number.

    Example:
        >>> checked_step(-1)
        Traceback (most recent call last):
        ValueError: a step is a number from 0 to 10**18 - 1, not -1
    """
    try:
        number = whole(step)
    except TypeError:
        raise TypeError(f"a step is an int, not {named(type(step).__name__)}") from None
    if not 0 <= number < MOST_STEPS:
        raise ValueError(f"a step is a number from 0 to 10**{DIGITS} - 1, not {number}")
    return number


def count_of(what: str, n: object) -> int:
    """A number of steps, at least 1; ``what`` names the policy.

    Raises:
        TypeError: it is not an int.
        ValueError: it is less than 1.
    """
    try:
        count = whole(n)
    except TypeError:
        raise TypeError(f"{what} takes a number of steps, not {named(type(n).__name__)}") from None
    if count < 1:
        raise ValueError(f"{what} must be at least 1, got {n}")
    return count


def minutes_of(m: object) -> float:
    """The minutes of `EveryMinutes(m)`, more than 0.

    Raises:
        TypeError: it is not a number.
        ValueError: it is 0 or less, or more than a float holds.
    """
    if (minutes := as_float(m)) is None:
        raise TypeError(f"EveryMinutes(m) takes minutes, not {named(type(m).__name__)}")
    if isinstance(m, int) and math.isinf(minutes):
        raise ValueError("EveryMinutes(m) takes a number that a float holds")
    if not minutes > 0:
        raise ValueError(f"EveryMinutes(m) takes more than 0 minutes, got {m}")
    return m if isinstance(m, int) else minutes
