"""What people do wrong on their first day, and what they read then: a row each, with the message.

A message says what is wrong, names the leaf, argument or path, and what to do. Leaves, keys and damage
are in `tests/mistakes/test_states.py`; what only several ranks can do wrong is in
`tests/mistakes/test_ranks.py`.
"""

# ruff: noqa: E501  # messages are one line

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import xckpt
from tests.support.steps import steps
from tests.support.time_limit import ALLOWANCE
from xckpt.convert import convert
from xckpt.errors import Problem, RankFailure, RanksFailedError
from xckpt.planner import DefaultLoadPlanner, DefaultSavePlanner
from xckpt.storage import ZarrStorageReader, ZarrStorageWriter

untyped: Any = xckpt

MODEL = {f"l{n}": np.zeros((3, 4), np.float32) for n in range(3)}
STATE = {"model": MODEL, "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "step_10"
    xckpt.save(path, STATE)
    return path


def said(kind: type[BaseException], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# Paths.


def test_a_path_that_does_not_exist(saved: Path) -> None:
    message = said(xckpt.NotACheckpointError, lambda: xckpt.load(saved.parent / "step_11"))
    assert (
        "step_11 holds no committed checkpoint: it does not exist; beside it: step_10; " in message
    )
    assert message.endswith(f"did you mean {saved}?")


def test_a_folder_of_step_folders(saved: Path) -> None:
    message = said(xckpt.NotACheckpointError, lambda: xckpt.load(saved.parent))
    assert message.endswith(f"it holds 1 checkpoint: step_10; give the path of one: {saved}")


def test_a_save_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / ".step_5.saving-1a").mkdir()
    message = said(xckpt.NotACheckpointError, lambda: xckpt.open(tmp_path / "step_5"))
    assert "a save to it is running or was cut off before its commit" in message


def test_a_path_that_is_taken(saved: Path) -> None:
    message = said(xckpt.CheckpointExistsError, lambda: xckpt.save(saved, STATE))
    assert message == f"{saved} holds a checkpoint already; pass overwrite=True to replace it"


def test_a_scheme_that_is_not_supported() -> None:
    message = said(xckpt.StorageError, lambda: xckpt.load("hf://org/model"))
    assert message == (
        "hf://org/model: the scheme 'hf' is not supported; download it and give a local path, "
        "or give file://, memory://, s3:// or gs://"
    )


# Trees that do not fit.


def test_a_missing_and_an_extra_key(saved: Path) -> None:
    like = {"model": {**MODEL, "q": np.zeros(2)}}
    assert said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, like)).splitlines()[1:] == [
        "  - model/q: wanted, but not in the checkpoint",
        "  - step: in the checkpoint, but not wanted",
    ]


@pytest.mark.parametrize(
    "prefix, cure",
    [
        ("module.", "save and load model.module of a DistributedDataParallel"),
        ("_orig_mod.", "save and load the model that torch.compile was given"),
        ("encoder.", "take the prefix off the names of the target"),
    ],
)
def test_a_prefix(saved: Path, prefix: str, cure: str) -> None:
    like = {"model": {f"{prefix}{name}": array for name, array in MODEL.items()}, "step": 0}
    lines = said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, like)).splitlines()
    assert lines[0].startswith(
        "the target does not fit the checkpoint: 3 leaves wanted but not in the checkpoint, "
        "3 leaves in the checkpoint but not wanted"
    )
    assert lines[1].startswith(
        f"  3 names in the target hold '{prefix}' and are in the checkpoint without it: {cure}"
    )


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_a_prefix_within_names(tmp_path: Path, prefix: str) -> None:
    """A block of a model was compiled, or wrapped, and not the whole."""
    xckpt.save(
        tmp_path / "c", {"model": {f"blocks.0.{prefix}{name}": MODEL[name] for name in MODEL}}
    )
    like = {"model": {f"blocks.0.{name}": array for name, array in MODEL.items()}}
    message = said(xckpt.TreeMismatchError, lambda: xckpt.load(tmp_path / "c", like))
    hint = f"3 names in the checkpoint hold '{prefix}' and are in the target without it: save and"
    assert hint in message


def test_only_a_part_is_wanted(saved: Path) -> None:
    message = said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, MODEL))
    assert (
        "3 names in the checkpoint hold 'model/' and are in the target without it: "
        "load(path, like, at='model') takes that part"
    ) in message


@pytest.mark.parametrize(
    "like, advice",
    [
        ({**STATE, "lr": 0.1}, 'missing="ignore" or strict=False keeps them as they are in the '),
        (
            {"model": MODEL},
            'unexpected="ignore" or strict=False loads without them, at= or select=',
        ),
        (
            {"model": MODEL, "lr": 0.1},
            "strict=False loads what both have; missing= and unexpected=",
        ),
    ],
)
def test_the_arguments_that_allow_a_difference_are_named(
    saved: Path, like: dict[str, Any], advice: str
) -> None:
    first = said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, like)).splitlines()[0]
    assert f"({advice}" in first
    kept = xckpt.load(saved, like, missing="ignore", unexpected="ignore")
    assert kept.keys() == like.keys() and kept.get("lr", 0.1) == 0.1


def test_a_renamed_leaf(saved: Path) -> None:
    like = {"model": {**MODEL}, "steps": 0}
    message = said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, like))
    assert "probably renamed: step in the checkpoint is steps in the target" in message


def test_another_shape_and_another_dtype(saved: Path) -> None:
    like = {
        "model": {**MODEL, "l0": np.zeros((4, 3), np.float32), "l1": np.zeros((3, 4))},
        "step": 0,
    }
    assert said(xckpt.TreeMismatchError, lambda: xckpt.load(saved, like)) == (
        "the target does not fit the checkpoint: 1 leaf of another shape, 1 leaf of another dtype\n"
        "  - model/l0: shape (3, 4) in the checkpoint, (4, 3) wanted\n"
        "  - model/l1: dtype float32 in the checkpoint, float64 wanted (cast=True casts)"
    )


def test_what_differs_is_there_as_values(saved: Path) -> None:
    with pytest.raises(xckpt.TreeMismatchError) as caught:
        xckpt.load(saved, {"model": {**MODEL, "l0": np.zeros((4, 3), np.float32)}})
    shape, extra = caught.value.problems
    assert isinstance(shape, Problem)
    assert (shape.leaf, shape.kind, shape.rank) == ("model/l0", "shape", None)
    assert (extra.leaf, extra.kind) == ("step", "unexpected")


def test_ten_thousand_leaves_differ_on_both_sides() -> None:
    xckpt.save("memory://many", {f"m{n}": n for n in range(10_000)}, overwrite=True)
    like = {f"k{n}": n for n in range(10_000)}
    lines = said(xckpt.TreeMismatchError, lambda: xckpt.load("memory://many", like)).splitlines()
    assert "10,000 leaves wanted but not in the checkpoint, 10,000 leaves in the che" in lines[0]
    assert len(lines) < 25
    assert "  ... and 9,990 more wanted but not in the checkpoint" in lines
    assert lines[-1] == "  ... and 9,990 more in the checkpoint but not wanted"


def differing(count: int) -> Callable[[], object]:
    """A load into as many leaves as there are, under other names."""
    xckpt.save(f"memory://differing-{count}", {f"m{n}": n for n in range(count)}, overwrite=True)
    like = {f"k{n}": n for n in range(count)}
    return lambda: said(
        xckpt.TreeMismatchError, lambda: xckpt.load(f"memory://differing-{count}", like)
    )


def test_what_differs_is_found_in_linear_time() -> None:
    differing(10)()  # what is imported and looked up once
    few, many = steps(differing(500)), steps(differing(2000))
    assert many < 4.4 * few


@pytest.mark.thorough
def test_ten_thousand_leaves_that_differ_are_found_soon() -> None:
    load = differing(10_000)
    started = time.process_time()
    load()
    assert time.process_time() - started < 3 * ALLOWANCE


def test_a_wrong_key_never_loads_nothing_in_silence(saved: Path) -> None:
    wrong: Any = {"modle": {"l0": MODEL["l0"]}}
    message = said(xckpt.TreeMismatchError, lambda: xckpt.load_into(saved, wrong, strict=False))
    assert "probably renamed: model/l0 in the checkpoint is modle/l0 in the target" in message


def test_a_leaf_that_is_not_there(saved: Path) -> None:
    for container in (xckpt.open(saved), xckpt.open(saved).metadata):
        assert "has no leaf 'modle/l0'; did you mean model/l0" in said(
            KeyError, lambda c=container: c["modle/l0"]
        )
    assert "did you mean model" in said(ValueError, lambda: untyped.load(saved, at="modle"))


# Arguments.


@pytest.mark.parametrize(
    "like, part",
    [
        ("model", "at='model' takes that part"),
        ("step", "at='step' takes that part"),
        ("model/l1", "at='model/l1' takes that part"),
        ("mod", "at= takes a part by its name"),
    ],
)
def test_a_name_in_place_of_a_target(saved: Path, like: str, part: str) -> None:
    for load in (xckpt.load, xckpt.load_into):
        message = said(xckpt.TreeMismatchError, lambda load=load: load(saved, like))
        wanted = "the root: wanted, but not in the checkpoint"
        assert f"  - {wanted}: a text is a value to be loaded; {part}\n" in message


def test_what_is_stored_is_no_target_and_gives_targets(saved: Path) -> None:
    checkpoint = xckpt.open(saved)
    message = said(xckpt.UnsupportedLeafError, lambda: xckpt.load(saved, checkpoint.tree))
    assert (
        "model/l0: an xckpt.storage.stored_array.StoredArray is not a target; "
        "xckpt.open(path).like('numpy')" in message
    )
    assert xckpt.load(saved, checkpoint.like("numpy"))["step"] == 3


def test_swapped_arguments() -> None:
    wrong: Any = STATE
    message = said(TypeError, lambda: xckpt.save(wrong, "path"))
    assert message == "the first argument is the path, got a dict: call save(path, state)"


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda p, o: untyped.save(p, STATE, options={}),
            "save takes options=xckpt.SaveOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.save(p, STATE, options=o),
            "save takes options=xckpt.SaveOptions(...), not LoadOptions",
        ),
        (
            lambda p, o: untyped.save_async(p, STATE, options=o),
            "save_async takes options=xckpt.SaveOptions(...), not LoadOptions",
        ),
        (
            lambda p, o: untyped.load(p, options={}),
            "load takes options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.load_into(p, {}, options={}),
            "load_into takes options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.open(p, options={}),
            "open takes options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.load(p, planner=xckpt.planner.DefaultSavePlanner()),
            "load takes an instance of xckpt.planner.LoadPlanner, not a DefaultSavePlanner",
        ),
        (
            lambda p, o: untyped.save(p, STATE, planner=xckpt.planner.DefaultSavePlanner),
            "save takes an instance of xckpt.planner.SavePlanner, not DefaultSavePlanner",
        ),
        (
            lambda p, o: untyped.save(p, STATE, group=3),
            "a group of processes is an xckpt.Group, a torch.distributed.ProcessGroup or a DeviceMesh, not an int",
        ),
        (
            lambda p, o: untyped.load(p, STATE, mapping={}),
            "load takes mapping=xckpt.convert.Mapping(...), not a dict",
        ),
        (
            lambda p, o: untyped.convert.convert(p, p / "to", mapping={}),
            "convert takes mapping=xckpt.convert.Mapping(...), not a dict",
        ),
        (
            lambda p, o: untyped.load(p, STATE, report=3),
            "load(report=) takes a function of a LoadReport, not an int",
        ),
        (
            lambda p, o: untyped.diff(p, p, options={}),
            "diff takes options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.storage.ZarrStorageWriter(p, options=o),
            "ZarrStorageWriter takes options=xckpt.SaveOptions(...), not LoadOptions",
        ),
        (
            lambda p, o: untyped.storage.ZarrStorageReader(p, options={}),
            "ZarrStorageReader takes options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.storage.ZarrStorageReader(None),
            "a path must be a str or a PathLike of str, not NoneType",
        ),
        (
            lambda p, o: untyped.storage.ZarrStorageWriter(p, base=5),
            "ZarrStorageWriter(base=) takes a path or None, not the int 5",
        ),
        (
            lambda p, o: untyped.StepRecord(1.5),
            "StepRecord(number=) takes an int, not the float 1.5",
        ),
        (
            lambda p, o: untyped.CheckpointManager(p, load_options={}),
            "CheckpointManager takes load_options=xckpt.LoadOptions(...), not a dict",
        ),
        (
            lambda p, o: untyped.diff(None, p),
            "the first argument is the path, got a NoneType: call diff(first, second)",
        ),
        (
            lambda p, o: untyped.copy(p, 3),
            "the second argument is the path, got an int: call copy(source, target)",
        ),
        (
            lambda p, o: untyped.CheckpointManager(p).restore_with(3),
            "restore_with(load=) takes a function of a step's path, not the int 3",
        ),
        (
            lambda p, o: untyped.planner.GridOptions(chunk_bytes="8M"),
            "chunk_bytes is a number of bytes, an int, not '8M'",
        ),
    ],
)
def test_an_argument_of_another_type(tmp_path: Path, call: Any, message: str) -> None:
    assert said(TypeError, lambda: call(tmp_path / "ckpt", xckpt.LoadOptions())) == message
    assert list(tmp_path.iterdir()) == []


FLAGGED: dict[Callable[..., object], Callable[[Path], list[object]]] = {
    xckpt.save: lambda path: [path, STATE],
    xckpt.save_async: lambda path: [path, STATE],
    xckpt.save_state_dict: lambda path: [STATE, ZarrStorageWriter(path)],
    xckpt.load: lambda path: [path, STATE],
    xckpt.load_into: lambda path: [path, STATE],
    xckpt.load_state_dict: lambda path: [dict(STATE), ZarrStorageReader(path)],
    xckpt.copy: lambda path: [path, path.parent / "copy"],
    xckpt.gc: lambda path: [path],
    xckpt.diff: lambda path: [path, path],
    convert: lambda path: [path, path.parent / "converted"],
}


@pytest.mark.parametrize("call", FLAGGED, ids=lambda call: call.__name__)
def test_what_is_neither_true_nor_false(tmp_path: Path, call: Callable[..., object]) -> None:
    """``overwrite="no"`` replaced a checkpoint."""
    flags = [n for n, each in signature(call).parameters.items() if isinstance(each.default, bool)]
    assert flags
    for name in flags:
        wrong = partial(call, *FLAGGED[call](tmp_path / "ckpt"), **{name: "no"})
        message = said(TypeError, wrong)
        assert message == f"{call.__name__}({name}=) takes True or False, not the str 'no'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "planner, given, takes",
    [
        (DefaultSavePlanner, {"grid": 3}, "an xckpt.planner.GridOptions, not the int 3"),
        (DefaultSavePlanner, {"compare_replicas": "no"}, "True or False, not the str 'no'"),
        (
            DefaultSavePlanner,
            {"serialise": b""},
            "a function, not the bytes b''",
        ),
        (DefaultLoadPlanner, {"strict": "no"}, "True or False, not the str 'no'"),
        (DefaultLoadPlanner, {"in_place": None}, "True or False, not the NoneType None"),
        (DefaultLoadPlanner, {"picks": "w"}, "a function, not the str 'w'"),
        (DefaultLoadPlanner, {"new_leaves": {}}, "a function, not the dict {}"),
    ],
)
def test_a_planner_names_the_argument_that_it_cannot_take(
    planner: Any, given: dict[str, Any], takes: str
) -> None:
    [name] = given
    message = said(TypeError, lambda: planner(**given))
    assert message == f"{planner.__name__}({name}=) takes {takes}"


def test_the_progress_of_a_verification_is_a_function(saved: Path) -> None:
    wrong: Any = 3
    message = said(TypeError, lambda: xckpt.open(saved).verify(wrong))
    assert message == "verify(progress=) takes a function of an xckpt.Progress, not the int 3"


def test_a_flag_of_numpy_is_one() -> None:
    yes: Any = np.bool_(True)
    xckpt.save("memory://numpy-flag", STATE, overwrite=yes)
    xckpt.load("memory://numpy-flag", STATE, strict=yes, cast=yes, no_dist=yes)


def test_a_coordinator_that_is_no_rank() -> None:
    none: Any = ""
    writer = ZarrStorageWriter("memory://no-coordinator")
    said(TypeError, lambda: xckpt.save_state_dict(STATE, writer, coordinator_rank=none))


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"chunk_bytes": "8MB"},
            "SaveOptions(chunk_bytes=) takes a number of bytes, an int, such as 8 << 20 for 8 MiB, not the str '8MB'",
        ),
        (
            {"threads": 2.5},
            "SaveOptions(threads=) takes a number of threads or None, not the float 2.5",
        ),
        (
            {"memory_bytes": True},
            "SaveOptions(memory_bytes=) takes a number of bytes, an int, such as 8 << 20 for 8 MiB, not the bool True",
        ),
        ({"retries": 1.5}, "SaveOptions(retries=) takes a whole number or None, not the float 1.5"),
        ({"crc32c": "yes"}, "SaveOptions(crc32c=) takes True or False, not the str 'yes'"),
        (
            {"serialise": "pickle"},
            "SaveOptions(serialise=) takes a function from a leaf to bytes, not the str 'pickle'",
        ),
        (
            {"progress": "bar"},
            "SaveOptions(progress=) takes True, or a function that is called with an xckpt.Progress, not the str 'bar'",
        ),
        (
            {"metrics": 1},
            "SaveOptions(metrics=) takes a function that is called with an xckpt.Metrics, not the int 1",
        ),
    ],
)
def test_an_option_of_another_type(given: dict[str, Any], message: str) -> None:
    assert said(TypeError, lambda: xckpt.SaveOptions(**given)) == message


# Leaves.


def test_leaves_that_are_no_tensors(tmp_path: Path) -> None:
    state = {"f": len, "p": pathlib.PurePosixPath("a")}
    assert said(xckpt.UnsupportedLeafError, lambda: xckpt.save(tmp_path / "c", state)) == (
        "2 leaves cannot be saved\n"
        "  - f: a builtins.builtin_function_or_method is neither a tensor nor a plain Python value; "
        "remove it, convert it, or turn it into bytes by options=xckpt.SaveOptions(serialise=...)\n"
        "  - p: a pathlib.PurePosixPath is neither a tensor nor a plain Python value; "
        "save str(...) of it, remove it, or turn it into bytes by "
        "options=xckpt.SaveOptions(serialise=...)"
    )
    one = said(xckpt.UnsupportedLeafError, lambda: xckpt.save(tmp_path / "c", {"f": len}))
    assert one.startswith("1 leaf cannot be saved\n")


@pytest.mark.parametrize(
    "array, advice",
    [
        (
            np.array(["ab"]),
            "NumPy dtype <U2 cannot be stored; save text as a list of str, by .tolist()",
        ),
        (
            np.array([b"ab"]),
            "NumPy dtype |S2 cannot be stored; save it as a list of bytes, by .tolist()",
        ),
        (
            np.array([{}], dtype=object),
            "NumPy dtype object cannot be stored; save a list, by .tolist()",
        ),
        (
            np.zeros(1, "M8[D]"),
            "NumPy dtype datetime64[D] cannot be stored; save its numbers, by .view(np.int64)",
        ),
    ],
)
def test_arrays_of_no_numbers(tmp_path: Path, array: Any, advice: str) -> None:
    assert f"x: {advice}" in said(
        xckpt.UnsupportedLeafError, lambda: xckpt.save(tmp_path / "c", {"x": array})
    )


def test_a_dtensor_after_its_process_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])}
        xckpt.save(tmp_path / "c", state)
    finally:
        dist.destroy_process_group()
    assert "w: a DTensor whose process group was destroyed; save or load before" in said(
        xckpt.UnsupportedLeafError, lambda: xckpt.load(tmp_path / "c", state)
    )


def test_a_ranks_problems_are_indented_under_it() -> None:
    text = "1 leaf cannot be saved\n  - f: a function"
    error = RanksFailedError.of("save", [RankFailure(3, "UnsupportedLeafError", text)])
    assert str(error) == (
        "1 rank failed to save\n"
        "  - rank 3: UnsupportedLeafError: 1 leaf cannot be saved\n"
        "      - f: a function"
    )
    assert (error.problems[0].rank, error.problems[0].kind) == (3, "UnsupportedLeafError")
