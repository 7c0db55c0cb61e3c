"""Storage: the only package of xckpt that imports tensorstore.

Read in this order: `location` (where), `array` (one zarr array), `commit` (how a save becomes
visible), `write_checkpoint`, `chunks` (reading chunks), `read_checkpoint`, `checkpoint` (an open
checkpoint). A storage of another kind implements `StorageWriter` and `StorageReader`.

The package imports none of its modules. If it did, two threads that import different ones at once,
such as a save and a `gc` that are a process's first calls, would wait for each other, and Python
gives one of them a module that is not whole.
"""

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from xckpt.core.storage import StorageReader, StorageWriter
from xckpt.engine.last_tasks import begin_task
from xckpt.engine.limits import check_loaded

if TYPE_CHECKING:
    from xckpt.storage.read_checkpoint import ZarrStorageReader
    from xckpt.storage.write_checkpoint import ZarrStorageWriter

__all__ = ["StorageReader", "StorageWriter", "ZarrStorageReader", "ZarrStorageWriter"]

check_loaded()
with ThreadPoolExecutor(1, "xckpt-import") as _threads:
    # A signal interrupts the main thread alone, and half a TensorStore ends the process later.
    begin_task(_threads, lambda: importlib.import_module("tensorstore")).result()


def __getattr__(name: str) -> object:
    """Import what reads and writes when it is first used."""
    places = {"ZarrStorageReader": "read_checkpoint", "ZarrStorageWriter": "write_checkpoint"}
    if name in places:
        return getattr(importlib.import_module(f"xckpt.storage.{places[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a user may name, for completion: also what is not loaded yet."""
    return __all__
