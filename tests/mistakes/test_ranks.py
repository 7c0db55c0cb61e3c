"""The rows of `tests/mistakes/test_mistakes.py` that only several ranks can make, on real ones.

Each ends on every rank with one message, in little time, and leaves nothing at the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xckpt
from tests.support.ranks import Ranks, die
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import convert
from xckpt.torch.dcp import export_checkpoint


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def error_of(call: Any) -> tuple[str, str]:
    """Class and message of what a call raises."""
    try:
        call()
    except xckpt.XckptError as error:
        return type(error).__name__, str(error)
    return "", ""


def state_of(mistake: str, rank: int) -> Any:
    if mistake == "shapes differ":
        return {"w": torch.ones(3 + rank)}
    if mistake == "dtypes differ":
        return {"w": torch.ones(3, dtype=torch.float16 if rank else torch.float32)}
    if mistake == "local shards in place of a DTensor":
        return {"model": {"w": torch.arange(4.0).chunk(2)[rank].clone()}, "b": torch.zeros(2)}
    if mistake == "optimizers of other parameters":
        model = torch.nn.Linear(3, 1 + rank)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return {"optimizer": optimizer, "w": torch.ones(3)}
    if mistake == "a value of each rank's own":
        return {"w": torch.ones(3), "seed": 17 + rank}
    if mistake == "a tensor and a value":
        return {"w": torch.ones(()) if rank else 1.0}
    if mistake == "several leaves that cannot be saved":
        return {"f": len, "g": {1}} if rank else {"f": 1, "g": 2}
    return {"w": torch.ones(3)}


def on_rank_save(rank: int, path: Path, mistake: str) -> tuple[str, str]:
    if mistake == "paths differ":
        path = path / str(rank)
    options = xckpt.SaveOptions(chunk_bytes=1 << (20 + rank if mistake == "options differ" else 20))
    overwrite = mistake == "overwrite differs" and rank == 1
    state = state_of(mistake, rank)
    return error_of(lambda: xckpt.save(path, state, options=options, overwrite=overwrite))


@pytest.mark.parametrize(
    "mistake, kind, words",
    [
        ("shapes differ", "PlanError", ["w: shape (3,) on rank 0 but (4,) on rank 1"]),
        ("dtypes differ", "PlanError", ["w: dtype float32 on rank 0 but float16 on rank 1"]),
        ("a tensor and a value", "PlanError", ["w: type float on rank 0 but tensor on rank 1"]),
        (
            "optimizers of other parameters",
            "PlanError",
            ["get_optimizer_state_dict", "state/0/momentum_buffer"],
        ),
        (
            "local shards in place of a DTensor",
            "PlanError",
            [
                "only one rank's would be kept. Give each rank its own as xckpt.PerRank(value), or "
                "make it a DTensor or a sharded array",
                "- model/w: differs between rank 0 and rank 1",
            ],
        ),
        ("a value of each rank's own", "PlanError", ["- seed: differs between rank 0 and rank 1"]),
        (
            "paths differ",
            "PlanError",
            ["the argument path is '{path}/0' on rank 0, but '{path}/1' on rank 1"],
        ),
        (
            "options differ",
            "PlanError",
            ["the argument chunk_bytes is 1048576 on rank 0, but 2097152 on rank 1"],
        ),
        (
            "overwrite differs",
            "PlanError",
            ["the argument overwrite is False on rank 0, but True on rank 1"],
        ),
        (
            "several leaves that cannot be saved",
            "UnsupportedLeafError",
            [
                "1 rank failed to",
                "\n  - rank 1: UnsupportedLeafError: 2 leaves cannot be saved"
                "\n      - f: a builtins.builtin_function_or_method is neither",
                "\n      - g: a builtins.set is neither",
            ],
        ),
    ],
)
def test_a_save_of_ranks_that_disagree(
    two_ranks: Ranks, tmp_path: Path, mistake: str, kind: str, words: list[str]
) -> None:
    first, second = two_ranks.run(on_rank_save, tmp_path / "c", mistake)
    assert first == second and first[0] == kind, first
    for word in words:
        assert word.format(path=tmp_path / "c") in first[1], first[1]
    assert list(tmp_path.iterdir()) == []


def on_rank_load(rank: int, path: Path, mistake: str) -> tuple[str, str]:
    like: Any = {"w": torch.zeros(3)}
    call: dict[str, Any] = {}
    if mistake == "paths differ":
        path = path.with_name("other") if rank else path
    elif mistake == "one has no like":
        like = like if rank else None
    elif mistake == "rules differ":
        call["strict"] = rank == 0
    else:
        like, call["cast"] = {"w": torch.zeros(3, dtype=(torch.half, torch.double)[rank])}, True
    return error_of(lambda: xckpt.load(path, like, **call))


@pytest.mark.parametrize(
    "mistake, words",
    [
        ("paths differ", "the argument path is '{path}' on rank 0, but '{other}' on rank 1"),
        ("one has no like", "the argument like is None on rank 0, but given on rank 1"),
        ("rules differ", "the argument missing is 'error' on rank 0, but 'ignore' on rank 1"),
        ("dtypes differ", "w: wanted as float16 on rank 0, but as float64 on rank 1"),
    ],
)
def test_a_load_of_ranks_that_disagree(
    two_ranks: Ranks, tmp_path: Path, mistake: str, words: str
) -> None:
    for name in ("one", "other"):
        xckpt.save(tmp_path / name, {"w": np.ones(3, np.float32)})
    first, second = two_ranks.run(on_rank_load, tmp_path / "one", mistake)
    assert first == second and first[0] == "PlanError", first
    assert words.format(path=tmp_path / "one", other=tmp_path / "other") in first[1], first[1]


def error_told(call: Any) -> tuple[str, str]:
    """Class and message of what a call raises, also where it is no error of ours."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


WRONG: dict[str, dict[str, Any]] = {
    "path": {"path": 3},
    "place": {"path": "ftp://nowhere/c"},
    "options": {"options": {"threads": 3}},
    "planner": {"planner": len},
    "base": {"base": 3},
    "metadata": {"metadata": {"lock": (each for each in ())}},
    "missing": {"missing": "never"},
    "select": {"select": 3},
    "state": {"state": None},
    "timeout": {"timeout": 0},
    "timeout in words": {"timeout": "20"},
    "group": {"group": 3},
    "format": {"format": "tar"},
    "coordinator": {"coordinator_rank": 5},
    "coordinator in words": {"coordinator_rank": "0"},
    "half a coordinator": {"coordinator_rank": 0.5},
}


def called(call: str, path: Path, given: dict[str, Any]) -> Any:
    """One call of xckpt with some other arguments."""
    where = given.pop("path", path)
    if call == "convert":
        return convert(path.with_name("good"), path, overwrite=True, **given)
    if call == "export":
        return export_checkpoint(path.with_name("good"), path.with_name("dcp"), **given)
    if call == "load_state_dict":
        reader = xckpt.storage.ZarrStorageReader(path)
        state = given.pop("state", {"w": torch.zeros(3)})
        return xckpt.load_state_dict(state, reader, **given)
    given = {"timeout": 20} | given if call != "save_state_dict" else given
    if call == "save":
        return xckpt.save(where, {"w": torch.ones(3)}, **given)
    if call == "save_async":
        return xckpt.save_async(where, {"w": torch.ones(3)}, **given).result()
    if call == "load":
        return xckpt.load(where, {"w": torch.zeros(3)}, **given)
    if call == "manager":
        return xckpt.CheckpointManager(where, **given)
    if call == "load_into":
        state = given.pop("state", {"w": torch.zeros(3)})
        return xckpt.load_into(where, state, **given)
    writer = xckpt.storage.ZarrStorageWriter(path)
    return xckpt.save_state_dict({"w": torch.ones(3)}, writer, **given)


def on_rank_wrong(
    rank: int, path: Path, call: str, wrong: str, chosen: int
) -> tuple[str, str, bool]:
    """What is raised, and whether the same call with right arguments works then."""
    given = dict(WRONG[wrong]) if rank == chosen else {}
    kind, text = error_told(lambda: called(call, path, given))
    right = path.with_name("again" if call == "convert" else "good")
    return kind, text, error_told(lambda: called(call, right, {})) == ("", "")


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize(
    "call, wrong, kind, words",
    [
        ("save", "path", "TypeError", "the first argument is the path, got an int"),
        ("save", "place", "PathError", "ftp"),
        ("save", "options", "TypeError", "options"),
        ("save", "base", "TypeError", "base= takes the path of a checkpoint, not an int"),
        ("save_async", "path", "TypeError", "the first argument is the path, got an int"),
        ("save_async", "planner", "TypeError", "SavePlanner"),
        ("save_async", "place", "PathError", "ftp"),
        ("save_async", "metadata", "ManifestError", "metadata/lock: a builtins.generator is not"),
        ("load", "path", "TypeError", "the first argument is the path, got an int"),
        ("load", "place", "PathError", "ftp"),
        ("load", "missing", "ValueError", "never"),
        ("load", "options", "TypeError", "options"),
        ("load_into", "select", "TypeError", "select"),
        ("load_into", "state", "TypeError", "there is nothing to load into"),
        ("save_state_dict", "planner", "TypeError", "SavePlanner"),
        ("save", "timeout", "ValueError", "timeout must be more than 0 seconds, got 0"),
        ("save", "timeout in words", "TypeError", "timeout is a number of seconds, not a str"),
        ("save", "group", "TypeError", "a group of processes is an xckpt.Group"),
        ("save_async", "timeout", "ValueError", "timeout must be more than 0 seconds, got 0"),
        ("save_async", "group", "TypeError", "a group of processes is an xckpt.Group"),
        ("load", "timeout", "ValueError", "timeout must be more than 0 seconds, got 0"),
        ("load", "group", "TypeError", "a group of processes is an xckpt.Group"),
        ("manager", "timeout", "ValueError", "timeout must be more than 0 seconds, got 0"),
        ("manager", "group", "TypeError", "a group of processes is an xckpt.Group"),
        ("convert", "options", "TypeError", "options"),
        ("convert", "format", "ValueError", "tar"),
        ("export", "options", "TypeError", "export_checkpoint takes options=xckpt.LoadOptions"),
        ("convert", "group", "TypeError", "a group of processes is an xckpt.Group"),
        ("save_state_dict", "coordinator", "ValueError", "coordinator_rank 5 is not one of"),
        ("save_state_dict", "coordinator in words", "TypeError", "an int, not the str '0'"),
        ("load_state_dict", "state", "TypeError", "there is nothing to load into"),
        ("load_state_dict", "half a coordinator", "TypeError", "an int, not the float 0.5"),
        ("load_state_dict", "coordinator", "ValueError", "coordinator_rank 5 is not one of"),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank(
    two_ranks: Ranks, tmp_path: Path, call: str, wrong: str, kind: str, words: str, chosen: int
) -> None:
    if call.startswith(("load", "convert", "export")):
        xckpt.save(tmp_path / "good", {"w": np.ones(3, np.float32)})
    first, second = two_ranks.run(on_rank_wrong, tmp_path / "c", call, wrong, chosen)
    assert first == second and first[0] == kind and first[2], (first, second)
    assert f"rank {chosen}: {kind}: " in first[1] and words in first[1], first[1]
    assert not (tmp_path / "c").exists()


def on_rank_restore(rank: int, path: Path, call: str, chosen: int) -> list[tuple[str, str]]:
    state = {"w": torch.zeros(3)}
    run = xckpt.CheckpointManager(path, timeout=20)
    wrong: dict[str, Any] = {"stric": True} if rank == chosen else {}
    said = [error_told(lambda: getattr(run, call)(state, **wrong)), error_told(lambda: run.steps())]
    run.restore_into(state)
    assert state["w"].tolist() == [1, 1, 1]
    return said


@pytest.mark.parametrize("call", ["restore", "restore_into"])
@pytest.mark.parametrize("chosen", [0, 1])
def test_an_argument_of_restore_that_one_rank_has_wrong(
    two_ranks: Ranks, tmp_path: Path, call: str, chosen: int
) -> None:
    """The others began to load, and heard of a lost rank."""
    with xckpt.CheckpointManager(tmp_path) as run:
        run.save(0, {"w": np.ones(3, np.float32)})
    first, second = two_ranks.run(on_rank_restore, tmp_path, call, chosen)
    assert first == second and first[0][0] == "TypeError" and first[1] == ("", ""), first
    words = f"rank {chosen}: TypeError: {call} has no argument 'stric'; did you mean strict?"
    assert words in first[0][1]


def on_rank_at_another_step(rank: int, path: Path, chosen: int) -> list[tuple[str, str]]:
    """`should_save` at one step, and `save` at the next one on a single rank."""
    state, steps = {"w": torch.ones(3)}, xckpt.policies.EverySteps(1)
    with xckpt.CheckpointManager(path, save=steps, timeout=20) as run:
        assert run.should_save(3)
        said = [error_of(lambda: run.save(4 if rank == chosen else 3, state))]
        # All of them leave what they have foreseen.
        assert run.should_save(5)
        said.append(error_of(lambda: run.save(6, state)))
    return said


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_step_that_one_rank_has_not_foreseen(
    two_ranks: Ranks, tmp_path: Path, chosen: int
) -> None:
    first, second = two_ranks.run(on_rank_at_another_step, tmp_path / "run", chosen)
    assert first == second and first[0][0] == "PlanError", first
    steps = ", ".join(f"rank {rank}: {4 if rank == chosen else 3}" for rank in range(2))
    assert f"the ranks ask for a save at different steps ({steps})" in first[0][1]
    assert first[1] == ("", "")
    assert [step.number for step in xckpt.CheckpointManager(tmp_path / "run").steps()] == [6]


def manage(run: xckpt.CheckpointManager, call: str, step: int) -> object:
    state = {"w": torch.zeros(3)}
    if call == "save":
        return run.save(step, state)
    if call in ("steps", "best"):
        return run.steps() if call == "steps" else run.best("loss")
    return run.delete(1) if call == "delete" else run.restore(state)


def on_rank_another_call(rank: int, path: Path, calls: tuple[str, str]) -> list[tuple[str, str]]:
    """Another call of the manager on each rank, and then the same one."""
    with xckpt.CheckpointManager(path, save=xckpt.policies.EverySteps(1), timeout=20) as run:
        for step in (1, 2):
            run.save(step, {"w": torch.ones(3)})
        run.wait()
        told = [error_of(lambda: manage(run, calls[rank], 3))]
        return [*told, error_of(lambda: manage(run, "restore", 3))]


WHAT = {
    "save": "save a step, if one is due",
    "delete": "delete a step",
    "restore": "restore a step",
    "steps": "list the steps",
    "best": "find the best step",
}


@pytest.mark.parametrize(
    "calls",
    [
        ("save", "delete"),
        ("delete", "save"),
        ("save", "restore"),
        ("restore", "save"),
        ("delete", "restore"),
        ("save", "steps"),
        ("delete", "steps"),
        ("restore", "steps"),
        ("best", "steps"),
        ("save", "best"),
        ("best", "restore"),
    ],
)
def test_another_call_of_the_manager_on_one_rank(
    two_ranks: Ranks, tmp_path: Path, calls: tuple[str, str]
) -> None:
    first, second = two_ranks.run(on_rank_another_call, tmp_path / "run", calls)
    assert first == second and first[0][0] == "PlanError" and first[1] == ("", ""), first
    zero, one = (WHAT[call] for call in calls)
    assert f"rank 1: PlanError: this rank is to {one}, and rank 0 to {zero}; every" in first[0][1]
    assert [s.number for s in xckpt.CheckpointManager(tmp_path / "run").steps()] == [1, 2]


@pytest.mark.parametrize("call", ["save", "delete", "restore", "best"])
def test_another_call_where_the_coordinator_has_listed_the_steps(
    two_ranks: Ranks, tmp_path: Path, call: str
) -> None:
    """It waits for nobody, so only the rank that reads its listing learns of it."""
    first, second = two_ranks.run(on_rank_another_call, tmp_path / "run", ("steps", call))
    assert first == [("", ""), ("", "")] and second[1] == ("", "")
    said = f"this rank is to {WHAT[call]}, and rank 0 to list the steps; every rank has to make"
    assert second[0][0] == "PlanError" and said in second[0][1]


def on_rank_zero_alone(rank: int, path: Path) -> tuple[str, str, float]:
    group: Any = dist.new_group()
    if rank:
        time.sleep(2)
        return "", "", 0.0
    started = time.monotonic()
    kind, text = error_of(lambda: xckpt.save(path, {"w": torch.ones(3)}, group=group, timeout=1))
    return kind, text, time.monotonic() - started


def test_only_rank_zero_calls(two_ranks: Ranks, tmp_path: Path) -> None:
    """Without a timeout it logs a warning: `tests/torch/test_waiting.py`."""
    (kind, text, seconds), _ = two_ranks.run(on_rank_zero_alone, tmp_path / "c")
    assert kind == "RanksFailedError" and seconds < 1 + 4 * ALLOWANCE
    assert "rank 1: sent nothing for 1 s; is it alive, and did it call the same save" in text
    assert "Usual causes: `if rank == 0:` around the call, no_dist=True on one rank" in text
    assert list(tmp_path.iterdir()) == []


class Deadly(xckpt.planner.DefaultSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        die()


def on_rank_killed(rank: int, path: Path) -> tuple[str, str]:
    planner = Deadly() if rank == 1 else None
    return error_of(lambda: xckpt.save(path, {"w": torch.ones(3)}, planner=planner))


def test_a_rank_is_killed(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        (ok, answer), dead = ranks.attempt(on_rank_killed, tmp_path / "c")
    assert ok and dead == (False, "ended with code -9")
    assert answer[0] == "RanksFailedError"
    assert "rank 1: the process was probably killed (out of memory?)" in answer[1]
    assert not (tmp_path / "c").exists()


SCRIPT = """
import sys, numpy as np, xckpt
try:
    xckpt.save(sys.argv[1], {"w": np.ones(3)})
except xckpt.NoGroupError as error:
    print(error)
"""


@pytest.mark.thorough
def test_torchrun_without_a_process_group(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    said = "WORLD_SIZE says that there are 2 processes (torchrun), but no process group joins them"
    assert done.stdout.count(said) == 2
    assert done.stdout.count("call torch.distributed.init_process_group()") == 2
    assert done.stdout.count("group=xckpt.LocalGroup()") == 2
    assert not (tmp_path / "c").exists()
