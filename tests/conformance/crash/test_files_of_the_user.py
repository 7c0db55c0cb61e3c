"""Wherever an overwrite is cut off, the user's files are in the checkpoint's folder, and stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from conformance.crash.crash import Crashes, EnoughError, form_for, record
from conformance.crash.recording import Recorder
from conformance.crash.scenarios import SCENARIOS
from conformance.implementation import Array, Held
from conformance.implementations.xckpt import Xckpt
from tests.conformance.crash import places

FILES = {"config.json": "{}", "tokenizer/vocab.txt": "a b", "w/notes.txt": "among the chunks"}
(OVERWRITE,) = (scenario for scenario in SCENARIOS if scenario.law == "crash-overwrite")


class WithFiles(Xckpt):
    """Files are put into the folder of a first checkpoint; a reader looks for them."""

    name = "xckpt, with files"

    def save(
        self, path: Path, ranks: Sequence[Mapping[str, Held]], *, overwrite: bool = False
    ) -> None:
        first = not path.exists()
        super().save(path, ranks, overwrite=overwrite)
        for name, text in FILES.items() if first else ():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)

    def list(self, path: Path) -> dict[str, Array]:
        for name, text in FILES.items():
            # What is among the chunks is moved after the exchange.
            if not name.startswith("w/"):
                assert (path / name).read_text() == text, name
        return super().list(path)


class InGenerations(WithFiles, places.Generations):
    name = "xckpt, generations with files"


class Losing(WithFiles, places.Patched):
    """A fault: nothing is carried over."""

    name = "xckpt, files not carried"
    function = "carry"
    replacement = staticmethod(lambda *_: None)


def crashes_of(implementation: WithFiles, folder: Path, *, stop: bool = False) -> Crashes:
    with Recorder(implementation) as recorder:
        form = form_for(recorder)
        (folder / "recorded").mkdir()
        recording = record(recorder, OVERWRITE, folder / "recorded", form=form)
    return Crashes(implementation, OVERWRITE, recording, form, folder / "replayed", stop=stop)


@pytest.mark.parametrize(
    "implementation",
    [WithFiles(), pytest.param(InGenerations(), marks=pytest.mark.thorough)],
    ids=lambda i: i.name,
)
def test_every_kill_and_some_power_cuts_keep_them(
    implementation: WithFiles, tmp_path: Path
) -> None:
    crashes = crashes_of(implementation, tmp_path)
    crashes.kills()
    crashes.power_cuts(6, seed=1)
    assert [fault.error for fault in crashes.faults] == []
    assert crashes.found["old"] and crashes.found["new"]


@pytest.mark.parametrize(
    "implementation",
    [WithFiles(), pytest.param(InGenerations(), marks=pytest.mark.thorough)],
    ids=lambda i: i.name,
)
def test_the_save_after_a_kill_keeps_all_of_them(implementation: WithFiles, tmp_path: Path) -> None:
    crashes = crashes_of(implementation, tmp_path)
    crashes.saves_afterwards(4, seed=1)
    assert [fault.error for fault in crashes.faults] == []
    for replayed in (tmp_path / "replayed").iterdir():
        assert {n: (replayed / "checkpoint" / n).read_text() for n in FILES} == FILES
        assert [each.name for each in replayed.iterdir()] == ["checkpoint"]


@pytest.mark.thorough  # a judge of the suite is tried in `test_crash.py`
def test_a_loss_is_found(tmp_path: Path) -> None:
    crashes = crashes_of(Losing(), tmp_path, stop=True)
    with pytest.raises(EnoughError):
        crashes.kills()
    assert crashes.faults
