"""The command line, run as people run it: output, exit codes, what it says of damage."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from jax.sharding import NamedSharding, PartitionSpec

import xckpt
from xckpt.cli.commands import commands
from xckpt.cli.render.tables import SafeConsole, checkpoint_table, console, leaf_table
from xckpt.cli.report import ArrayReport, LeafReport, checkpoint_report

CONSOLE_SCRIPT = "from xckpt.cli import main; main()"
STRANGE = "\x1b[31m [bold]red"
LONG = "a/very/long/name/" * 20 + "end"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, [str(argument) for argument in arguments])


def run_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CONSOLE_SCRIPT]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of leaf."""
    path = tmp_path_factory.mktemp("cli") / "ckpt"
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    spec = NamedSharding(mesh, PartitionSpec("data", "model"))
    state = {
        "model": {
            "wte": jax.device_put(np.arange(512, dtype=np.float32).reshape(16, 32), spec),
            "layers": [{"w": np.ones((33, 7), ml_dtypes.bfloat16)}, {"w": np.zeros((0, 7))}],
        },
        "scalar": np.float64(2.5) * np.ones(()),
        "step": 12345,
        "note": STRANGE,
        "long": "x" * 20_000,
        "empty": [],
        LONG: None,
    }
    xckpt.save(path, state, metadata={"run": "r1"}, options=xckpt.SaveOptions(chunk_bytes=256))
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "ckpt"))


def a_chunk(checkpoint: Path, leaf: str) -> Path:
    return next(path for path in sorted((checkpoint / leaf / "c").rglob("*")) if path.is_file())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_lists_every_leaf(saved: Path) -> None:
    result = run("ls", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert len(rows) == 8
    assert rows[0] == ["model/wte", "float32", "[16,", "32]", "2.0", "KiB"]
    assert rows[2] == ["model/layers/1/w", "float64", "[0,", "7]", "0", "B"]
    assert rows[3] == ["scalar", "float64", "[]", "8", "B"]
    assert rows[4] == ["step", "int"]


def test_ls_keeps_long_names_whole_in_a_pipe(saved: Path) -> None:
    name = LONG.replace("/", "%2F")
    assert f"{name}  None" in run("ls", saved).stdout


def test_info_has_values_under_a_title_of_theirs(saved: Path) -> None:
    titles, *rows = run("info", saved).stdout.split("\n\n")[1].splitlines()
    step = next(row for row in rows if row.split()[:2] == ["step", "int"])
    at = titles.index("shape or value  ")
    assert (step[:at].split(), step[at:].split()) == (["step", "int"], ["12345"])


def test_ls_as_json(saved: Path) -> None:
    rows = json.loads(run("ls", saved, "--json").stdout)
    assert [row["name"] for row in rows] == list(xckpt.open(saved))
    assert rows[0] == {"name": "model/wte", "dtype": "float32", "shape": [16, 32], "bytes": 2048}


def test_info_shows_the_tree(saved: Path) -> None:
    result = run("info", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert f"checkpoint {saved} holds 4 tensors and 4 values" in text
    assert "metadata {'run': 'r1'}" in text
    assert "wte float32 [16, 32] 2.0 KiB [8, 8] 8 PartitionSpec(data, model)" in text
    assert "layers list" in text
    assert "step int 12345" in text
    assert "empty list" in text


def test_info_of_a_leaf(saved: Path) -> None:
    text = " ".join(run("info", saved, "model/wte").stdout.split())
    assert "leaf model/wte dtype float32 shape [16, 32] size 2.0 KiB in 8 chunks" in text
    assert "layout one zarr array, chunks of [8, 8]" in text
    assert "saved as PartitionSpec(data, model) on data=2 x model=4" in text


def test_info_draws_a_leaf(saved: Path) -> None:
    chunks = """
   0       8       16      24     32
 0 ┏━━━━━━━┯━━━━━━━┯━━━━━━━┯━━━━━━━┓
   ┃       │       │       │       ┃
   ┃       │       │       │       ┃
   ┃       │       │       │       ┃
 8 ┠───────┼───────┼───────┼───────┨
   ┃       │       │       │       ┃
   ┃       │       │       │       ┃
   ┃       │       │       │       ┃
16 ┗━━━━━━━┷━━━━━━━┷━━━━━━━┷━━━━━━━┛

shards
   0                                             32
"""
    output = run("info", saved, "model/wte").stdout
    assert chunks in "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    assert run("info", saved, "scalar").stdout.endswith("\na scalar, in one chunk\n")
    assert run("info", saved, "model/layers/1/w").stdout.endswith("\nno elements, so no chunks\n")
    assert "chunk" not in run("info", saved, "step").stdout


def test_info_of_a_slice(saved: Path) -> None:
    output = run("info", saved, "model/wte", "--box", "0:4, 4:20").stdout
    text = " ".join(output.split())
    assert "slice [0, 4) x [4, 20) reads 3 of 8 chunks: 768 B for the 256 B wanted (3.00 x)" in text
    assert " 0 ┏━━━━━━━┯━━━━━━━┯━━━━━━━┯━━━━━━━┓\n   ┃░░░▓▓▓▓│▓▓▓▓▓▓▓│▓▓▓▓░░░│       ┃" in output
    leaf = json.loads(run("info", saved, "model/wte", "--box", "0:4, 4:20", "--json").stdout)
    assert leaf["reading"] == {
        "offset": [0, 4],
        "shape": [4, 16],
        "bytes_wanted": 256,
        "bytes_read": 768,
        "chunks_read": 3,
        "chunks": 8,
    }
    nothing = run("info", saved, "model/wte", "--box", "4:4").stdout
    assert "0 of 8 chunks: 0 B for the 0 B wanted" in nothing


def test_a_slice_is_one_of_a_tensor(saved: Path) -> None:
    for arguments, reason in (
        ((), "name one as LEAF"),
        (("model",), "name one as LEAF"),
        (("step",), "name one as LEAF"),
        (("model/wte", "x"), "unexpected extra argument"),
    ):
        result = run("info", saved, *arguments, "--box", "0:4")
        assert (result.exit_code, result.stdout) == (2, "")
        assert reason in result.stderr
    result = run("info", saved, "model/wte", "--box", "99")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--box: 99 is outside dimension 0, which has 16 elements" in result.stderr


def test_no_picture_where_its_characters_cannot_be_written(saved: Path) -> None:
    command = [sys.executable, "-c", CONSOLE_SCRIPT]
    result = subprocess.run(
        [*command, "info", str(saved), "model/wte"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()
    assert b"chunks of [8, 8]" in result.stdout


def test_info_of_a_container(saved: Path) -> None:
    lines = [line.split() for line in run("info", saved, "model/layers").stdout.splitlines()]
    shown = [line[0] for line in lines[lines.index([]) + 2 :]]
    assert shown == ["model", "layers", "0", "w", "1", "w"]


def test_info_of_a_value_that_lies_in_a_chunk(saved: Path) -> None:
    assert json.loads(run("info", saved, "long", "--json").stdout)["value"] == repr("x" * 20_000)
    assert "(20002 characters)" in run("info", saved, "long").stdout


def test_info_as_json(saved: Path) -> None:
    report = json.loads(run("info", saved, "--json").stdout)
    assert (report["tensors"], report["values"], report["user_metadata"]) == (4, 4, {"run": "r1"})
    assert report["containers"] == {"model/layers": "list", "empty": "list"}
    wte = report["leaves"][0]
    assert wte["sharding"]["spec"] == [["data"], ["model"]]
    assert wte["arrays"][0]["chunk"] == [8, 8]
    assert json.loads(run("info", saved, "model/wte", "--json").stdout) == wte
    part = json.loads(run("info", saved, "model/layers", "--json").stdout)
    assert [leaf["name"] for leaf in part["leaves"]] == ["model/layers/0/w", "model/layers/1/w"]


def test_pieces_are_listed_with_their_ranges() -> None:
    arrays = tuple(ArrayReport(f"w/{n}", (n, 0), (1, 5), (1, 5), None, 1) for n in range(60))
    leaf = LeafReport("w", "tensor", "int8", (60, 5), 300, "pieces", arrays)
    screen = console()
    with screen.capture() as captured:
        screen.print(leaf_table(leaf))
    text = " ".join(captured.get().split())
    assert "60 pieces, each a zarr array" in text
    assert "49 [49, 50) x [0, 5) [1, 5] 1" in text
    assert "10 more: --json lists them all" in text


def test_names_are_printed_as_they_are(saved: Path) -> None:
    for command in (("info", saved), ("info", saved, "note")):
        output = run(*command).stdout
        assert "\x1b" not in output
        assert r"\x1b[31m [bold]red" in output


def test_verify_of_a_whole_checkpoint(saved: Path) -> None:
    result = run("verify", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{saved}: as it was saved: 4 tensors and 4 values")
    assert json.loads(run("verify", saved, "--json").stdout)["ok"] is True


def test_verify_names_each_damaged_leaf(checkpoint: Path) -> None:
    flip(a_chunk(checkpoint, "model/wte"))
    a_chunk(checkpoint, "model/layers/0/w").unlink()
    result = run("verify", checkpoint)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"xckpt: {checkpoint} is damaged: 2 problems" in result.stderr
    assert "model/wte" in result.stderr
    assert "[0, 8) x [0, 8)" in result.stderr
    assert "model/layers/0/w" in result.stderr
    assert "scalar" not in result.stderr
    found = json.loads(run("verify", checkpoint, "--json").stdout)
    assert found["ok"] is False
    assert len(found["problems"]) == 2


def test_verify_of_an_altered_zarr_json(checkpoint: Path) -> None:
    document = checkpoint / "scalar" / "zarr.json"
    document.write_text(document.read_text().replace("float64", "int64"))
    result = run("verify", checkpoint)
    assert result.exit_code == 1
    assert "scalar" in result.stderr


def test_a_pipe_gets_no_blanks_at_the_ends_of_lines(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"note": "x" * 3000, "w": np.zeros((4, 4))})
    for leaf in ("note", "w"):
        lines = run("info", tmp_path / "c", leaf).stdout.splitlines()
        assert lines[0].split() == ["leaf", leaf]
        assert all(line == line.rstrip() for line in lines)


def test_a_class_in_a_file_of_torch_is_no_damage(tmp_path: Path) -> None:
    torch.save({"model": torch.nn.Linear(1, 1)}, tmp_path / "model.pt")
    result = run("verify", tmp_path / "model.pt")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Linear" in result.stderr and "damaged" not in result.stderr


def test_a_truncated_manifest_is_damage_to_verify_and_an_error_to_ls(checkpoint: Path) -> None:
    manifest = checkpoint / "xckpt.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    for command, code in (("verify", 1), ("ls", 2), ("info", 2)):
        result = run_process(command, checkpoint)
        assert result.returncode == code
        assert result.stdout == ""
        assert "manifest" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_newer_version_cannot_be_checked(checkpoint: Path) -> None:
    manifest = checkpoint / "xckpt.json"
    document = msgspec.json.decode(manifest.read_bytes())
    manifest.write_bytes(msgspec.json.encode({**document, "version": 99}))
    for command in ("verify", "ls", "info"):
        result = run(command, checkpoint)
        assert result.exit_code == 2
        assert "version 99" in result.stderr


@pytest.mark.parametrize("command", ["ls", "info", "verify"])
def test_no_checkpoint_there(command: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        result = run(command, path)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"xckpt: {path}")
        assert result.stderr.count("\n") == 1


def test_no_such_leaf(saved: Path) -> None:
    result = run("info", saved, "modle/wte")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no leaf 'modle/wte'; did you mean model/wte?" in result.stderr
    assert "did you mean model?" in run("info", saved, "modle").stderr, "it shows containers too"
    assert "xckpt ls lists the leaves" in run("info", saved, "zzzzzz").stderr


def test_wrong_usage() -> None:
    assert run("ls").exit_code == 2
    assert run("nonsense", "x").exit_code == 2
    assert run("ls", "ftp://host/x").exit_code == 2
    assert run("--version").stdout.split()[-1] == xckpt.__version__


@pytest.mark.parametrize(
    "words",
    [
        "ls",
        "info",
        "cat",
        "head",
        "stats",
        "verify",
        "diff",
        "cp",
        "rm -y",
        "gc",
        "convert",
        "view",
    ],
)
def test_a_variable_that_holds_no_number_is_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """It was a traceback and code 1, which says that there are faults."""
    monkeypatch.setenv("XCKPT_RETRIES", "many")
    second = {"diff": [saved], "cp": [tmp_path / "c"], "convert": [tmp_path / "c"]}
    second |= {"cat": ["step"], "head": ["step"]}
    result = run(*words.split(), saved, *second.get(words, []))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(": XCKPT_RETRIES must be a whole number, got 'many'\n")


def test_a_terminal_gets_a_bar(saved: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CONSOLE_SCRIPT, "verify", str(saved)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as child:
        os.close(theirs)
        drawn = b""
        try:
            while part := os.read(ours, 4096):
                drawn += part
        except OSError:  # Linux's way to say that the other side is closed
            pass
        assert child.stdout is not None
        assert b"as it was saved" in child.stdout.read()
    os.close(ours)
    assert child.returncode == 0
    assert b"verifying" in drawn


def test_help_is_quick_to_import() -> None:
    script = "import sys, xckpt.cli.commands; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    names = set(done.stdout.split())
    assert "click" in names
    assert names.isdisjoint({"rich", "tensorstore", "torch", "jax", "zarr"})


def test_what_the_memory_does_not_hold_is_no_fault_of_the_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: xckpt.Checkpoint, progress: object) -> list[object]:
        raise xckpt.MemoryLimitError("the manifest takes more than memory_bytes")

    monkeypatch.setattr(xckpt.Checkpoint, "verify", refuse)
    result = run("verify", saved)
    assert result.exit_code == 2 and "memory_bytes" in result.stderr
    assert "damaged" not in result.stderr


OTHERS = [
    pytest.param(words, marks=pytest.mark.thorough)
    for words in ("stats {} scalar", "info {} model/wte", "--version")
]


@pytest.mark.parametrize("words", ["verify {}", "--help", *OTHERS])
def test_a_pipe_that_closes_is_no_fault_of_the_checkpoint(saved: Path, words: str) -> None:
    """Exit code 1 would say that it is damaged: rich and click end with it."""
    command = [sys.executable, "-c", CONSOLE_SCRIPT, *words.format(saved).split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 141


IN_OTHER_WAYS = [
    pytest.param(each, marks=pytest.mark.thorough) for each in (["ls", "--json"], ["cat", "step"])
]


@pytest.mark.parametrize("arguments", [["ls"], ["verify"], *IN_OTHER_WAYS])
def test_an_answer_that_cannot_be_written_is_no_fault_of_the_checkpoint(
    saved: Path, arguments: list[str]
) -> None:
    command, *rest = arguments
    script = [sys.executable, "-c", CONSOLE_SCRIPT, command, str(saved), *rest]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(script, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "xckpt: the answer cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *script]
    done = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


STOPPED_EARLY = """
import sys
class Stop:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize("module", ["click", "xckpt.cli.commands"])
def test_ctrl_c_before_there_is_a_command(module: str) -> None:
    """While it is looked for, and while it is imported."""
    command = [sys.executable, "-c", STOPPED_EARLY + CONSOLE_SCRIPT, module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "xckpt: interrupted\n")


def test_ctrl_c_while_arguments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "parse_args", stopped)
    result = run("verify", "ckpt")
    assert (result.exit_code, result.stderr) == (130, "xckpt: interrupted\n")


@pytest.mark.parametrize("imports", [False, True])
def test_ctrl_c_is_a_line(imports: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library in C makes another error of it, while it is imported."""

    def stopped(path: str) -> None:
        if imports:
            raise ImportError("initialization failed") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr("xckpt.open", stopped)
    result = run("verify", "ckpt")
    assert (result.exit_code, result.stderr) == (130, "xckpt: interrupted\n")


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_narrow_terminal_breaks_no_number_and_no_word(tmp_path: Path, columns: int) -> None:
    state = {"a" * 30: np.zeros(3), "b": np.zeros((1000, 2000), np.float32)}
    xckpt.save(tmp_path / "ckpt", state)
    report = checkpoint_report("ckpt", xckpt.open(tmp_path / "ckpt").manifest)
    screen = SafeConsole(width=columns, file=io.StringIO())
    screen.print(checkpoint_table(report))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    for word in ("float32", "[1000, 2000]", "7.6 MiB", "chunks", "a" * 16):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= columns
    if columns < 80:
        assert "\nb\n  dtype float32" in shown
