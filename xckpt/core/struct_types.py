"""Preparing msgspec's struct types before threads use them.

msgspec reads a struct's annotations when the type is first decoded or converted to. Where two
threads do so at the same moment, the process can end with a segmentation fault (msgspec 0.22.0:
once in 300 first saves by two ranks that are threads). So each type that is used outside of a
module's own ``Decoder`` is prepared when its module is imported, which one thread does.
"""

from __future__ import annotations

import msgspec


def prepare_structs(*kinds: type[msgspec.Struct]) -> None:
    """Build msgspec's type information now.

    Example:
        >>> class Point(msgspec.Struct):
        ...     x: int
        >>> prepare_structs(Point)
        >>> msgspec.convert({"x": 1}, Point)
        Point(x=1)
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
