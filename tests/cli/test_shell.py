"""Completion in a shell, the page of the manual, colours."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import xckpt
from xckpt.cli.commands import commands
from xckpt.cli.shell.described import ENVIRONMENT, EXIT_CODES, described
from xckpt.cli.shell.manual import SHELLS, manual
from xckpt.storage.location import REQUESTS, Location

PROGRAM = "from xckpt.cli import main; main()"


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_of_the_shell(shell: str) -> None:
    result = CliRunner().invoke(commands, ["completion", shell])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "_XCKPT_COMPLETE" in result.stdout and f"{shell}_complete" in result.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=result.stdout, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    "words, expected",
    [("xckpt ver", ["verify"]), ("xckpt ls --so", ["--sort"]), ("xckpt map ch", ["check"])],
)
def test_commands_and_options_are_completed(words: str, expected: list[str]) -> None:
    told = {"_XCKPT_COMPLETE": "bash_complete", "COMP_WORDS": words}
    told |= {"COMP_CWORD": str(len(words.split()) - 1), "PYTHONPATH": os.pathsep.join(sys.path)}
    program = PROGRAM.replace("main()", "sys.argv[0] = 'xckpt'; main()")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}"],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split(",")[1] for line in done.stdout.splitlines()] == expected


def test_the_shell_completes_every_path() -> None:
    """A completion that offers nothing would take the shell's own away, which knows files."""
    others = {"leaf", "patterns", "shell"}
    checked: list[str] = []
    for name in names(commands):
        command = resolved(name)
        context = click.Context(command)
        for parameter in () if isinstance(command, click.Group) else command.params:
            is_path = isinstance(parameter, click.Argument) and parameter.name not in others
            if is_path or parameter.metavar in ("FILE", "OTHER"):
                [offered] = parameter.shell_complete(context, "ck")
                assert (offered.type, offered.value) == ("file", "ck"), (name, parameter.name)
                checked.append(f"{name} {parameter.name}")
    assert {"xckpt ls path", "xckpt map check mapping", "xckpt view diff"} <= {*checked}
    assert len(checked) > 25


def resolved(name: str) -> click.Command:
    """The command of a full name."""
    command: click.Command = commands
    for word in name.split()[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def names(group: click.Group, before: str = "xckpt") -> list[str]:
    inner = [
        name
        for key, each in group.commands.items()
        if isinstance(each, click.Group)
        for name in names(each, f"{before} {key}")
    ]
    return [before, *inner, *(f"{before} {key}" for key in group.commands)]


def test_everything_is_described() -> None:
    texts = {text.name: text for text in described(commands)}
    assert set(texts) == set(names(commands))
    assert all(text.paragraphs[0] for text in texts.values())
    for text in texts.values():
        assert "-h, --help" in {option.words for option in text.options}, text.name
    assert "--box SLICE" in {option.words for option in texts["xckpt cat"].options}


@pytest.mark.parametrize("group", [[], ["map"]])
def test_the_summary_of_each_command_fits_into_its_line(group: list[str]) -> None:
    shown = CliRunner().invoke(commands, [*group, "--help"], terminal_width=80).stdout
    listed = shown.partition("Commands:\n")[2].splitlines()
    assert len(listed) >= 3
    assert [line for line in listed if line.endswith("...")] == []


def test_the_manual_has_all_of_it() -> None:
    page = "\n".join(manual(commands))
    for text in described(commands):
        assert text.usage.replace("-", r"\-") in page
    for name, _ in (*EXIT_CODES, *ENVIRONMENT):
        assert rf"\fB{name}\fR" in page


def test_the_manual_has_the_defaults_of_the_code_and_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "buckets.md").read_text(encoding="utf-8")
    access = Location.parse("s3://bucket/ckpt").access
    defaults = {
        "XCKPT_RETRIES": access.retries,
        "XCKPT_REQUEST_TIMEOUT": round(access.request_timeout),
        "XCKPT_CONCURRENCY": REQUESTS,
    }
    for variable, default in defaults.items():
        assert f"`{variable}` | {default} |" in page
        assert re.search(rf"\b{default}\b", dict(ENVIRONMENT)[variable])


@pytest.mark.skipif(not shutil.which("man"), reason="there is no man")
def test_man_reads_it_without_a_complaint(tmp_path: Path) -> None:
    file = tmp_path / "xckpt.1"
    file.write_text("\n".join(manual(commands)) + "\n")
    command = ["man", "--warnings", "-l", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert done.returncode == 0 and "EXIT STATUS" in done.stdout
    assert "warning" not in done.stderr


def on_a_terminal(*arguments: str, **variables: str) -> bytes:
    """What a command prints to a terminal."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    told = clean | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)} | variables
    command = [sys.executable, "-c", PROGRAM, *arguments]
    subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, env=told, check=True)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 1 << 16):
            printed += part
    except OSError:  # Linux says so at the end
        pass
    finally:
        os.close(ours)
    return printed


def test_no_color_turns_colours_off(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "c", {"w": np.ones(3)})
    coloured = re.compile(rb"\x1b\[[0-9;]*3[0-9]")
    command = ("verify", str(tmp_path / "c"))
    assert coloured.search(on_a_terminal(*command))
    assert not coloured.search(on_a_terminal(*command, NO_COLOR="1"))
