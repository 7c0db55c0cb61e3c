"""The opcodes of a pickle, and how much memory what they make takes.

The standard library's `pickletools` decodes them, which runs nothing. One byte can make an empty
dict: what all opcodes have made is counted before the next is carried out.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from xckpt.storage.foreign.documents import Allowance

STEP_BYTES: Final = 1 << 12
"""Bytes that are counted at a time."""
LEAST_COST: Final = 16
"""Bytes of an opcode that makes no object: a place on the stack, in a list or in the memo."""
COSTS: Final[Mapping[str, int]] = {
    "MARK": 48,
    "EMPTY_LIST": 88,
    "EMPTY_DICT": 160,
    **dict.fromkeys(("TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"), 80),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL", "BINPERSID"), 160),
    **dict.fromkeys(("REDUCE", "NEWOBJ"), 96),
}
"""Opcode -> bytes of what it makes, beside its argument; measured with CPython 3.11."""


def opcodes(data: bytes, memory: Allowance) -> Iterator[tuple[str, Any, int]]:
    r"""(name, argument, position) of each opcode.

    Raises:
        MemoryLimitError: what they make takes too much memory.
        ValueError: the pickle is damaged.

    Example:
        >>> list(opcodes(b"\x80\x02K\x07.", Allowance()))
        [('PROTO', 2, 0), ('BININT1', 7, 2), ('STOP', None, 4)]
    """
    taken = counted = 0
    for opcode, argument, position in pickletools.genops(data):
        taken += COSTS.get(opcode.name, LEAST_COST)
        if argument is not None:
            taken += sys.getsizeof(argument)
        if taken > STEP_BYTES:
            what = f"the first {position or 0:,} of {len(data):,} bytes of the pickle"
            memory.take(taken, what, counted)
            taken, counted = 0, counted + taken
        yield opcode.name, argument, position or 0


def after_keys(stack: Sequence[object]) -> str:
    """Where a fault of a pickle lies: the keys that it has read and not yet used.

    Example:
        >>> after_keys([{}, "model", {}, "w"]), after_keys([])
        (" (after 'model', 'w')", '')
    """
    keys = [repr(each)[:200] for each in stack if isinstance(each, str)][-8:]
    return f" (after {', '.join(keys)})" if keys else ""
