"""What a run restores where its newest step cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
import traceback
import warnings
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import xckpt
from tests.runs.life import Place, on_threads
from tests.runs.world import state_of, tag_of
from tests.support.faulty_bucket import Answer, Fault, FaultyBucket, Request, Silence, never
from tests.support.servers import environment, faulty_gcs, faulty_s3, gcs, s3
from tests.support.steps import steps
from xckpt.api.run import restore as restoring
from xckpt.api.run.folder import RunFolder
from xckpt.api.run.restore import Candidate, Damaged, first_good
from xckpt.api.run.root import RunRoot
from xckpt.core.run.record import StepRecord, run_metadata
from xckpt.engine.ranks.group import LocalGroup
from xckpt.errors import CorruptCheckpointError, Problem
from xckpt.policies import EverySteps, Latest
from xckpt.storage.checkpoint import Checkpoint
from xckpt.storage.location import Location, open_store

__all__ = ["environment", "faulty_gcs", "faulty_s3", "gcs", "s3"]

ALWAYS = EverySteps(1)


def spoil(step: Path) -> None:
    """A bit of each chunk of ``rows`` is another."""
    for file in (step / "rows" / "c").rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(each ^ 1 for each in file.read_bytes()))


def save(root: Path, place: Place, step: int) -> None:
    with xckpt.CheckpointManager(root, save=ALWAYS, group=place.group) as run:
        run.save(step, state_of(step, place.rank, place.size))


@pytest.mark.filterwarnings("ignore:step 1 was restored:UserWarning")
@pytest.mark.parametrize("known", [False, True])
def test_a_damaged_step_need_not_fit(tmp_path: Path, known: bool) -> None:
    """Three ranks have saved it, and two go on from the step before, which they have saved."""

    def restore(place: Place) -> None:
        with xckpt.CheckpointManager(tmp_path, save=ALWAYS, group=place.group) as run:
            like = {**state_of(0, place.rank, 2), "own": xckpt.PerRank(np.zeros(3, int))}
            if known:
                assert tag_of(run.restore()) == 1
            assert run.restore(like)["tag"] == 1
            (skipped,) = run.skipped
            assert skipped.number == 2
            assert ("own/rank2" if known else "digest differs") in str(skipped.error)

    on_threads(2, lambda place: save(tmp_path, place, 1))
    on_threads(3, lambda place: save(tmp_path, place, 2))
    spoil(tmp_path / "step-00000002")
    on_threads(2, restore)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sound_step_that_does_not_fit_is_an_error(tmp_path: Path, ranks: int) -> None:
    """It is verified only where an older step has other leaves, and so might fit."""
    verified: list[str] = []

    def restore(place: Place) -> None:
        with xckpt.CheckpointManager(tmp_path, save=ALWAYS, group=place.group) as run:
            like = {**state_of(0, place.rank, 2), "own": xckpt.PerRank(np.zeros(3, int))}
            with pytest.raises(xckpt.TreeMismatchError, match="own/rank2") as raised:
                run.restore(like)
            assert run.skipped == () and "xckpt.PerRank.all in the target" in str(raised.value)
            assert raised.value.__notes__ == ["This is the failure of the load of step 2."]

    def verify(checkpoint: Checkpoint) -> list[Problem]:
        verified.append(str(checkpoint.location))
        return whole(checkpoint)

    on_threads(ranks, lambda place: save(tmp_path, place, 1))
    on_threads(3, lambda place: save(tmp_path, place, 2))
    whole = Checkpoint.verify
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "verify", verify)
        on_threads(2, restore)
    assert verified == [str(tmp_path / "step-00000002")] * (ranks == 2)


@pytest.mark.parametrize("given", [{0}, {1}, {0, 1}])
def test_a_default_is_that_of_all_ranks(tmp_path: Path, given: set[int]) -> None:
    """Else one begins to train, and waits for the others, which have raised."""

    def restore(place: Place) -> None:
        run = xckpt.CheckpointManager(tmp_path, group=place.group)
        default: dict[str, Any] = {"default": place.rank} if place.rank in given else {}
        if len(given) == 2:
            assert run.restore(**default) == place.rank
        else:
            with pytest.raises(xckpt.NotACheckpointError, match="pass default= on every rank"):
                run.restore(**default)

    on_threads(2, restore)


def test_a_second_root_is_that_of_all_ranks(tmp_path: Path) -> None:
    def begin(place: Place) -> None:
        second = tmp_path / f"fast-{place.rank}"
        with pytest.raises(xckpt.PlanError, match=r"argument temporary is .*fast-0.* on rank 0"):
            xckpt.CheckpointManager(tmp_path / "run", temporary=second, group=place.group)

    on_threads(2, begin)


def test_a_bucket_that_was_silent_for_a_while(faulty_s3: FaultyBucket) -> None:
    """What a listing has waited for in vain does not count for later listings and deletions."""
    root = f"{faulty_s3.url}/silent"
    limits = xckpt.LoadOptions(request_timeout=1.0)
    with xckpt.CheckpointManager(root, save=ALWAYS, keep=Latest(1), load_options=limits) as run:
        run.save(0, state_of(0))
        run.wait()
        faulty_s3.fault = lambda request: Silence()
        with pytest.raises(xckpt.StorageError, match=r"no answer for 1 s"):
            run.steps()
        faulty_s3.fault = never
        assert [each.number for each in run.steps()] == [0]
        run.save(1, state_of(1))
        run.wait()
    assert {key.split(b"/")[0] for key in open_store(Location.parse(root)).list().result()} == {
        b"step-00000001"
    }


def test_a_listing_asks_as_often_as_a_load(faulty_s3: FaultyBucket) -> None:
    faulty_s3.fault = lambda request: Answer(503, "SlowDown") if request.listing else None
    faulty_s3.seen.clear()
    with pytest.raises(xckpt.StorageError, match="overloaded"):
        xckpt.CheckpointManager(f"{faulty_s3.url}/busy", load_options=xckpt.LoadOptions(retries=1))
    faulty_s3.fault = never
    assert sum(request.listing for request in faulty_s3.seen) == 2


def test_an_error_of_a_skipped_step_holds_no_memory_of_its_load() -> None:
    """Else as many manifests stay in memory as there are damaged steps."""
    held: list[weakref.ref[object]] = []

    def read(path: object) -> NoReturn:
        content = {path}
        held.append(weakref.ref(content))
        raise ValueError(path)

    def load(path: object) -> NoReturn:
        content = {path}
        held.append(weakref.ref(content))
        try:
            read(path)
        except ValueError as error:
            raise CorruptCheckpointError(f"{path}: damaged") from error

    damaged: Damaged = {}
    assert (
        first_good([Candidate(each, each) for each in "abc"], load, damaged, stacklevel=1) is None
    )
    assert [each() for each in held] == [None] * 6
    assert [str(error) for error in damaged.values()] == [f"{each}: damaged" for each in "abc"]
    for error in damaged.values():
        assert "read(path)" in "".join(traceback.format_exception(error))


LISTED = """
from tests.support.unprivileged import permissions_hold
with permissions_hold():  # before TensorStore's threads begin
    import xckpt, xckpt.policies
    run = xckpt.CheckpointManager({!r}, keep=xckpt.policies.Latest(1))
    print([record.number for record in run.steps()])
    try:
        print(run.restore()["tag"], run.restore(step=1)["tag"])
    except xckpt.StorageError as error:
        print(error, run.restore(step=1)["tag"])
    print(run.save(4, {{"tag": 4}}, force=True))
    run.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("closed", [0, 2])
def test_a_step_that_may_not_be_read_hides_no_other(tmp_path: Path, closed: int) -> None:
    """It is not good, not deleted, and not passed over in silence where it is the newest."""
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS) as run:
        for step in range(3):
            run.save(step, state_of(step))
    step = tmp_path / f"step-0000000{closed}"
    step.chmod(0)
    code = LISTED.format(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    step.chmod(0o755)
    listed, restored, saved = done.stdout.splitlines()
    assert listed == str([each for each in range(3) if each != closed])
    assert restored == "2 1" if closed == 0 else f"{step}" in restored and restored.endswith(" 1")
    assert saved == "True" and sorted(each.name for each in tmp_path.iterdir()) == sorted(
        [step.name, "step-00000004"]
    )
    assert f"a step is there and may not be read: {step}: Permission denied" in done.stderr


@pytest.mark.parametrize("closed", [0, 2])
@pytest.mark.parametrize("kind", ["faulty_s3", "faulty_gcs"])
def test_a_key_that_may_not_be_read_hides_no_step(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, kind: str, closed: int
) -> None:
    server: FaultyBucket = request.getfixturevalue(kind)
    root, step = f"{server.url}/closed-{closed}", f"step-0000000{closed}"
    with xckpt.CheckpointManager(root, save=ALWAYS) as run:
        for each in range(3):
            run.save(each, state_of(each))

    def forbidden(asked: Request) -> Fault:
        key = f"closed-{closed}/{step}/xckpt.json"
        reads = asked.method in ("GET", "HEAD") and asked.path.endswith(key)
        return Answer(403, "AccessDenied") if reads else None

    server.fault = forbidden
    request.addfinalizer(lambda: setattr(server, "fault", never))
    with xckpt.CheckpointManager(root, save=ALWAYS, keep=Latest(1)) as run:
        assert [each.number for each in run.steps()] == [
            each for each in range(3) if each != closed
        ]
        assert f"a step is there and may not be read: {root}/{step}: " in caplog.text
        if closed == 0:
            assert tag_of(run.restore()) == 2
        else:
            with pytest.raises(xckpt.StorageError, match=f"{root}/{step}.*AccessDenied"):
                run.restore()
        assert tag_of(run.restore(step=1)) == 1
        assert run.save(4, state_of(4))
        run.wait()
        assert [each.number for each in run.steps()] == [4]
    server.fault = never
    run = xckpt.CheckpointManager(root, save=ALWAYS)
    assert [each.number for each in run.steps()] == [closed, 4]


def test_a_restore_past_many_damaged_steps_takes_time_for_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It described all steps anew for each one that it passed over."""
    run = xckpt.CheckpointManager(tmp_path)
    run.save(1, {"w": np.ones(2)}, force=True)
    run.wait()
    for step in range(2, 102):
        (tmp_path / f"step-{step:08d}").mkdir()
        (tmp_path / f"step-{step:08d}" / "xckpt.json").write_text("damaged")
    described: list[object] = []
    candidate = restoring.Candidate
    monkeypatch.setattr(
        restoring, "Candidate", lambda *about: described.append(about) or candidate(*about)
    )
    with pytest.warns(UserWarning, match="step 1 was restored"):
        assert xckpt.CheckpointManager(tmp_path).restore()["w"][0] == 1
    assert len(described) <= 3 * 101


@pytest.mark.parametrize("name", ["5", "step-00000005"])
@pytest.mark.parametrize("how", ["chunk", "manifest"])
def test_a_damaged_step_hides_none_of_another_library(tmp_path: Path, name: str, how: str) -> None:
    """Of one number: a run went on from it, or went back behind it."""
    import torch

    theirs = tmp_path / "epoch=1-step=5.ckpt"
    torch.save({"w": torch.full((6,), 3.0)}, theirs)
    ours = {"w": np.arange(5, 11, dtype=np.float32)}
    xckpt.save(tmp_path / name, ours, metadata=RECORD, options=PLAIN)
    checkpoints = xckpt.CheckpointManager(tmp_path)
    assert [each.format for each in checkpoints.steps()] == ["xckpt"]
    assert checkpoints.restore(ours)["w"][0] == 5
    damaged = "w/c/0" if how == "chunk" else "xckpt.json"
    (tmp_path / name / damaged).write_bytes(b"{")
    checkpoints = xckpt.CheckpointManager(tmp_path)
    for step in (None, 5):
        with pytest.warns(UserWarning, match=rf"step=5\.ckpt.* was restored.*\({name}\)"):
            assert checkpoints.restore(ours, step=step)["w"][0] == 3
        assert [each.format for each in checkpoints.steps()] == ["torch"]
    checkpoints.delete(5)
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]
    with pytest.raises(ValueError, match="was written by another library"):
        checkpoints.delete(5)


RECORD = run_metadata(StepRecord(5, 1.0))
PLAIN = xckpt.SaveOptions(pack_bytes=0)


@pytest.mark.parametrize("bad", ["5", "step-5", "step-00000005"])
@pytest.mark.parametrize("how", ["chunk", "manifest"])
def test_of_two_folders_of_one_number_the_good_one_is_restored(
    tmp_path: Path, bad: str, how: str
) -> None:
    """And a deletion leaves neither; a policy none of those that a manager wrote."""
    other = "5" if bad != "5" else "step-00000005"
    checkpoints = xckpt.CheckpointManager(tmp_path, save=EverySteps(1), keep=Latest(1))
    for name, step in {other: 5, bad: 6, "step-00000004": 4}.items():
        xckpt.save(tmp_path / name, state_of(step), metadata=RECORD, options=PLAIN)
    if how == "chunk":
        spoil(tmp_path / bad)
    else:
        (tmp_path / bad / "xckpt.json").write_bytes(b"{")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tag_of(checkpoints.restore()) == 5
        assert tag_of(checkpoints.restore(step=5)) == 5
    assert [record.name for record in checkpoints.steps()] == ["step-00000004", other]
    again = xckpt.CheckpointManager(tmp_path)
    again.delete(5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    for name in (other, bad):
        xckpt.save(tmp_path / name, state_of(5), metadata=RECORD)
    checkpoints.reload()
    checkpoints.save(7, state_of(7))
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_thousands_of_steps_are_put_in_order_once(tmp_path: Path) -> None:
    """All were, for each of them: of 4,000 steps the newest was restored after a minute."""
    folder = RunFolder(LocalGroup(), RunRoot(tmp_path, None, xckpt.LoadOptions()))
    for number in range(1_000):
        folder.add(StepRecord(number))
    folder.add(StepRecord(5, name="5"))
    names = [each.name for each in restoring._newest_first(folder, None)]
    assert names[0] == "step 999"
    assert names[-8:-5] == ["step 6", "step 5 (step-00000005)", "step 5 (5)"]
    assert steps(lambda: restoring._newest_first(folder, None)) < 50 * steps(lambda: folder.all)
