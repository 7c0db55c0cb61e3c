"""A run of checkpoints on real ranks: one decision for all, whoever is signalled or fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import xckpt
from tests.support.ranks import Ranks
from xckpt.engine.run import decision
from xckpt.policies import (
    Best,
    EveryMinutes,
    EverySteps,
    Latest,
    Moment,
    OnPreemption,
    StepRecord,
)
from xckpt.storage import run_steps
from xckpt.torch.group import TorchGroup


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((6,), float(step)), "step": step}


def numbers(found: list[xckpt.StepRecord]) -> list[int]:
    return [record.number for record in found]


def on_rank_train(rank: int, root: str) -> tuple[list[int], int, int | None, bool]:
    """Each rank has a clock, metrics and a view of the storage of its own; only rank 0's count."""
    clock, listing = time.time, run_steps.committed_steps
    if rank:
        time.time = lambda: clock() + 1e6 * rank
        run_steps.committed_steps = None  # type: ignore[assignment]
    try:
        keep = [Latest(2), Best("loss")]
        policies = [EverySteps(3), EveryMinutes(600)]
        with xckpt.CheckpointManager(root, save=policies, keep=keep) as run:
            state = run.restore(state_of(0), default=state_of(0))
            for step in range(run.next_step, 13):
                state = state_of(step)
                # On rank 0 the loss grows.
                run.save(step, state, {"loss": step if rank == 0 else -step})
        best = run.best()
        restored = run.restore(state_of(0))
        assert torch.equal(restored["w"], state_of(12)["w"])
        return numbers(run.steps()), restored["step"], best and best.number, run.preempted
    finally:
        time.time, run_steps.committed_steps = clock, listing


def test_the_coordinators_clock_metrics_and_listing_count(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(on_rank_train, str(tmp_path))
    assert answers == [([0, 9, 12], 12, 0, False)] * 3


def on_rank_preempted(rank: int, root: str, chosen: int) -> tuple[list[int], list[int]]:
    """One rank is signalled at step 4, again and again; all are asked at each step."""
    saved: list[int] = []
    decision.ASK_SECONDS = 0.0
    with xckpt.CheckpointManager(root, save=[OnPreemption()]) as run:
        for step in range(100):
            if rank == chosen and step >= 4:
                os.kill(os.getpid(), signal.SIGTERM)
            if run.save(step, state_of(step)):
                saved.append(step)
            if run.preempted:
                break
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return saved, numbers(run.steps())


@pytest.mark.parametrize("chosen", [0, 2])
def test_a_signal_to_any_rank_saves_the_same_step_on_all(
    ranks: Ranks, tmp_path: Path, chosen: int
) -> None:
    assert ranks.run(on_rank_preempted, str(tmp_path), chosen) == [([4], [4])] * 3
    assert xckpt.load(tmp_path / "step-00000004")["step"] == 4
    assert xckpt.open(tmp_path / "step-00000004").verify() == []


def on_rank_counting(rank: int, root: str) -> tuple[list[int], int, bool]:
    """Rank 1 is signalled in a loop of quick steps: where all stop, and what each step sends."""
    decision.ASK_SECONDS = 0.2
    sent: list[str] = []
    quick: list[list[str]] = []
    step, began = -1, time.monotonic()
    with xckpt.CheckpointManager(root, save=[OnPreemption(["SIGUSR1"])]) as run:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("gather", "broadcast"):
                method = getattr(TorchGroup, name)

                def counted(self: Any, data: Any, name: str = name, method: Any = method) -> Any:
                    sent.append(name)
                    return method(self, data)

                patch.setattr(TorchGroup, name, counted)
            for step in range(200):
                if rank == 1 and step == 10:
                    os.kill(os.getpid(), signal.SIGUSR1)
                sent.clear()
                if run.save(step, state_of(step)):
                    break
                quick.append(list(sent))
                time.sleep(0.005)
        assert run.preempted
    asked = [each for each in quick if each == ["broadcast", "gather", "broadcast"]]
    plain = [each for each in quick if each == ["broadcast"]]
    often = 2 + (time.monotonic() - began) / decision.ASK_SECONDS
    cheap = len(asked) <= often and len(plain) == len(quick) - len(asked)
    return numbers(run.steps()), step, cheap


def test_a_step_without_a_save_costs_one_broadcast(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(on_rank_counting, str(tmp_path))
    [saved, step, cheap] = answers[0]
    assert saved == [step] and 10 <= step < 199 and cheap and answers == [answers[0]] * 3


def on_rank_failing(rank: int, root: str) -> tuple[int, str, list[int]]:
    """Rank 1 cannot write step 2: all ranks raise at one call, and go on."""
    from xckpt.storage.write_checkpoint import ZarrStorageWriter

    write = ZarrStorageWriter.write_data

    def fail(self: ZarrStorageWriter, *arguments: Any) -> object:
        if rank == 1 and str(self.target).endswith("2"):
            raise xckpt.StorageError("the disk of rank 1 is full")
        return write(self, *arguments)

    ZarrStorageWriter.write_data = fail  # type: ignore[method-assign]
    raised, text = -1, ""
    try:
        with xckpt.CheckpointManager(root, save=[EverySteps(2)], keep=[Latest(1)]) as run:
            for step in range(60):
                try:
                    run.save(step, state_of(step))
                except xckpt.StorageError as error:
                    raised, text = step, str(error)
                    break
                time.sleep(0.01)
            assert numbers(run.steps()) == [0] and run.next_step == 1
            assert run.save(61, state_of(61))
        return raised, text, numbers(run.steps())
    finally:
        ZarrStorageWriter.write_data = write  # type: ignore[method-assign]


def test_a_failure_on_one_rank_is_raised_on_all_at_one_step(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(on_rank_failing, str(tmp_path))
    assert len({step for step, _, _ in answers}) == 1 and answers[0][0] > 2
    assert all("the disk of rank 1 is full" in text for _, text, _ in answers)
    assert all(steps == [61] for _, _, steps in answers)


def on_rank_resume(rank: int, root: str) -> tuple[int, str, list[str]]:
    with xckpt.CheckpointManager(root) as run, pytest.warns(UserWarning, match="damaged"):
        step = run.restore(state_of(0))["step"]
    return step, type(run.skipped[0].error).__name__, [*map(str, run.skipped)]


def test_a_damaged_newest_falls_back_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    with xckpt.CheckpointManager(tmp_path, save=EverySteps(1)) as run:
        for step in range(3):
            run.save(step, state_of(step))
    chunk = tmp_path / "step-00000002" / "w" / "c" / "0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    answers = ranks.run(on_rank_resume, str(tmp_path))
    step, kind, [skipped] = answers[0]
    assert answers == [answers[0]] * 3 and (step, kind) == (1, "CorruptCheckpointError")
    # Which step, and why: not only that ranks have failed.
    assert skipped.startswith("step 2: 3 ranks failed to read") and "w: " in skipped, skipped


def on_rank_mistaken(rank: int, root: str) -> tuple[str, str, bool]:
    def policy(moment: Moment) -> bool:
        raise ZeroDivisionError("on the coordinator")

    run = xckpt.CheckpointManager(root, save=[policy])
    with pytest.raises(xckpt.PlanError) as apart:
        run.save(rank, state_of(0))
    with pytest.raises(xckpt.RanksFailedError) as mistaken:
        run.save(5, state_of(0))
    # No rank waits for another.
    saved = run.save(6, state_of(6), force=True)
    run.wait()
    return str(apart.value), str(mistaken.value), saved


def test_ranks_at_different_steps_and_a_policy_that_raises(ranks: Ranks, tmp_path: Path) -> None:
    for apart, mistaken, saved in ranks.run(on_rank_mistaken, str(tmp_path)):
        assert "(rank 0: 0, rank 1: 1, rank 2: 2)" in apart
        assert "on the coordinator" in mistaken and saved


def on_rank_keep(rank: int, root: str) -> list[Any]:
    """The keep policy of the coordinator raises once step 1 is saved."""

    def keep(records: Sequence[StepRecord]) -> list[int]:
        if rank == 0 and records[-1].number == 1:
            raise ZeroDivisionError("on the coordinator")
        return []

    said: list[Any] = []
    with xckpt.CheckpointManager(root, save=[EverySteps(1)], keep=[keep]) as run:
        for step in range(2):
            run.save(step, state_of(step))
            run.wait()
            said.append(numbers(run.steps()))
        said.append(raised(lambda: run.save(2, state_of(2)))[1])
        said.append(run.save(3, state_of(3)))
        run.wait()
        said.append(numbers(run.steps()))
    return said


def test_a_keep_policy_that_raises_does_so_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Not where each rank waits: there the coordinator alone knows of it."""
    answers = ranks.run(on_rank_keep, str(tmp_path))
    assert answers == [answers[0]] * 3
    assert answers[0][:2] == [[0], [0, 1]] and answers[0][3:] == [True, [3]]
    assert "on the coordinator" in answers[0][2]


def raised(call: Any) -> tuple[str, str, tuple[int, ...]]:
    """Class and message of what a call raises, and the ranks that it names."""
    try:
        call()
    except Exception as error:
        told = error if isinstance(error, xckpt.XckptError) else error.__cause__
        failures = told.failures if isinstance(told, xckpt.XckptError) else ()
        return type(error).__name__, str(error), tuple(failure.rank for failure in failures)
    return "", "", ()


def on_rank_wrong(rank: int, root: str, wrong: dict[str, Any], chosen: int) -> list[Any]:
    """One rank gives what makes no sense, at once or after all have foreseen a save; then not."""
    decision.ASK_SECONDS = 0.2
    right: dict[str, Any] = {"step": 0, "state": state_of(0), "metrics": {"loss": 1.0}}
    given = {**right, **(wrong if rank == chosen else {})}
    run = xckpt.CheckpointManager(root, save=[EverySteps(2)], timeout=20)
    said = [raised(lambda: run.save(**given))]
    said += [run.should_save(0), raised(lambda: run.save(**given))]
    assert numbers(run.steps()) == [] and run.save(**right)
    assert run.save(1, state_of(1)) is False
    run.wait()
    return [*said, numbers(run.steps())]


@pytest.mark.parametrize("chosen", [0, 2])
@pytest.mark.parametrize(
    "wrong, kind, words",
    [
        ({"step": -1}, "ValueError", "ValueError: a step is a number from 0 to"),
        ({"step": "0"}, "TypeError", "TypeError: a step is an int, not a str"),
        ({"metrics": {"loss": "low"}}, "TypeError", "TypeError: metrics['loss'] is a str"),
        ({"metrics": torch.ones(2)}, "TypeError", "TypeError: metrics= is a mapping from names"),
        ({"metadata": {"run": 1}}, "TypeError", "TypeError: metadata= of a step is a dict without"),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank_is_raised_on_all(
    ranks: Ranks, tmp_path: Path, wrong: dict[str, Any], kind: str, words: str, chosen: int
) -> None:
    answers = ranks.run(on_rank_wrong, str(tmp_path), wrong, chosen)
    first, due, second, steps = answers[0]
    assert answers == [answers[0]] * 3 and due and steps == [0]
    for name, text, named in (first, second):
        assert (name, named) == (kind, (chosen,)) and f"rank {chosen}: {words}" in text, text


def on_rank_wrong_in_between(rank: int, root: str) -> tuple[bool, Any, list[int]]:
    """A step is wrong on one rank where none is due, and no rank is asked."""
    decision.ASK_SECONDS = 600.0
    run = xckpt.CheckpointManager(root, save=[EverySteps(2)], timeout=20)
    run.save(0, state_of(0))
    began = run.save(-1 if rank == 1 else 1, state_of(1))
    said = raised(lambda: run.save(2, state_of(2)))
    run.save(2, state_of(2))
    run.wait()
    return began, said, numbers(run.steps())


def test_a_wrong_step_is_raised_on_all_ranks_when_they_are_next_asked(
    ranks: Ranks, tmp_path: Path
) -> None:
    answers = ranks.run(on_rank_wrong_in_between, str(tmp_path))
    began, (kind, text, named), steps = answers[0]
    assert answers == [answers[0]] * 3 and not began and steps == [0, 2]
    assert (kind, named) == ("ValueError", (1,)) and "rank 1: ValueError: a step is" in text


def on_rank_wrong_elsewhere(rank: int, root: str, chosen: int) -> list[Any]:
    """One rank names what is not a step, or another one, or makes its manager wrongly."""
    wrong = rank == chosen
    said = [raised(lambda: xckpt.CheckpointManager(root, keep=3 if wrong else [], timeout=20))]  # type: ignore[arg-type]
    run = xckpt.CheckpointManager(root, save=[EverySteps(1)], timeout=20)
    for step in range(3):
        run.save(step, state_of(step))
    run.wait()
    said.append(raised(lambda: run.delete(-1 if wrong else 1)))
    said.append(raised(lambda: run.delete(2 if wrong else 1)))
    said.append(raised(lambda: run.restore(step="1" if wrong else 1)))  # type: ignore[arg-type]
    said.append(raised(lambda: run.restore(step=None if wrong else 1)))
    run.delete(1)
    return [said, numbers(run.steps()), run.restore(step=0)["step"]]


@pytest.mark.parametrize("chosen", [0, 2])
def test_what_is_wrong_on_one_rank_is_raised_by_every_call_of_a_run(
    ranks: Ranks, tmp_path: Path, chosen: int
) -> None:
    answers = ranks.run(on_rank_wrong_elsewhere, str(tmp_path), chosen)
    said, steps, restored = answers[0]
    assert answers == [answers[0]] * 3 and steps == [0, 2] and restored == 0
    kinds = ["TypeError", "ValueError", "PlanError", "TypeError", "PlanError"]
    assert [kind for kind, _, _ in said] == kinds, said
    assert [named for _, _, named in said] == [(chosen,), (chosen,), (0,), (chosen,), (0,)]
    assert f"rank {chosen}: None" in said[-1][1] and f"rank {chosen}: 2" in said[2][1]


def on_rank_otherwise(rank: int, root: str, name: str, values: tuple[Any, ...]) -> Any:
    given: Any = values[rank]
    if name == "options":
        given = xckpt.SaveOptions(chunk_bytes=given)
    return raised(lambda: xckpt.CheckpointManager(root, timeout=20, **{name: given}))


@pytest.mark.parametrize(
    ("name", "values"),
    [("full_every", (4, 4, None)), ("options", (16 << 20, 8 << 20, 8 << 20))],
)
def test_what_ranks_have_to_save_alike_is_compared_when_the_run_begins(
    ranks: Ranks, tmp_path: Path, name: str, values: tuple[Any, ...]
) -> None:
    answers = ranks.run(on_rank_otherwise, str(tmp_path / "run"), name, values)
    kind, text, _ = answers[0]
    assert answers == [answers[0]] * 3 and kind == "PlanError"
    assert ("full_every" if name == "full_every" else "chunk_bytes") in text and "rank" in text
    assert not (tmp_path / "run").exists()


def on_rank_best(rank: int, root: str, given: Sequence[Any], asked: Sequence[Any]) -> list[Any]:
    """The best of three steps, and then a save, for which all ranks have to be there still."""
    with xckpt.CheckpointManager(root, save=EverySteps(1), keep=given[rank], timeout=20) as run:
        for step in range(3):
            run.save(step, state_of(step), {"loss": step, "acc": step == 1})
        run.wait()
        best: list[int | None] = []

        def ask() -> None:
            found = run.best(**asked[rank])
            best.append(found and found.number)

        return [raised(ask), best, run.save(3, state_of(3))]


LOSS, ACC, NOT_ASKED = [Best("loss", 3)], [Best("acc", 3, "max")], ({}, {}, {})


@pytest.mark.parametrize(
    ("given", "asked", "kind", "words"),
    [
        ((LOSS, ACC, []), NOT_ASKED, "", ""),
        (([], LOSS, LOSS), NOT_ASKED, "ValueError", "rank 0: ValueError: name a metric"),
        ((LOSS, LOSS, LOSS), ({"metric": "loss"}, {}, {}), "", ""),
        (
            (LOSS, LOSS, LOSS),
            ({"metric": "loss"}, {"metric": "loss", "mode": "max"}, {}),
            "PlanError",
            "rank 0: ('loss', 'min'), rank 1: ('loss', 'max'), rank 2: ('loss', 'min')",
        ),
        (
            (LOSS, LOSS, LOSS),
            ({}, {}, {"metric": 5}),
            "TypeError",
            "rank 2: TypeError: Best(metric) takes",
        ),
    ],
)
def test_the_best_step_is_that_of_the_coordinator_on_all_ranks(
    ranks: Ranks, tmp_path: Path, given: Any, asked: Any, kind: str, words: str
) -> None:
    answers = ranks.run(on_rank_best, str(tmp_path / "run"), given, asked)
    said, best, began = answers[0]
    assert answers == [answers[0]] * 3 and began
    assert said[0] == kind and words in said[1] and best == ([] if kind else [0])
