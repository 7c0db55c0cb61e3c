"""How many examples a property is tried with.

A property without a setting has the profile's number: 100 in `quick`, where nothing is read or
written. One with I/O says fewer, and `thorough` multiplies both alike.
"""

from __future__ import annotations

from hypothesis import settings

QUICK = 100
"""`max_examples` of the profile `quick`."""


def examples(quick: int) -> settings:
    """Settings with ``quick`` examples in the default tier, and as many times more in others.

    Example:
        >>> examples(25).max_examples * QUICK == 25 * settings().max_examples
        True
    """
    return settings(max_examples=max(1, quick * settings().max_examples // QUICK))
