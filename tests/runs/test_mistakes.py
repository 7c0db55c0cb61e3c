"""What users give to a manager by mistake, or in another type than the documents have it."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xckpt
from xckpt.core.run import keeping
from xckpt.core.run.record import StepRecord
from xckpt.policies import (
    Best,
    EveryMinutes,
    EverySteps,
    FirstStep,
    Latest,
    OnPreemption,
    OnSteps,
    Temporary,
    WhenIdle,
)

STATE = {"w": np.zeros(3)}
ALWAYS = EverySteps(1)


def numbers(checkpoints: xckpt.CheckpointManager) -> list[int]:
    return [record.number for record in checkpoints.steps()]


@pytest.mark.parametrize(
    "kept", [None, 3, True, "01", [0.0], [None], ["0"], [True, False], [-1]], ids=repr
)
def test_a_keep_policy_that_returns_no_numbers_is_named(tmp_path: Path, kept: object) -> None:
    def mine(records: Sequence[xckpt.StepRecord]) -> Any:
        return kept

    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=mine)
    checkpoints.save(0, STATE)
    words = r"the keep policy mine has to return the numbers of the steps to keep, such as .*, not"
    with pytest.raises(TypeError, match=words):
        checkpoints.wait()
    assert numbers(checkpoints) == [0]


@pytest.mark.parametrize(
    "keep",
    [
        lambda records: np.array([0]),
        lambda records: (record.number for record in records[:1]),
        lambda records: {0: "the first"},
        OnSteps(np.array([0, 7])),
    ],
)
def test_a_keep_policy_returns_numbers_in_any_container(tmp_path: Path, keep: Any) -> None:
    with xckpt.CheckpointManager(tmp_path, save=ALWAYS, keep=keep) as checkpoints:
        for step in range(3):
            checkpoints.save(step, STATE)
    assert numbers(checkpoints) == [0, 2]


def test_a_save_policy_that_says_nothing_is_named(tmp_path: Path) -> None:
    def mine(moment: object) -> Any:
        pass

    checkpoints = xckpt.CheckpointManager(tmp_path, save=mine)
    with pytest.raises(TypeError, match="save policy mine has to return True or False, not None"):
        checkpoints.save(0, STATE)
    assert checkpoints.save(0, STATE, force=True)
    checkpoints.wait()


async def in_time(moment: object) -> bool:
    return True


class Untrue:
    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(
    "answer",
    ["no", b"", 0.5, float("nan"), [False], np.array([False, True]), Untrue(), in_time],
    ids=["str", "bytes", "float", "nan", "list", "array", "untrue", "coroutine"],
)
def test_a_save_policy_says_neither_true_nor_false(tmp_path: Path, answer: Any) -> None:
    policy: Any = answer if callable(answer) else lambda moment: answer
    checkpoints = xckpt.CheckpointManager(tmp_path, save=policy)
    with pytest.raises(TypeError, match=r"save policy .* has to return True or False, not"):
        checkpoints.save(0, STATE)
    assert checkpoints.steps() == []


@pytest.mark.parametrize("answer", [np.bool_(True), np.array(True), 1])
def test_a_save_policy_says_true_in_other_words(tmp_path: Path, answer: Any) -> None:
    with xckpt.CheckpointManager(tmp_path, save=lambda moment: answer) as checkpoints:
        assert checkpoints.save(0, STATE)


def test_a_keep_policy_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MOST_CHOSEN", 100)
    records = [StepRecord(step, time=0.0) for step in range(3)]
    with pytest.raises(TypeError, match="keep policy <lambda> has to return the numbers"):
        keeping.kept(records, [lambda records: itertools.count()])


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"save": Latest(3)}, r"save=.* that say when to save, or functions; got Latest\(n=3\)"),
        ({"save": [ALWAYS, Best("loss")]}, "that say when to save.*got Best"),
        ({"save": [OnPreemption]}, "got <class .*OnPreemption"),
        ({"keep": [WhenIdle()]}, "that say what to keep, or functions; got WhenIdle"),
        ({"keep": FirstStep()}, "that say what to keep.*got FirstStep"),
        ({"keep": Latest}, "got <class .*Latest"),
        ({"keep": "Latest(3)"}, r"got 'Latest\(3\)'"),
    ],
)
def test_policies_of_the_other_side_are_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        xckpt.CheckpointManager(tmp_path, **arguments)
    with pytest.raises(TypeError, match=words):
        Temporary("second", **arguments)


@pytest.mark.parametrize(
    "policy, argument", [(OnSteps, ["1"]), (OnSteps, "12"), (OnSteps, [1.5]), (Best, 3)]
)
def test_arguments_of_policies_that_make_no_sense(
    policy: Callable[[Any], object], argument: object
) -> None:
    with pytest.raises(TypeError, match="takes"):
        policy(argument)


def test_no_step_has_a_number_below_zero() -> None:
    with pytest.raises(ValueError, match=r"a step is a number from 0 .*, not -1"):
        OnSteps([10, -1])


def test_half_a_character_in_a_metric_of_best_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Best\(metric\).*'\\ud800' holds half a character"):
        Best("\ud800")
    with pytest.raises(ValueError, match=r"Best\(metric\).*half a character"):
        xckpt.CheckpointManager(tmp_path).best("loss\udfff")


def test_half_a_character_in_the_name_of_a_metric_begins_no_save(tmp_path: Path) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS)
    with pytest.raises(xckpt.ManifestError, match=r"metadata/run/metrics: .*half a character"):
        checkpoints.save(0, STATE, {"\ud800": 1.0})
    assert checkpoints.save(0, STATE, {"loss": 1.0})
    checkpoints.wait()
    assert numbers(checkpoints) == [0]


@pytest.mark.parametrize("root", [5, b"second", None])
def test_a_temporary_root_that_is_no_path_is_refused(root: Any) -> None:
    words = f"Temporary(root=) takes a path or URL, not the {type(root).__name__} {root!r}"
    with pytest.raises(TypeError, match=re.escape(words)):
        Temporary(root)
    if root is not None:
        with pytest.raises(TypeError, match=re.escape(words)):
            xckpt.CheckpointManager("memory://first", temporary=root)


def test_numbers_may_be_scalars_of_numpy_torch_and_jax(tmp_path: Path) -> None:
    import jax.numpy as jnp

    one: Any = np.int32(1)
    keep = [Latest(2 * one), OnSteps(np.array([3])), EveryMinutes(np.float64(60))]
    with xckpt.CheckpointManager(tmp_path, save=EverySteps(one), keep=keep) as checkpoints:
        for step in (np.int64(3), torch.tensor(4), jnp.int32(5)):
            assert checkpoints.should_save(step)
            checkpoints.save(step, STATE)
        assert checkpoints.path(np.int64(3)).endswith("step-00000003")
    [_, _, newest] = checkpoints.steps()
    assert newest.keep == ("Latest(2)", "OnSteps([3])", "EveryMinutes(60.0)")
    assert checkpoints.restore(step=np.int64(4)) and checkpoints.next_step == 5
    checkpoints.delete(np.int64(4))
    assert numbers(checkpoints) == [3, 5]


@pytest.mark.parametrize("step", [-1, True, "3", 1.0, 10**18])
def test_every_call_refuses_what_is_no_step(tmp_path: Path, step: Any) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path)
    for call in (checkpoints.delete, checkpoints.path, checkpoints.should_save):
        with pytest.raises((TypeError, ValueError), match="a step is"):
            call(step)
    with pytest.raises((TypeError, ValueError), match="a step is"):
        checkpoints.restore(step=step, default=None)


def test_an_array_of_one_element_is_a_metric(tmp_path: Path) -> None:
    import jax.numpy as jnp

    given = [np.array([[2]]), jnp.array([2.0]), torch.tensor([[2.0]]), np.float16(2)]
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS)
    checkpoints.save(0, STATE, {str(n): value for n, value in enumerate(given)})
    for wrong in (np.ones(2), np.array([])):
        with pytest.raises(TypeError, match=r"metrics\['loss'\]"):
            checkpoints.save(1, STATE, {"loss": wrong})
    [record] = checkpoints.steps()
    assert record.metrics == {str(n): 2.0 for n in range(len(given))}


def test_a_loss_that_has_a_gradient_is_a_metric(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    checkpoints = xckpt.CheckpointManager(tmp_path, save=ALWAYS)
    checkpoints.save(0, STATE, {"loss": weight.square().sum()})
    checkpoints.wait()
    [record] = checkpoints.steps()
    assert record.metrics == {"loss": 2.0}


@pytest.fixture
def called() -> Iterator[list[int]]:
    """The signals that a handler of the user's has received."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def test_a_manager_that_is_entered_twice_notes_signals_to_the_end(
    tmp_path: Path, called: list[int]
) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=OnPreemption())
    with checkpoints:
        with checkpoints:
            pass
        signal.raise_signal(signal.SIGTERM)
        assert checkpoints.save(0, STATE) and checkpoints.preempted and called == []
    assert called == [signal.SIGTERM] and checkpoints.preempted


def test_a_run_that_goes_on_after_a_signal_is_not_preempted_again(
    tmp_path: Path, called: list[int]
) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=OnPreemption())
    for step in (0, 2):
        with checkpoints:
            assert not checkpoints.save(step, STATE) and not checkpoints.preempted
            signal.raise_signal(signal.SIGTERM)
            assert checkpoints.save(step + 1, STATE) and checkpoints.preempted
    assert called == [signal.SIGTERM] * 2 and numbers(checkpoints) == [1, 3]


@pytest.mark.parametrize("force", ["no", 1, None])
def test_force_is_true_or_false(tmp_path: Path, force: Any) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path, save=EverySteps(2))
    for step in (0, 1):
        with pytest.raises(TypeError, match="force"):
            checkpoints.save(step, STATE, force=force)
    checkpoints.wait()
    assert numbers(checkpoints) == []


@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_manager_belongs_to_its_process(tmp_path: Path, make: Callable[[object], Any]) -> None:
    checkpoints = xckpt.CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match=f"<CheckpointManager {tmp_path}> belongs to its process"):
        make(checkpoints)


def test_a_record_refuses_metrics_without_names() -> None:
    with pytest.raises(TypeError, match="metrics=\\) takes a mapping from names to numbers, not"):
        StepRecord(1, metrics=5)  # type: ignore[arg-type]
