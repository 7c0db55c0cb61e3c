"""How much address space is left, before what would end the process for lack of it.

TensorStore ends a process in which it cannot be loaded or cannot start its threads. It is loaded
with `xckpt.storage`, and starts its threads with the first store that it opens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from xckpt.core.text.shown import readable_bytes
from xckpt.errors import StorageError

if sys.platform == "linux":
    import resource

TO_LOAD: Final = 1 << 27
"""To load TensorStore, and for what Python needs meanwhile; measured: 57 MiB."""
FOR_THREADS: Final = 1 << 30
"""For the stacks and memory of TensorStore's threads; most is never touched."""


def check_loaded() -> None:
    """Refuse to load TensorStore where it lacks address space.

    Raises:
        StorageError: the limit of the process's address space is too near.
    """
    if "tensorstore" not in sys.modules:
        check_address_space(TO_LOAD, "the library that reads and writes needs")


def check_address_space(size: int, needed_by: str) -> None:
    """Refuse to go on where less than ``size`` bytes of address space are left.

    Raises:
        StorageError: the limit of the process's address space is too near.
    """
    if sys.platform != "linux":
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit - used < size:
        raise StorageError(
            f"the address space of this process is limited to {readable_bytes(limit)}, of which "
            f"{readable_bytes(used)} are taken; {needed_by} {readable_bytes(size)}: raise the "
            f"limit (ulimit -v)"
        )
