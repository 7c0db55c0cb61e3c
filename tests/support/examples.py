"""How many examples a property is tried with.

A property without a setting has the profile's number: 100 in `quick`, where nothing is read or
written. One with I/O says fewer, and `thorough` multiplies both alike.
"""

from __future__ import annotations

from hypothesis import settings

QUICK = 100
"""`max_examples` of the profile `quick`."""


def examples(quick: int, thorough: int | None = None) -> settings:
    """Settings with ``quick`` examples in the default tier, and ``thorough`` or ten times more.

    Args:
        quick: how many in the default tier.
        thorough: how many in the thorough tier, for a property that takes long: few in the first,
            and no fewer than before in the second; None for ten times ``quick``.

    Example:
        >>> examples(25).max_examples * QUICK == 25 * settings().max_examples
        True
        >>> examples(10, 250).max_examples in (10, 250)
        True
    """
    if thorough is not None and settings().max_examples > QUICK:
        return settings(max_examples=thorough)
    return settings(max_examples=max(1, quick * settings().max_examples // QUICK))
