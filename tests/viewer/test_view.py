"""Views of runs, of pairs, of shared files, and in notebooks."""

from __future__ import annotations

import copy
import html as html_module
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from xckpt.cli.commands import commands
from xckpt.errors import NotACheckpointError
from xckpt.policies import EverySteps, Latest
from xckpt.viewer.model import CheckpointPage, as_json
from xckpt.viewer.server import PageServer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run") / "run"
    state = {"w": np.arange(1000.0), "v": np.zeros(1000), "step": 0}
    keep = [Latest(2), EverySteps(2)]
    with xckpt.CheckpointManager(root, save=[EverySteps(1)], keep=keep) as manager:
        for step in (1, 2, 3, 4):
            state = {"w": state["w"] + 1, "v": state["v"], "step": step}
            manager.save(step, state, metrics={"loss": 1 / step, "odd": float("nan")})
    return root


@pytest.mark.parametrize("wrong", [{"plan": 3}, {"plan": None}, {"options": {"threads": 2}}])
def test_arguments_that_make_no_sense_are_named(root: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(wrong))):
        xckpt.view(root, **wrong)


def test_a_view_is_copied_and_pickled(root: Path) -> None:
    """It was an AttributeError of a local lambda; functions of the first process stay there."""
    seen: list[xckpt.Progress] = []
    options = xckpt.LoadOptions(threads=1, progress=lambda done: seen.append(done))
    views = [
        xckpt.view(root),
        xckpt.view(root / "step-00000002", plan="data on data=2", options=options),
        xckpt.view(root / "step-00000002", diff=root / "step-00000003", options=options),
    ]
    assert seen
    for view in views:
        for again in (copy.copy(view), copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
            assert again.page == view.page and repr(again) == repr(view)
    pickle.loads(pickle.dumps(views[0])).step("step-00000002").save(root.parent / "step.html")
    assert (root.parent / "step.html").exists()


def test_a_leaf_of_a_run_is_a_question_about_one_step(root: Path, tmp_path: Path) -> None:
    picture = ["--leaf", "w", "--output", str(tmp_path / "w.svg")]
    result = CliRunner().invoke(commands, ["view", str(root), *picture])
    assert result.exit_code == 2 and "give the path of one" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("about", [{"plan": "data on data=2"}, {"diff": "nowhere"}])
def test_a_plan_and_a_comparison_of_a_run_are_questions_about_one_step(
    root: Path, about: dict[str, Any]
) -> None:
    """The page of the run came, without a word of them."""
    with pytest.raises(xckpt.NotACheckpointError, match="give the path of one"):
        xckpt.view(root, **about)


def test_a_run(root: Path) -> None:
    page = xckpt.view(root).page
    assert page.checkpoint is None
    assert page.run is not None
    assert [step.number for step in page.run] == [2, 3, 4]
    assert [step.metrics["loss"] for step in page.run] == [1 / 2, 1 / 3, 1 / 4]
    assert page.run[0].metrics["odd"] == "nan"
    assert page.run[0].kept_by == ("EverySteps(2)",)
    assert page.run[1].bytes == 16_000
    assert page.run[1].shared == 8_000


def test_a_step_of_a_run(root: Path) -> None:
    view = xckpt.view(root)
    step = view.step("step-00000003")
    assert step.page.checkpoint is not None
    assert step is view.step("step-00000003")
    # v alone is shared with other steps.
    names = step.page.checkpoint.names
    assert step.page.checkpoint.shared == {str(names.index("v")): 8_000}
    [tensor] = [kind for kind in step.page.checkpoint.kinds if kind.kind == "tensor"]
    assert b"annotation" not in as_json(tensor)  # What is empty takes no room in the page.
    assert b"shared" not in as_json(CheckpointPage((), (), ()))
    with pytest.raises(ValueError, match="no step"):
        view.step("../other")
    with PageServer(view) as server:
        for name, status in (("step-00000003", 200), ("..", 400), ("%2e%2e", 400), ("x", 400)):
            assert server.answer(f"/{server.token}/steps/{name}/")[0] == status
        asked = f"/{server.token}/steps/step-00000003/values?leaf={names.index('w')}&across=0&at=0"
        assert '"count":1000' in str(server.answer(asked)[2])


def test_a_pair() -> None:
    first = {"same": np.zeros(4), "other": np.zeros(4), "gone": np.zeros(2), "step": 1}
    second = {"same": np.zeros(4), "other": np.ones(4), "new": np.zeros(2), "step": 2}
    xckpt.save("memory://test-view-a", first)
    xckpt.save("memory://test-view-b", second)
    diff = xckpt.view("memory://test-view-a", diff="memory://test-view-b").page.diff
    assert diff is not None
    found = {each.name: (each.kind, each.bytes) for each in diff.differences}
    assert found == {
        "gone": ("missing", 16),
        "new": ("added", 16),
        "other": ("content", 32),
        "step": ("content", 0),
    }
    assert (diff.equal, diff.equal_bytes) == (1, 32)


def test_another_format(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros((3, 4), np.float32)}, tmp_path / "model.safetensors")
    page = xckpt.view(tmp_path / "model.safetensors").page
    assert page.format == "safetensors"
    assert page.checkpoint is not None
    assert page.checkpoint.kinds[0].shape == (3, 4)


def test_nothing_is_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpointError):
        xckpt.view(tmp_path / "nothing")


def test_a_cell_of_a_notebook_is_a_frame_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    xckpt.save("memory://test-view-cell", {'"><script>': 1})
    view = xckpt.view("memory://test-view-cell")
    cell = view._repr_html_()
    assert cell.startswith("<iframe ")
    assert 'sandbox="allow-scripts"' in cell
    inner = cell.partition('srcdoc="')[2].partition('"')[0]
    assert html_module.unescape(inner) == view.html()
    monkeypatch.setattr("xckpt.viewer.view.CELL", 10)
    assert "too long" in view._repr_html_()


def test_the_command(root: Path, tmp_path: Path) -> None:
    step = str(root / "step-00000003")
    asked = ["--output", str(tmp_path / "a.html"), "--diff", str(root / "step-00000002")]
    done = CliRunner().invoke(commands, ["view", step, *asked, "--plan", "a on a=2"])
    assert done.exit_code == 0, done.output
    written = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert '"plan":{' in written
    assert '"diff":{' in written
    (tmp_path / "plan.txt").write_text("mesh a=2\n*: a", encoding="utf-8")
    plan = f"@{tmp_path / 'plan.txt'}"
    written = ["-o", str(tmp_path / "b"), "--plan", plan]
    done = CliRunner().invoke(commands, ["view", step, *written, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"] and (tmp_path / "b").exists(), "both were asked for"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--plan", "nonsense"], "--plan: 'nonsense' is no"),
        (["--plan", "@/nowhere"], "cannot be read"),
        (["--plan", "@LONG"], "is longer than a plan can be"),
        (["--output", "/nowhere/a.html"], "cannot be written"),
        (["--diff", "hf://x/y"], "xckpt: hf://x/y: the scheme"),
    ],
)
def test_the_command_refuses(root: Path, tmp_path: Path, arguments: list[str], words: str) -> None:
    long = tmp_path / "LONG"
    long.write_bytes(b" " * ((1 << 20) + 1))
    arguments = [argument.replace("LONG", str(long)) for argument in arguments]
    step = str(root / "step-00000003")
    done = CliRunner().invoke(commands, ["view", step, "--output", "/dev/null", *arguments])
    assert done.exit_code == 2
    assert words in done.output
