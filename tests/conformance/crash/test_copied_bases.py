"""Wherever a save dies whose bucket copies from a base, that is as it was, and the new is whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import xckpt
from conformance.crash.bucket import Recording, crashes
from conformance.crash.scenarios import CHECKPOINT, found_at, ranks_of
from conformance.implementation import Array
from tests.conformance.crash.holding import Holding
from tests.conformance.crash.test_bases import BASE, FORM, FROZEN, NEW, OLD
from tests.conformance.crash.test_bucket import InStore, fill

LAWS = ("beside", "over")
_numbers = itertools.count()


class Copied(InStore):
    """Saves share with a base that lies in the same bucket, once there is one."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.found: str | None = None
        self.taken: list[xckpt.Metrics] = []

    def base(self, path: Path) -> str | None:
        return self.found

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        return xckpt.SaveOptions(chunk_bytes=64, metrics=self.taken.append)


def record(bucket: Holding, law: str) -> Recording:
    """A save by several ranks, beside its base or over it."""
    folder, saver = Path(f"based-{next(_numbers)}"), Copied(bucket.url)
    path = folder / (BASE if law == "beside" else CHECKPOINT)
    saver.save(path, ranks_of(OLD, FORM))
    saver.found = saver.place(path)
    saver.taken.clear()

    def act() -> None:
        saver.save(folder / CHECKPOINT, ranks_of(NEW, FORM), overwrite=True)

    recording = bucket.record(f"{folder}/", act)
    assert sum(each.shared for each in saver.taken) == FROZEN.nbytes
    return recording


def faults(recording: Recording, law: str, most: int) -> Iterator[str]:
    """What readers find and may not, after some of the crashes."""
    states, every = {"old": OLD, "new": NEW}, list(crashes(recording))
    for crash in random.Random(1).sample(every, min(most, len(every))):
        reader, folder = fill(crash.left)
        ended = crash.count == len(recording.events)
        allowed = {"new"} if ended else {"new", "error" if law == "beside" else "old"}
        found = found_at(reader, folder / CHECKPOINT, states)
        if found not in allowed:
            yield f"after {crash.count} of {len(recording.events)} events: {found}"
        if law == "beside" and found_at(reader, folder / BASE, states) != "old":
            yield f"after {crash.count} of {len(recording.events)} events: the base is spoilt"


@pytest.mark.parametrize("law", LAWS)
def test_a_crash_leaves_old_or_new(bucket: Holding, law: str) -> None:
    assert list(faults(record(bucket, law), law, 25)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("law", LAWS)
def test_every_crash_leaves_old_or_new(bucket: Holding, law: str) -> None:
    assert list(faults(record(bucket, law), law, 1_000_000)) == []
