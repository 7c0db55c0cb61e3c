"""Crashes of a save to an object store: a store of whole objects, without renames or folders.

An object store does each request whole or not at all, and the client can rely on an answer. So
there is nothing to sync, and what a crash leaves open is which of the requests happened that were
sent and not yet answered:

1. A `Recording` lists the beginnings and ends of all requests that change something, as the store
   saw them.
2. After each prefix of the list the saver may die. What had ended has happened; of what was under
   way any part may have happened, in any order (`crashes`). Some of it may even happen later, when
   others have begun to save.
3. A request may depend on what is there (`Change.only_if`): then it happens only if that holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Change", "Crash", "Event", "Objects", "Recording", "apply", "crashes"]

ALL_SUBSETS = 4
"""Up to this many requests under way, every subset of them is tried."""

Objects = Mapping[str, tuple[int, bytes]]
"""What a store holds: key -> (version, content).

A condition asks for a version: a new generation for each write (GCS), or an ETag as a
number, which equal contents share (S3).
"""


@dataclass(frozen=True, slots=True)
class Change:
    """A request to write an object, or to delete it."""

    key: str
    content: bytes | None
    """None to delete it."""
    only_if: int | None = None
    """Only if the object has this version; 0: only if there is none."""
    version: int = -1
    """What the object's is to be; a negative one stands for any unused version."""

    def __repr__(self) -> str:
        verb = "delete" if self.content is None else f"write {len(self.content)} bytes to"
        return f"{verb} {self.key}" + ("" if self.only_if is None else f" if {self.only_if}")


@dataclass(frozen=True, slots=True)
class Event:
    """The beginning or the end of a request."""

    number: int
    """The number of the request."""
    change: Change
    ended: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """What an action did to a store."""

    before: Objects
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Crash:
    """A moment, and what the store may hold then."""

    count: int
    """The number of events before it."""
    left: Objects
    late: tuple[Change, ...]
    """What was under way and has not happened yet."""


def apply(objects: Objects, changes: Sequence[Change]) -> Objects:
    """What a store holds after some requests, one after the other.

    Example:
        >>> once = Change("a", b"1", only_if=0, version=7)
        >>> apply({}, [once, Change("a", b"2", only_if=0)])
        {'a': (7, b'1')}
    """
    found = dict(objects)
    for change in changes:
        if change.only_if not in (None, found.get(change.key, (0, b""))[0]):
            continue
        if change.content is None:
            found.pop(change.key, None)
        else:
            found[change.key] = change.version, change.content
    return found


def crashes(recording: Recording) -> Iterator[Crash]:
    """Every crash after every prefix; each content of the store once for each prefix."""
    objects, under_way = recording.before, dict[int, Change]()
    yield Crash(0, objects, ())
    for count, event in enumerate(recording.events, 1):
        if event.ended:
            under_way.pop(event.number)
            objects = apply(objects, [event.change])
        else:
            under_way[event.number] = event.change
        seen: list[Objects] = []
        for happened in _parts(tuple(under_way.values())):
            left = apply(objects, happened)
            if left not in seen:
                seen.append(left)
                late = tuple(each for each in under_way.values() if each not in happened)
                yield Crash(count, left, late)


def _parts(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Every part in every order if they are few; else none, all, each alone, all but each."""
    if len(changes) <= ALL_SUBSETS:
        for size in range(len(changes) + 1):
            yield from itertools.permutations(changes, size)
        return
    yield ()
    yield tuple(changes)
    yield tuple(reversed(changes))
    for one in changes:
        yield (one,)
        yield tuple(each for each in changes if each is not one)
