"""Struct types that threads may use at once from the start.

msgspec looks at a struct's annotations when the type is first decoded or converted to. Where two
threads do so at the same moment the process ends with a segmentation fault (msgspec 0.22.0, once in
300 first saves by two ranks that are threads). So each type that is used outside of a module's own
``Decoder`` is looked at when its module is imported, which one thread does.
"""

from __future__ import annotations

import msgspec

__all__ = ["look_at_types"]


def look_at_types(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec look at struct types now.

    Example:
        >>> class Point(msgspec.Struct):
        ...     x: int
        >>> look_at_types(Point)
        >>> msgspec.convert({"x": 1}, Point)
        Point(x=1)
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
