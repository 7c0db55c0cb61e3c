"""Where a save is staged, told to ranks whose plan is an old one.

With ``DefaultSavePlanner(enable_plan_caching=True)`` DCP sends no plan where nothing has changed: a
rank writes by the plan of an earlier save, which cannot know where this save is staged. So:

1. A plan says which process coordinates (`SESSION`, a name that each process gives itself once).
2. When the coordinator sends no plans, it names the place in the store through which all ranks have
   met, under its session and the checkpoint's path, before it lets the ranks go on.
3. A rank that is about to write looks there first. If nothing is there, its plan is a new one.
4. The coordinator takes the name away when the save is over. Until then it begins no other such
   save to that path, so that no rank ever finds the place of another save.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from typing import Final

import msgspec
import torch.distributed as dist

from xckpt.core.struct_types import prepare_structs
from xckpt.errors import CheckpointExistsError
from xckpt.storage.location import Location

__all__ = ["SESSION", "Place", "find", "forget", "name"]

SESSION: Final = uuid.uuid4().hex
"""This process, as a coordinator of saves."""

_named: set[str] = set()
_lock = threading.Lock()


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a save is staged, and a name for the save itself."""

    save: str
    driver: str
    path: str
    bucket: str

    @classmethod
    def of(cls, save: str, location: Location) -> Place:
        """The place of a save that is staged at ``location``."""
        return cls(save, location.driver, location.path, location.bucket)

    @property
    def location(self) -> Location:
        """Where the root group is staged."""
        return Location(self.driver, self.path, self.bucket)


prepare_structs(Place)


def name(target: Location, place: Place) -> None:
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
    store = _store()
    if store is not None:
        store.set(_key(SESSION, target), msgspec.json.encode(place).decode())


def find(session: str, target: Location) -> Place | None:
    """Where the process ``session`` stages its save to ``target``; None if it named no place."""
    store = _store()
    key = _key(session, target)
    if store is None or not store.check([key]):
        return None
    return msgspec.json.decode(store.get(key), type=Place)


def forget(target: Location) -> None:
    """Take back what `name` told, if it did."""
    with _lock:
        if str(target) not in _named:
            return
        store = _store()
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the others may have gone, store and all
                store.delete_key(_key(SESSION, target))
        _named.discard(str(target))


def _key(session: str, target: Location) -> str:
    return f"xckpt/{session}/{target}"


def _store() -> dist.Store | None:
    """The store through which the ranks have met; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    return None if world is None or world.size() == 1 else world.get_group_store()
