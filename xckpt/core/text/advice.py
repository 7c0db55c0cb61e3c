"""Advice about an object that is neither a tensor nor a plain Python value: what to save instead.

Objects are recognised by their types alone; nothing of them is called or printed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import is_dataclass
from datetime import date, datetime, time, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Final

from xckpt.core.text.arguments import named_class

OTHER_DTYPE: Final = "cast it by a rule of a mapping, or choose another format"
"""What to do about a dtype that a format lacks."""
RENAME: Final = "rename one of each by a mapping"
"""What to do about two leaves of one name."""


def no_value(leaf: object, otherwise: str) -> str:
    """A clause on an object that is not a leaf; it ends with what else can be done.

    Example:
        >>> no_value({1}, "or leave it out")
        'a builtins.set is neither a tensor nor a plain Python value; save sorted(...), a list, \
remove it, or leave it out'
    """
    instead = _instead_of(leaf)
    done = f"save {instead}, remove it" if instead else "remove it, convert it"
    return f"{named_class(leaf)} is neither a tensor nor a plain Python value; {done}, {otherwise}"


def _instead_of(leaf: object) -> str:
    match leaf:
        case Enum():
            return f"its .value, of which {type(leaf).__name__}(value) makes it again"
        case datetime() | date() | time():
            return f"its .isoformat(), of which {type(leaf).__name__}.fromisoformat makes it again"
        case timedelta():
            return "its .total_seconds()"
        case PurePath():
            return "str(...) of it"
        case AbstractSet():
            return "sorted(...), a list"
        case deque():
            return "list(...) of it"
        case bytearray() | memoryview():
            return "bytes(...) of it"
        case _ if named_class(leaf).endswith("xckpt.storage.stored_array.StoredArray"):
            return "array[:], its elements"
        case _ if all(callable(getattr(type(leaf), each, None)) for each in ("init", "apply")):
            return "the parameters that its init() makes"  # a module of Flax, which has none
        case _ if callable(getattr(type(leaf), "state_dict", None)):
            return "its state_dict()"
        case _ if is_dataclass(leaf) and not isinstance(leaf, type):
            return "dataclasses.asdict(...), a dict"
        case _ if type(leaf).__module__ == "torch" and type(leaf).__name__ in ("dtype", "device"):
            return "str(...) of it"
        case _:
            return ""
