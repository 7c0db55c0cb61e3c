"""How many steps a call takes: what a bar on its growth counts in the default tier.

Seconds depend on what else the machine does; steps do not. Bars in seconds belong to the thorough
tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def steps(call: Callable[[], object]) -> int:
    """How many functions, Python's own among them, are called in this thread.

    Example:
        >>> steps(lambda: len("a")) - steps(lambda: None)
        1
    """
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return count
