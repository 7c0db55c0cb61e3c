"""A save to an object store may die at any moment: nothing committed is lost, or mixed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import xckpt
from conformance.crash import scenarios
from conformance.crash.bucket import Change, Crash, Event, Objects, Recording, apply, crashes
from conformance.crash.scenarios import CHECKPOINT, SCENARIOS, STATES, Scenario, found_at
from conformance.implementation import Array, Held
from conformance.implementations.xckpt import Xckpt
from tests.conformance.crash.holding import Holding
from xckpt.storage.location import Location, open_store

FORM = "any boxes"
MANIFEST = "xckpt.json"
_numbers = itertools.count()


class InStore(Xckpt):
    """xckpt at URLs; a delete as the specification has it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url

    def place(self, path: Path) -> str:
        return f"{self.url}/{path}"

    def delete(self, path: Path) -> None:
        store = open_store(Location.parse(self.place(path)))
        keys = sorted(store.list().result(), key=lambda key: key != MANIFEST.encode())
        store.write(keys[0], None).result()
        for deleted in [store.write(key, None) for key in keys[1:]]:
            deleted.result()


class ManifestFirst(InStore):
    """A fault: the old manifest is deleted before the new one is there."""

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        if overwrite and self._is_there(path):
            self.delete(path)
        super().save(path, ranks, overwrite=overwrite)

    def _is_there(self, path: Path) -> dict[str, Array] | None:
        try:
            return self.list(path)
        except xckpt.NotACheckpointError:
            return None


def record(bucket: Holding, scenario: Scenario, kind: type[InStore]) -> Recording:
    """Play a scenario in the bucket."""
    folder = Path(f"{next(_numbers)}")
    saver = kind(bucket.url)
    if scenario.old:
        scenarios.save(saver, folder, "old", FORM)
    return bucket.record(f"{folder}/", lambda: scenario.act(saver, folder, FORM))


def fill(objects: Objects) -> tuple[InStore, Path]:
    """A place in memory that holds these objects."""
    reader, folder = InStore("memory:/"), Path(f"{next(_numbers)}")
    store = open_store(Location.parse(reader.place(folder)))
    for key, (_, content) in objects.items():
        store.write(key, content).result()
    return reader, folder


def found_in(place: tuple[InStore, Path]) -> str:
    reader, folder = place
    return found_at(reader, folder / CHECKPOINT, STATES[FORM])


def allowed(scenario: Scenario, recording: Recording, crash: Crash) -> frozenset[str]:
    last = crash.count == len(recording.events)
    return scenario.at_last if last else scenario.meanwhile


def faults(scenario: Scenario, recording: Recording, most: int) -> Iterator[str]:
    """What readers find and may not; every prefix with most or little of it, and others."""
    every = list(crashes(recording))
    if len(every) > most:
        every = random.Random(1).sample(every, most)
    for crash in every:
        try:
            found = found_in(fill(crash.left))
        except AssertionError as error:
            found = str(error)
        if found not in allowed(scenario, recording, crash):
            yield f"after {crash.count} of {len(recording.events)} events: {found}"


@pytest.fixture(scope="module")
def recordings(bucket: Holding) -> dict[str, Recording]:
    return {scenario.law: record(bucket, scenario, InStore) for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.law)
def test_a_crash_leaves_old_or_new(recordings: dict[str, Recording], scenario: Scenario) -> None:
    recording = recordings[scenario.law]
    assert len(recording.events) > 20
    assert list(faults(scenario, recording, 25)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.law)
def test_every_crash_leaves_old_or_new(
    recordings: dict[str, Recording], scenario: Scenario
) -> None:
    assert list(faults(scenario, recordings[scenario.law], 1_000_000)) == []


def test_requests_that_are_not_awaited_are_under_way_together(
    recordings: dict[str, Recording],
) -> None:
    for recording in recordings.values():
        under_way = itertools.accumulate(-1 if each.ended else 1 for each in recording.events)
        assert max(under_way) >= 5


def test_the_manifest_is_written_when_nothing_else_is_under_way(
    recordings: dict[str, Recording],
) -> None:
    for law in ("crash-save", "crash-overwrite"):
        under_way: set[int] = set()
        for event in recordings[law].events:
            if event.change.key == f"{CHECKPOINT}/{MANIFEST}" and not event.ended:
                assert not under_way and event.change.only_if is not None
            (under_way.discard if event.ended else under_way.add)(event.number)


@pytest.mark.parametrize("law", ["crash-save", "crash-overwrite"])
def test_what_a_dead_saver_sent_may_arrive_after_the_next_save(
    recordings: dict[str, Recording], law: str
) -> None:
    """Requests under way when it died happen after another save: they change nothing."""
    moments = [crash for crash in crashes(recordings[law]) if crash.late]
    tried: Counter[str] = Counter()
    for crash in random.Random(2).sample(moments, 12):
        saver, folder = place = fill(crash.left)
        scenarios.save(saver, folder, "next", FORM)
        store = open_store(Location.parse(saver.place(folder)))
        for change in crash.late:
            now = store.read(change.key).result()
            before = crash.left.get(change.key)
            same = (now.value if now.state == "value" else None) == (before and before[1])
            current = (before[0] if before else 0) if same else -1
            if change.only_if in (None, current):
                store.write(change.key, change.content).result()
                tried["happened"] += 1
            else:
                tried["did not"] += 1
        assert found_in(place) == "next", crash
    assert tried["happened"]


def test_a_fault_is_found(bucket: Holding) -> None:
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.law == "crash-overwrite")
    recording = record(bucket, scenario, ManifestFirst)
    assert any("error" in fault for fault in faults(scenario, recording, 100))


def test_what_was_answered_has_happened_and_the_rest_may_have() -> None:
    one, other = Change("a", b"1", version=1), Change("b", b"2", version=2)
    events = (Event(0, one, False), Event(1, other, False), Event(1, other, True))
    found = {(crash.count, *sorted(crash.left)) for crash in crashes(Recording({}, events))}
    assert found == {(0,), (1,), (1, "a"), (2,), (2, "a"), (2, "b"), (2, "a", "b")} | {
        (3, "b"),
        (3, "a", "b"),
    }


def test_of_two_that_create_an_object_either_may_win() -> None:
    writes = [Change("a", bytes([n]), only_if=0, version=n) for n in (1, 2)]
    events = tuple(Event(n, change, False) for n, change in enumerate(writes))
    found = [crash.left for crash in crashes(Recording({}, events)) if crash.count == 2]
    assert found == [{}, {"a": (1, b"\1")}, {"a": (2, b"\2")}]
    assert apply({"a": (5, b"")}, [Change("a", None, only_if=4)]) == {"a": (5, b"")}
    assert apply({"a": (5, b"")}, [Change("a", None, only_if=5)]) == {}


def test_many_under_way_are_tried_alone_and_without_each() -> None:
    events = tuple(Event(n, Change(str(n), b"", version=n), False) for n in range(9))
    found = [set(crash.left) for crash in crashes(Recording({}, events)) if crash.count == 9]
    names = {str(n) for n in range(9)}
    assert len(found) == 20 and names in found and names - {"4"} in found and {"4"} in found
