"""Wherever a save with a base is cut off, the base is as it was, and the new is whole or absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import xckpt
from conformance.crash.crash import Crashes
from conformance.crash.recording import Recorder
from conformance.crash.scenarios import CHECKPOINT, Scenario, State, found_at, ranks_of, state
from conformance.implementation import Array, Held, Implementation
from conformance.implementations.xckpt import Xckpt
from tests.conformance.crash import places
from xckpt.core import commit
from xckpt.storage.base import linking
from xckpt.storage.packs import write_packs

FORM = "any boxes"
BASE = "base"
FROZEN = np.arange(40, dtype=np.float64).reshape(10, 4)
OLD: State = {**state(1, form=FORM), "frozen": FROZEN}
NEW: State = {**state(2, form=FORM), "frozen": FROZEN}


class Based(Xckpt):
    """Every save has a base, if there is one beside its path or at it."""

    name = "xckpt, with a base"

    def base(self, path: Path) -> Path | None:
        return next((each for each in (path.with_name(BASE), path) if each.exists()), None)

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        return xckpt.SaveOptions(chunk_bytes=64)


class BasedSlabs(Based, places.Slabs):
    """Large chunks too, and folders that are synced in one call."""

    name = "xckpt, slabs with a base"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(commit, "MANY_SHARED", 1):
            super().save(path, ranks, overwrite=overwrite)


class BasedGenerations(Based, places.Generations):
    name = "xckpt, generations with a base"


class BasedPacks(Based):
    """Each chunk is a pack, and the unchanged ones are shared."""

    name = "xckpt, packs with a base"

    def save_options(self, arrays: Mapping[str, Array]) -> xckpt.SaveOptions:
        return xckpt.SaveOptions(chunk_bytes=64, pack_bytes=64)

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        with mock.patch.object(write_packs, "PACK_BYTES", 1):
            super().save(path, ranks, overwrite=overwrite)


class NotSynced(Based):
    """A fault: the new names may be missing after a power cut."""

    name = "xckpt, shared names not synced"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        alone = mock.patch.object(commit, "MANY_SHARED", 1 << 20)
        with alone, mock.patch.object(linking, "sync_folder"):
            super().save(path, ranks, overwrite=overwrite)


def save_old(implementation: Implementation, folder: Path, name: str) -> None:
    implementation.save(folder / name, ranks_of(OLD, FORM))


def save_new(implementation: Implementation, folder: Path) -> None:
    implementation.save(folder / CHECKPOINT, ranks_of(NEW, FORM), overwrite=True)


def scenario(law: str, *meanwhile: str) -> Scenario:
    new = frozenset({"new"})
    return Scenario(law, True, lambda *_: None, frozenset(meanwhile), new, new)


class BaseCrashes(Crashes):
    """Crashes of a save beside its base, which every reader finds as it was, or over its base."""

    def found_in(self, folder: Path) -> str:
        states = {"old": OLD, "new": NEW}
        if self.scenario.law == "beside":
            assert found_at(self.implementation, folder / BASE, states) == "old"
        return found_at(self.implementation, folder / CHECKPOINT, states)


def crashes_of(implementation: Implementation, law: str, folder: Path) -> Crashes:
    recorded = folder / "recorded"
    recorded.mkdir()
    beside = law == "beside"
    with Recorder(implementation) as recorder:
        recorder.do(save_old, recorded, BASE if beside else CHECKPOINT)
        recording = recorder.record(recorded, save_new, recorded)
    chunks = "xckpt.packs/*" if isinstance(implementation, BasedPacks) else "frozen/c/*/*"
    shared = {path.stat().st_ino for path in (recorded / CHECKPOINT).rglob(chunks)}
    if beside:
        shared &= {path.stat().st_ino for path in (recorded / BASE).rglob(chunks)}
    assert len(shared) > 3
    expected = scenario(law, "error" if beside else "old", "new")
    return BaseCrashes(implementation, expected, recording, FORM, folder / "replayed")


@pytest.mark.parametrize("law", ["beside", pytest.param("over", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "implementation",
    [
        Based(),
        pytest.param(BasedPacks(), marks=pytest.mark.thorough),
        pytest.param(BasedSlabs(), marks=pytest.mark.thorough),
        pytest.param(BasedGenerations(), marks=pytest.mark.thorough),
    ],
    ids=lambda i: i.name,
)
def test_every_kill_and_some_power_cuts(
    implementation: Implementation, law: str, tmp_path: Path
) -> None:
    crashes = crashes_of(implementation, law, tmp_path)
    crashes.kills()
    crashes.power_cuts(8, seed=1)
    assert [fault.error for fault in crashes.faults] == []
    assert crashes.found["new"] and crashes.found["error" if law == "beside" else "old"]


@pytest.mark.thorough
@pytest.mark.parametrize("law", ["beside", "over"])
@pytest.mark.parametrize(
    "implementation",
    [Based(), BasedPacks(), BasedSlabs(), BasedGenerations()],
    ids=lambda i: i.name,
)
def test_very_many_power_cuts(implementation: Implementation, law: str, tmp_path: Path) -> None:
    crashes = crashes_of(implementation, law, tmp_path)
    crashes.power_cuts(200, seed=2)
    assert [fault.error for fault in crashes.faults] == []


@pytest.mark.thorough
def test_names_that_are_not_synced_are_found(tmp_path: Path) -> None:
    crashes = crashes_of(NotSynced(), "beside", tmp_path)
    crashes.power_cuts(20, seed=1)
    assert crashes.faults
