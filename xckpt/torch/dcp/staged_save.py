"""A save of DCP under way: where it is staged, and what ranks exchange besides DCP's own steps.

All ranks have met through a store (`shared_store`), which carries what DCP does not.

**The place.** With ``DefaultSavePlanner(enable_plan_caching=True)`` DCP sends no plan where nothing
has changed: a rank writes by the plan of an earlier save, which cannot know where this save is
staged. So:

1. A plan names the process that coordinates (`SESSION`, chosen once by each process).
2. When the coordinator sends no plans, it names the place (`name_place`) under its session and the
   checkpoint's path, before the ranks go on.
3. A rank that is about to write looks there first (`find_place`). If nothing is there, its plan is
   a new one.
4. The coordinator removes the entry when the save is over (`forget_place`). Until then it begins no
   other such save to that path, so that no rank ever finds the place of another save.

**Failures.** DCP tells a storage writer nothing of another rank's failure. So:

1. Each rank counts itself when it has stopped writing (`note_stopped`), and says so if it failed
   (`note_failed`).
2. The coordinator looks from a thread (`watch_failures`). Once a rank has failed and all have
   stopped, it removes the staging and says so. Any sooner, a rank that still writes would make the
   staging again.
3. A rank that failed waits for that before it raises, but only for a while: another rank may be
   lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from xckpt.core.metadata import Metadata
from xckpt.core.struct_types import prepare_structs
from xckpt.engine.ranks.launched import COUNTS, launched_with
from xckpt.errors import CheckpointExistsError
from xckpt.storage.chunks.orders import WriteOrders
from xckpt.storage.location import Access, Location
from xckpt.storage.write_checkpoint import ZarrStorageWriter
from xckpt.torch.dcp.hook_watch import HookWatch

SESSION: Final = uuid.uuid4().hex
"""This process, as a coordinator of saves."""
POLL_SECONDS: Final = 0.05
WAIT_SECONDS: Final = 30.0
"""How long a rank that failed waits for the others to stop; they are waited for later anyway."""

_named: set[str] = set()
_lock = threading.Lock()


class StagingPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where a save is staged, and a name for the save itself."""

    save: str
    location: Location
    """The place of the root group."""


class Orders(msgspec.Struct, array_like=True, frozen=True):
    """What a rank's plan carries; it must stay true as long as DCP may repeat the plan."""

    session: str
    """The process that coordinates."""
    place: StagingPlace
    """Where the save for which the plan was made is staged."""
    names: dict[str, str]
    """fqn -> leaf name."""
    writes: WriteOrders
    ranks: int = 1
    """How many ranks write."""


prepare_structs(StagingPlace, Orders)


class StagedSave:
    """A save under way, as one rank sees it."""

    def __init__(
        self, writer: ZarrStorageWriter, rank: int, is_coordinator: bool, watch: HookWatch
    ) -> None:
        self.writer = writer
        self.rank = rank
        self.is_coordinator = is_coordinator
        self.watch = watch
        self.local: dcp.SavePlan = dcp.SavePlan([])
        """What this rank offers to write."""
        self.ranks: int = 0
        """How many ranks write; known to the coordinator alone."""
        self.place: StagingPlace | None = None
        """Where the save is staged; known to the coordinator alone."""
        self.metadata: Metadata | None = None
        self.names: dict[str, str] = {}
        self._undo = contextlib.ExitStack()
        self._undo.callback(writer.abort)
        self._undo.callback(forget_place, writer.target)
        self.abort: Final = weakref.finalize(self, self._undo.close)
        """Removes the staging, if there is one; called at the latest with the last reference."""

    def stage(self, ranks: int) -> StagingPlace:
        """Reserve a place to write to, on the coordinator."""
        self.ranks = ranks
        self.place = StagingPlace(uuid.uuid4().hex, replace(self.writer.stage(), access=Access()))
        store = shared_store()
        if ranks > 1 and store is not None:
            self._undo.callback(watch_failures(store, self.place.save, ranks, self.abort))
        return self.place


def shared_store() -> dist.Store | None:
    """The store through which all ranks have met; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    return None if world is None or world.size() == 1 else world.get_group_store()


def warn_of_saving_alone(path: str | os.PathLike[str]) -> None:
    """Warn where a launcher has started several processes that no process group joins.

    `xckpt.save` refuses that. DCP tells a writer nothing of ``no_dist=True``, which means it.
    """
    launched = launched_with(os.environ)
    if launched is None or (dist.is_available() and dist.is_initialized()):
        return
    variable, count = launched
    warnings.warn(
        f"{variable} says that there are {count} processes ({COUNTS[variable]}), but no process "
        f"group joins them: dcp.save takes this process alone, and each that saves to "
        f"{os.fspath(path)} replaces what another has saved there. Call "
        f"torch.distributed.init_process_group() first; no_dist=True on one of them is fine",
        stacklevel=3,
    )


def _key(of: str, what: object) -> str:
    return f"xckpt/{of}/{what}"


def name_place(target: Location, place: StagingPlace) -> None:
    """Tell the other ranks where this process stages its save to ``target``.

    Raises:
        CheckpointExistsError: another save by cached plans to the same path is under way.
    """
    with _lock:
        if str(target) in _named:
            raise CheckpointExistsError(
                f"{target}: another save with cached plans is under way here; wait for it"
            )
        _named.add(str(target))
    store = shared_store()
    if store is not None:
        # A store takes text, and JSON has no infinite timeouts.
        store.set(_key(SESSION, target), msgspec.msgpack.encode(place).hex())


def find_place(session: str, target: Location) -> StagingPlace | None:
    """Where the process ``session`` stages its save to ``target``; None if it named no place."""
    store, key = shared_store(), _key(session, target)
    if store is None or not store.check([key]):
        return None
    return msgspec.msgpack.decode(bytes.fromhex(store.get(key).decode()), type=StagingPlace)


def forget_place(target: Location) -> None:
    """Take back what `name_place` has said, if it has."""
    with _lock:
        if str(target) not in _named:
            return
        store = shared_store()
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the others may have gone, store and all
                store.delete_key(_key(SESSION, target))
        _named.discard(str(target))


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


def watch_failures(
    store: dist.Store, save: str, ranks: int, remove: Callable[[], object]
) -> Callable[[], None]:
    """Begin the coordinator's thread that looks for a failure of any rank; returns what ends it.

    Args:
        store: where the ranks leave their notes.
        save: the name of the save.
        ranks: how many write.
        remove: removes what was staged; called at most once.
    """
    over = threading.Event()

    def look() -> None:
        with contextlib.suppress(RuntimeError):  # the store may go with the process group
            while not over.wait(POLL_SECONDS):
                failed = store.check([_key(save, "failed")])
                if failed and store.add(_key(save, "stopped"), 0) >= ranks:
                    remove()
                    store.set(_key(save, "gone"), "1")
                    return
            store.delete_key(_key(save, "stopped"))

    thread = threading.Thread(target=look, daemon=True)

    def stop() -> None:
        over.set()
        if thread is not threading.current_thread():
            thread.join(WAIT_SECONDS)

    thread.start()
    return stop
