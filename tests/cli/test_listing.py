"""`xckpt ls`: patterns, order, a pipe; and names that are no harmless text."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import xckpt
from tests.support.time_limit import untraced
from xckpt.cli.commands import commands
from xckpt.cli.listing import Row
from xckpt.cli.render.tables import checkpoint_table, console, leaf_list
from xckpt.cli.report import checkpoint_report
from xckpt.core.manifest.codec import encode
from xckpt.core.manifest.entries import Manifest, TensorEntry
from xckpt.storage.array import digest_bytes

LEAVES = 100_000
TURNED = "a\u202eb\x1b[31m"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ls") / "ckpt"
    state = {
        "model": {"w": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float16)},
        "opt": {"w": np.zeros((8, 4)), "step": 3},
        TURNED: 1,
    }
    xckpt.save(path, state)
    return path


def test_a_leaf_that_is_the_whole_tree_and_a_tree_without_leaves() -> None:
    """The name was left out, and of no leaves a line was printed."""
    xckpt.save("memory://ls-root", 7)
    assert run("ls", "memory://ls-root").stdout == "(the root)  int\n"
    assert "\n(the root)  int    7\n" in run("info", "memory://ls-root").stdout
    xckpt.save("memory://ls-none", {})
    assert run("ls", "memory://ls-none").stdout == ""


def names(result: Result) -> list[str]:
    assert result.exit_code == 0, result.stderr
    return [line.split()[0] for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("patterns", "listed"),
    [
        (["model"], ["model/w", "model/b"]),
        (["*/w"], ["model/w", "opt/w"]),
        (["opt/step", "model/?"], ["model/w", "model/b", "opt/step"]),
        (["**/step", "*/b"], ["model/b", "opt/step"]),
    ],
)
def test_patterns(saved: Path, patterns: list[str], listed: list[str]) -> None:
    assert names(run("ls", saved, *patterns)) == listed


def test_a_pattern_that_means_no_leaf(saved: Path) -> None:
    result = run("ls", saved, "model/v")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no leaf 'model/v'; did you mean model/w" in result.stderr
    assert "has no leaf 'modle'; did you mean model " in run("ls", saved, "modle").stderr


def test_a_run_is_listed_by_number_alone(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "step-1", {"w": np.zeros(3)})
    assert run("ls", tmp_path).exit_code == 0
    for option in (["--sort", "size"], ["w"]):
        result = run("ls", tmp_path, *option)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"give the path of one: {tmp_path / 'step-1'}" in result.stderr


def test_a_step_of_orbax_is_one_of_a_run(tmp_path: Path) -> None:
    """Alone it is what the folder holds; beside steps of xckpt, the folder is a run."""
    import orbax.checkpoint as ocp

    with warnings.catch_warnings(), ocp.CheckpointManager(tmp_path / "run") as theirs:
        warnings.simplefilter("ignore")
        theirs.save(9, args=ocp.args.StandardSave({"w": np.ones(4)}))
        theirs.wait_until_finished()
    assert names(run("ls", tmp_path / "run")) == ["w"]
    xckpt.save(tmp_path / "run/step-00000010", {"w": np.zeros(3)})
    assert names(run("ls", tmp_path / "run")) == ["9", "step-00000010"]
    assert names(run("ls", tmp_path / "run", "w")) == ["w"]
    shown = xckpt.view(tmp_path / "run").page.run
    assert shown is not None and [each.name for each in shown] == ["9", "step-00000010"]


@pytest.mark.parametrize(
    ("order", "listed"),
    [
        (["--sort", "size"], ["opt/w", "model/w", "model/b", "opt/step"]),
        (["--sort", "name", "--reverse"], ["opt/w", "opt/step", "model/w", "model/b"]),
        (["--sort", "dtype"], ["model/b", "model/w", "opt/w", "opt/step"]),
        (["--reverse"], ["opt/step", "opt/w", "model/b", "model/w"]),
    ],
)
def test_orders(saved: Path, order: list[str], listed: list[str]) -> None:
    assert names(run("ls", saved, "model", "opt", *order)) == listed
    rows = json.loads(run("ls", saved, "model", "opt", *order, "--json").stdout)
    assert [row["name"] for row in rows] == listed


def test_a_terminal_of_no_width_gets_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "0")
    console().print(leaf_list([Row("model/w", "int8", (2, 3), 6, True)]))
    assert terminal.getvalue().split() == ["model/w", "int8", "[2,", "3]", "6", "B"]


def test_no_name_reaches_the_terminal_as_it_is(saved: Path, tmp_path: Path) -> None:
    xckpt.save(tmp_path / "other", {"model": 1, TURNED: 1.5})
    for command in (
        ["ls", saved],
        ["info", saved],
        ["diff", saved, tmp_path / "other"],
        ["info", saved, "a\u202eb"],
        ["ls", saved, "\x1b[31m"],
    ):
        result = run(*command)
        assert "\x1b" not in result.output and "\u202e" not in result.output
    assert r"a\u202eb\x1b[31m" in run("ls", saved).stdout


@pytest.fixture(scope="module")
def very_many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `LEAVES` tensors, without their chunks."""
    return without_chunks(tmp_path_factory.mktemp("many"), LEAVES)


def without_chunks(path: Path, count: int) -> Path:
    """What a checkpoint of so many tensors has beside its chunks."""
    shapes = [(1 + number % 7, 4) for number in range(7)]
    leaves = tuple(
        TensorEntry(f"model/{i // 10}/b{i % 10}/w", "float32", shapes[i % 7], chunk=shapes[i % 7])
        for i in range(count)
    )
    digests = bytes(16 * count)
    manifest = Manifest(leaves, digest_bytes(digests).hex())
    (path / "xckpt.digests").write_bytes(digests)
    (path / "xckpt.json").write_bytes(encode(manifest, digest_bytes))
    return path


def piped(*arguments: str | Path) -> tuple[str, float]:
    """What a command prints into a pipe, and the seconds of processor time that it takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "xckpt", *map(str, arguments)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return printed, after.ru_utime - before.ru_utime


def test_a_pipe_gets_a_line_for_each_of_many_leaves(tmp_path: Path) -> None:
    listed, _ = piped("ls", without_chunks(tmp_path, 10_000))
    assert listed.count("\n") == 10_000
    assert listed.endswith("model/999/b9/w  float32  [4, 4]   64 B\n")


@pytest.mark.thorough
@untraced
@pytest.mark.parametrize(("command", "seconds"), [("ls", 2.5), ("info", 5.0)])
def test_very_many_leaves_take_little_processor_time(
    very_many: Path, command: str, seconds: float
) -> None:
    # The best of some runs: beside other work a processor does less in a second.
    assert min(piped(command, very_many)[1] for _ in range(5)) < seconds


def test_a_pipe_gets_what_a_terminal_shows(saved: Path) -> None:
    report = checkpoint_report(str(saved), xckpt.open(saved).manifest)
    screen = Console(width=200, file=io.StringIO())
    screen.print(checkpoint_table(report))
    assert isinstance(screen.file, io.StringIO)
    shown = [line.rstrip() for line in screen.file.getvalue().splitlines()]
    assert run("info", saved).stdout.splitlines() == shown


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    for command in ("ls", "view"):
        refused = run(command, tmp_path / "notes.txt")
        assert refused.exit_code == 2
        expected = f"xckpt: {tmp_path / 'notes.txt'} is a file, not a checkpoint folder\n"
        assert refused.stderr == expected
