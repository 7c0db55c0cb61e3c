"""What the README and the pages cut from it show is so: code, commands, files and names.

1. The first block saves a checkpoint, and everything else that reads one is shown that one.
2. A block of code or a command that no test here knows is a failure: show it, then add it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import xckpt
from docs.site import picture
from tests.support import snippets
from tests.support.sharded_arrays import cut
from xckpt.cli.commands import commands
from xckpt.core.metadata import Sharding

ROOT = Path(__file__).parents[2]
PAGES = (
    *snippets.GIVEN_TO,
    "docs/how-to/shell.md",
    "docs/why/how-it-works.md",
    "docs/why/limits.md",
)
README = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
LINES_AT_MOST = 200
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
OTHERS = "".join(code for language, code in BLOCKS if not language)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", PROSE)

FIRST, CALLS, PLANNER = "# a laptop", "-> Metadata", "class HalfPrecision"
DCP, ASYNC, RUN = "XckptStorageWriter", "stager.prepare", "CheckpointManager"
TARGET = "# into the model's own tensors"
PART = "# the model alone"
LINES = [line for line in OTHERS.splitlines() if re.match(r"(\$ )?xckpt ", line)]


def python(phrase: str) -> str:
    """The block of Python with a phrase."""
    [found] = [code for code in PYTHON if phrase in code]
    return found


def execute(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "README.md", "exec"), names)
    return names


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Parameter(torch.arange(50304 * 768.0).reshape(50304, 768) % 8191)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's checkpoints are."""
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    """The names of the first block, after it was run."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
    with chdir(folder):
        # Another model, for the command that looks for a mapping to one.
        xckpt.save("other", {"wte": {"embedding": np.zeros((50304, 768), np.float32)}})
        return execute(python(FIRST), model=Model(), step=11, jax=jax, sharding=sharding, zarr=zarr)


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= LINES_AT_MOST


def test_the_drawing_of_the_readme_is_of_the_grid_that_is_chosen() -> None:
    assert picture.FILE.read_text(encoding="utf-8") == picture.drawing()
    assert picture.stored(picture.boxes(2, 2)) == picture.boxes(4, 2)


def test_every_block_of_python_is_run() -> None:
    phrases = (FIRST, CALLS, TARGET, PART, PLANNER, DCP, ASYNC, RUN)
    # The states to try, of how-to pages that tests/docs/test_pages.py runs whole.
    states = {code for code in PYTHON if code.startswith("import torch\n\nimport xckpt\n")}
    assert len(states) == 3
    assert {python(phrase) for phrase in phrases} | states == set(PYTHON)


def test_the_first_block(folder: Path, first: dict[str, Any]) -> None:
    saved = first["model"].wte.detach().numpy()
    loaded = first["state"]
    assert loaded["step"] == 11
    assert loaded["model"]["wte"].sharding == first["sharding"]
    assert len(loaded["model"]["wte"].addressable_shards) == 8
    for shard in loaded["model"]["wte"].addressable_shards:
        assert np.array_equal(shard.data, saved[shard.index])
    assert np.array_equal(first["weights"]["wte"], saved)
    assert np.array_equal(first["rows"], saved[10:20])
    last = python(FIRST).splitlines()[-1]
    with chdir(folder):
        assert np.array_equal(eval(last, first), saved)


def test_the_first_block_is_short() -> None:
    lines = [line for line in python(FIRST).splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 10


def test_a_model_as_the_target(folder: Path, first: dict[str, Any]) -> None:
    model = Model()
    with torch.no_grad():
        model.wte.zero_()
    with chdir(folder):
        names = execute(python(TARGET), xckpt=xckpt, model=model)
    assert torch.equal(model.wte, first["model"].wte)
    assert names["like"]["step"] == 11


def test_a_part_of_a_checkpoint(folder: Path, first: dict[str, Any]) -> None:
    model = Model()
    with torch.no_grad():
        model.wte.zero_()
    with chdir(folder):
        names = execute(python(PART), xckpt=xckpt, model=model)
    assert torch.equal(model.wte, first["model"].wte)
    assert torch.equal(names["tensors"]["model"]["wte"], first["model"].wte)


@pytest.mark.parametrize("line", python(CALLS).splitlines())
def test_the_calls_have_these_arguments(line: str) -> None:
    found = re.fullmatch(r"xckpt\.(\w+)\((.*)\) +-> +([\w\[\]]+)( +#.*)?", line)
    assert found
    name, arguments, result, _ = found.groups()
    real = inspect.signature(getattr(xckpt, name))
    shown = inspect.signature(execute(f"def shown({arguments}): ...")["shown"])
    for parameter in shown.parameters.values():
        actual = real.parameters[parameter.name]
        assert (actual.kind, actual.default) == (parameter.kind, parameter.default)
    order = [name for name in real.parameters if name in shown.parameters]
    assert order == list(shown.parameters)
    assert real.return_annotation == {"state": "Any"}.get(result, result)


def test_the_planner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {
        "model": torch.nn.Sequential(torch.nn.Linear(50, 30), torch.nn.Linear(30, 7)).state_dict(),
        "ids": torch.arange(5),
        "step": 4,
    }
    kept = {name: leaf.clone() for name, leaf in state["model"].items()}
    save, load = re.split(r"(?=^xckpt\.load_into)", python(PLANNER), flags=re.MULTILINE)
    with chdir(tmp_path):
        names = execute(save, xckpt=xckpt, state=state)
        stored: dict[str, Any] = dict(xckpt.open("half"))
        plain: Any = zarr.open_group("half", mode="r")
        for name, leaf in kept.items():
            assert torch.equal(state["model"][name], leaf)
            assert state["model"][name].dtype == torch.float32
            assert stored[f"model/{name}"].dtype == "float16"
            assert plain[f"model/{name}"].dtype == np.float16
            assert np.array_equal(stored[f"model/{name}"], leaf.half().numpy())
        assert (stored["ids"].dtype, stored["step"]) == ("int64", 4)
        assert np.array_equal(stored["ids"], np.arange(5))
        assert xckpt.open("half").verify() == []
        execute(load, **names)
    for name, leaf in kept.items():
        assert torch.equal(state["model"][name], leaf.half().float())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_distributed_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(5, 3)
    state: dict[str, Any] = {"model": model.state_dict(), "step": 4}
    kept = model.weight.detach().clone()
    save, load = re.split(r"(?=^dcp\.load)", python(DCP), flags=re.MULTILINE)
    with chdir(tmp_path):
        names = execute(save, state=state)
        with torch.no_grad():
            model.weight.zero_()
        state["step"] = 0
        execute(load, **names)
        assert torch.equal(model.weight, kept) and state["step"] == 4
        assert np.array_equal(xckpt.load("dcp")["model"]["weight"], kept)
        plain: Any = zarr.open_group("dcp", mode="r")
        assert np.array_equal(plain["model/weight"], kept)


def test_saving_while_training_goes_on(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000), "b": np.zeros(3), "step": 0}

    def train(state: dict[str, Any]) -> None:
        state["w"] += 1
        state["b"] += 1
        state["step"] += 1

    with chdir(tmp_path):
        execute(python(ASYNC), xckpt=xckpt, state=state, train=train)
        for step in (0, 50):
            loaded = xckpt.load(f"steps/{step}")
            assert loaded["step"] == step + 1
            assert (loaded["w"] == step + 1).all() and (loaded["b"] == step + 1).all()
    assert state["step"] == 100


def test_the_run_of_checkpoints(tmp_path: Path) -> None:
    state = {"w": np.zeros(3)}
    trained = []
    with chdir(tmp_path):
        for _ in range(2):
            names = execute(python(RUN), xckpt=xckpt, state=state, train=trained.append)
            assert [record.number for record in names["checkpoints"].steps()] == [0, 50]
    assert len(trained) == 100 + 49


def test_every_command_is_shown() -> None:
    assert {shlex.split(line.removeprefix("$ "))[1] for line in LINES} == set(commands.commands)
    inline = {found[1] for text in INLINE if (found := re.match(r"xckpt ([a-z]\w*)", text))}
    assert inline <= set(commands.commands)


def run(line: str) -> Result:
    command = shlex.split(line.removeprefix("$ "), comments=True)
    assert command[0] == "xckpt"
    return CliRunner().invoke(commands, command[1:])


IN_ORDER = [line for line in LINES if re.match("xckpt (cp|rm) ", line)]


@pytest.mark.parametrize("line", [x for x in LINES if not x.startswith("$") and x not in IN_ORDER])
@pytest.mark.usefixtures("first")
def test_a_command_answers(folder: Path, line: str) -> None:
    with chdir(folder):
        result = run(line)
    differs = line.startswith("xckpt diff")
    assert (result.exit_code, result.stderr) == (int(differs), "")
    assert result.stdout


@pytest.mark.usefixtures("first")
def test_a_copy_is_made_and_deleted(folder: Path) -> None:
    with chdir(folder):
        there = []
        for line in IN_ORDER:
            assert run(line).exit_code == 0
            there.append(xckpt.exists("ckpt.copy"))
    assert there == [True, False]


def test_the_drawing_is_what_the_command_prints(tmp_path: Path) -> None:
    """The same boxes as four ranks of torch have, from one process."""
    [line] = [line for line in LINES if line.startswith("$")]
    quarters = [((i, j), (2048, 2048)) for i in (0, 2048) for j in (0, 2048)]
    sharding = Sharding((("fsdp", 2), ("tp", 2)), ("Shard(dim=0)", "Shard(dim=1)"))
    array = np.zeros((4096, 4096), np.float32)
    with chdir(tmp_path):
        xckpt.save("ckpt", {"model": {"wq": cut(array, quarters, sharding)}})
        result = run(line)
    assert result.exit_code == 0
    printed = "".join(f"{row.rstrip()}\n" for row in result.stdout.splitlines())
    assert f"\n{line}\n{printed}" in OTHERS


@pytest.mark.usefixtures("first")
def test_the_files_of_a_checkpoint_are_there(folder: Path) -> None:
    listed = re.findall(r"^(ckpt/\S+)", OTHERS, re.MULTILINE)
    assert "ckpt/xckpt.json" in listed
    # A folder is there for some checkpoints alone, as its line says.
    files = [path for path in listed if not path.endswith("/")]
    assert [path for path in files if not (folder / path).is_file()] == []


def files_named() -> Iterator[str]:
    for text in INLINE:
        yield from re.findall(r"(?:^|(?<=\s))[\w./]*\w\.(?:py|json|md|toml)(?=$|\s)", text)


def test_the_files_named_are_there(folder: Path, first: dict[str, Any]) -> None:
    named = set(files_named())
    assert {"xckpt/api/save.py", "core/geometry/grid.py", "docs/architecture.md"} <= named
    made = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    for name in named:
        places = (ROOT / name, ROOT / "xckpt" / name, folder / "ckpt" / name)
        assert any(place.is_file() for place in places) or name in made, name


def test_the_make_targets_are_there() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = re.findall(r"\bmake ([\w-]+)", "\n".join([OTHERS, *INLINE]))
    assert {"demo", "test", "docs", "bench"} <= set(called) <= set(targets)


def test_the_names_exist() -> None:
    code = "\n".join([*PYTHON, *INLINE])
    named = set(re.findall(r"\bxckpt(?:\.[A-Za-z_]\w*)+", code)) - {"xckpt.json", "xckpt.digests"}
    assert {"xckpt.SaveOptions", "xckpt.zarr_dtypes", "xckpt.planner"} <= named
    for name in named:
        parts = name.split(".")[1:]
        found: object = xckpt
        for depth, part in enumerate(parts, 1):
            if not hasattr(found, part):
                importlib.import_module(".".join(["xckpt", *parts[:depth]]))
            found = getattr(found, part)


def test_the_options_exist() -> None:
    calls = [
        found
        for text in INLINE
        for found in re.findall(r"^xckpt\.(SaveOptions|LoadOptions)\((.*)\)$", text)
    ]
    assert sorted(name for name, _ in calls) == ["LoadOptions", "SaveOptions"]
    for name, arguments in calls:
        fields = {field.name for field in dataclasses.fields(getattr(xckpt, name))}
        assert set(re.findall(r"(\w+)=", arguments)) <= fields
