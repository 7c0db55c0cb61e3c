"""Has the coordinator remove what was staged when a rank fails to write.

DCP tells a storage writer nothing of another rank's failure, but all ranks have met through a store
(`shared_store`). There:

1. Each rank counts itself when it has stopped writing (`note_stopped`), and says so if it failed
   (`note_failed`).
2. The coordinator looks from a thread (`FailureWatch`). Once a rank has failed and all have
   stopped, it removes the staging and says that it is gone. Before that it would be written again.
3. A rank that failed waits for that before it raises, but not for ever: another rank may be lost.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

POLL_SECONDS: Final = 0.05
WAIT_SECONDS: Final = 30.0
"""How long a rank that failed waits for the others to stop; they are waited for later anyway."""


def shared_store() -> dist.Store | None:
    """The store through which all ranks have met; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    return None if world is None or world.size() == 1 else world.get_group_store()


def note_stopped(save: str) -> None:
    """This rank has stopped writing the save of this name."""
    store = shared_store()
    if store is not None:
        store.add(_key(save, "stopped"), 1)


def note_failed(save: str) -> None:
    """This rank has failed and stopped; return when the staging is gone, or after a while."""
    store = shared_store()
    if store is None:
        return
    with contextlib.suppress(RuntimeError):  # the coordinator may be gone, store and all
        store.set(_key(save, "failed"), "1")
        store.add(_key(save, "stopped"), 1)
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end and not store.check([_key(save, "gone")]):
            time.sleep(POLL_SECONDS)


class FailureWatch:
    """The coordinator's thread that looks for a failure of any rank."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, save: str, ranks: int, remove: Callable[[], object]) -> None:
        """Begin to look.

        Args:
            save: the name of the save.
            ranks: how many write.
            remove: removes what was staged; called at most once.
        """
        store = shared_store()
        if store is not None:
            self._thread = threading.Thread(
                target=self._watch, args=(store, save, ranks, remove), daemon=True
            )
            self._thread.start()

    def _watch(
        self, store: dist.Store, save: str, ranks: int, remove: Callable[[], object]
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the store may go with the process group
            while not self._over.wait(POLL_SECONDS):
                failed = store.check([_key(save, "failed")])
                if failed and store.add(_key(save, "stopped"), 0) >= ranks:
                    remove()
                    store.set(_key(save, "gone"), "1")
                    return
            store.delete_key(_key(save, "stopped"))

    def stop(self) -> None:
        """Look no longer."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(WAIT_SECONDS)


def _key(save: str, what: str) -> str:
    return f"xckpt/{save}/{what}"
