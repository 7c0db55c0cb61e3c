"""Where a save is staged, told to ranks whose plan is an old one.

With ``DefaultSavePlanner(enable_plan_caching=True)`` DCP sends no plan where nothing changed: a
rank writes by the plan of an earlier save, which cannot know where this save is staged. So:

1. The plan says which process coordinates (`SESSION`, a name that each process gives itself once).
2. When the coordinator sends no plans, it names the place in the store that all ranks share, under
   its session and the checkpoint's path, before it lets the ranks go on.
3. A rank that is about to write looks there first. If nothing is there, its plan is a new one.
4. The coordinator takes the name away when the save is over, and at the latest before it plans the
   next save to that path, so that no rank ever finds the place of an earlier one.
"""

from __future__ import annotations

import uuid
from typing import Final

import msgspec
import torch.distributed as dist

from xckpt.storage.location import Location

__all__ = ["SESSION", "find", "forget", "name"]

SESSION: Final = uuid.uuid4().hex
"""This process, as a coordinator of saves."""


def name(target: Location, place: Location) -> None:
    """Tell the other ranks where this process stages its save to ``target``."""
    store = _store()
    if store is not None:
        place_fields = (place.driver, place.path, place.bucket)
        store.set(_key(SESSION, target), msgspec.msgpack.encode(place_fields).hex())


def find(session: str, target: Location) -> Location | None:
    """Where the process ``session`` stages its save to ``target``; None if it named no place."""
    store = _store()
    key = _key(session, target)
    if store is None or not store.check([key]):
        return None
    return Location(*msgspec.msgpack.decode(bytes.fromhex(store.get(key).decode())))


def forget(target: Location) -> None:
    """Take back what `name` told."""
    store = _store()
    if store is not None:
        store.delete_key(_key(SESSION, target))


def _key(session: str, target: Location) -> str:
    return f"xckpt/{session}/{target}"


def _store() -> dist.Store | None:
    """The store through which the ranks have met; None for a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    world = dist.group.WORLD
    return None if world is None or world.size() == 1 else world.get_group_store()
