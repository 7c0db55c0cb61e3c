"""Names and texts that would drive a terminal, given to every command and every error class."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import xckpt
from xckpt import errors
from xckpt.cli.commands import commands
from xckpt.convert import convert
from xckpt.core.problem import Problem
from xckpt.core.run.record import StepRecord, run_metadata
from xckpt.errors import RankFailure, RanksFailedError, XckptError

EVIL = "\x1b]0;title\x07\x1b[2J\r\b\x9b31m\u202e\u2066\x7f\x85\u2028"
"""OSC, CSI, C0, C1, what turns the writing direction, DEL and line separators."""
NAME = f"w{EVIL}"
VALUE = f"v{EVIL}"
MAPPED = f"version = 1\n[[rule]]\nsource = {json.dumps(NAME)}\ntarget = 'x'\n"


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints whose names, values, metadata, dimensions and path are hostile."""
    folder = tmp_path_factory.mktemp("hostile") / f"f{EVIL}"
    folder.mkdir()
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    options = xckpt.SaveOptions(dimension_names={f"model/{NAME}": [f"d{EVIL}", "e"]})
    state = {"model": {NAME: tensor, f"{NAME}2": tensor}, f"c{EVIL}": [VALUE], "b": b"\x1b[2J"}
    xckpt.save(folder / "saved", state, metadata={NAME: VALUE}, options=options)
    xckpt.save(folder / "other", {"model": {NAME: tensor + 1}, f"{NAME}3": 1})
    shutil.copytree(folder / "saved", folder / "damaged")
    for chunk in (folder / "damaged").rglob("c/*/*"):
        chunk.write_bytes(b"short")
    xckpt.save(folder / "flat", {NAME: tensor})
    convert(folder / "flat", folder / "foreign.safetensors")
    xckpt.save(folder / "spare", {NAME: 1})
    for number in (1, 2):
        about = StepRecord(number, 60.0, {f"loss{EVIL}": 0.5}, keep=(f"rule{EVIL}", "Latest(1)"))
        user = run_metadata(about, {NAME: VALUE})
        xckpt.save(folder / f"run{EVIL}/step-{number}", {NAME: tensor}, metadata=user)
    (folder / f"run{EVIL}/.left{EVIL}.saving-0").mkdir()
    (folder / "m.toml").write_text(MAPPED, encoding="utf-8")
    return folder


CALLS = {
    "ls": ["saved"],
    "ls NAME": ["saved", f"none{EVIL}"],
    "ls RUN": [f"run{EVIL}"],
    "ls RUN --reverse": [f"run{EVIL}", "--reverse"],
    "view RUN": [f"run{EVIL}", "--output", "run.html"],
    "view --plan": ["saved", "--plan", f"a{EVIL} on a=2", "--output", "plan.html"],
    "view --leaf": ["saved", "--leaf", f"none{EVIL}", "--output", "leaf.svg"],
    "view --diff": ["saved", "--diff", "other", "--output", "diff.html"],
    "gc --dry-run": [f"run{EVIL}", "--dry-run"],
    "doctor RUN": [f"run{EVIL}"],
    "doctor nothing": [f"none{EVIL}/below"],
    "rm nothing": [f"none{EVIL}"],
    "cp nothing": [f"none{EVIL}", f"copy2{EVIL}"],
    "cp damaged": ["damaged", f"copy3{EVIL}"],
    "verify NEAR": [f"none{EVIL}"],
    "cat NEAR": ["saved", f"model/{NAME}x"],
    "stats LEAF": ["saved", f"model/{NAME}x"],
    "diff nothing": ["saved", f"none{EVIL}"],
    "map infer assumed": ["flat", "other"],
    "map check nothing": [f"none{EVIL}.toml"],
    "convert nothing": [f"none{EVIL}", "none.safetensors"],
    "ls --sort": ["foreign.safetensors", "--sort", "size"],
    "info": ["saved"],
    "info LEAF": ["saved", f"model/{NAME}"],
    "info VALUE": ["saved", f"c{EVIL}/0"],
    "info NEAR": ["saved", f"model/{NAME}x"],
    "info foreign": ["foreign.safetensors"],
    "info nothing": [f"no{EVIL}"],
    "verify": ["damaged"],
    "verify foreign": ["foreign.safetensors"],
    "cat": ["saved", f"c{EVIL}/0", "--text"],
    "head": ["saved", f"model/{NAME}"],
    "head NEAR": ["saved", f"model/{NAME}x"],
    "stats": ["saved"],
    "stats damaged": ["damaged"],
    "diff": ["saved", "other"],
    "diff --values": ["saved", "other", "--values"],
    "view": ["saved", "--output", "page.html"],
    "doctor": ["./"],
    "completion": ["bash"],
    "man": [],
    "diff foreign": ["saved", "foreign.safetensors"],
    "cp": ["saved", f"copy{EVIL}"],
    "rm": ["spare"],
    "gc": ["./"],
    "convert": ["saved", "new.safetensors", "--format", "safetensors"],
    "convert damaged": ["damaged", "d.safetensors", "--format", "safetensors"],
    "map infer": ["saved", "other"],
    "map check": ["m.toml", "saved"],
    "map check all": ["m.toml", "flat"],
    "map show": ["m.toml"],
    "map show SOURCE": ["m.toml", "flat"],
}
"""Command, and a word on what it is given -> its arguments; files among them lie in `folder`."""
JSON = {"ls", "ls --sort", "info", "info LEAF", "info VALUE", "info foreign", "verify", "stats"}
JSON |= {
    "ls RUN",
    "ls RUN --reverse",
    "diff",
    "diff --values",
    "diff foreign",
    "map infer",
    "map check all",
    "map show SOURCE",
}


def run(what: str, folder: Path, *more: str) -> Result:
    command = [word for word in what.split() if word in ("map", *_names(commands))]
    arguments = [
        str(folder / each) if (folder / each).exists() or "." in each or "copy" in each else each
        for each in CALLS[what]
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CliRunner().invoke(commands, [*command, *arguments, *more])


def _names(group: click.Group) -> Iterator[str]:
    """The commands of a group and of its groups."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _names(command)
        else:
            yield name


def test_every_command_is_called():
    called = {word for what in CALLS for word in what.split()}
    assert set(_names(commands)) <= called


@pytest.mark.parametrize("what", CALLS)
def test_a_command_prints_no_character_that_drives_a_terminal(what: str, folder: Path) -> None:
    result = run(what, folder)
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout or result.stderr
    assert harmless(result.stdout) and harmless(result.stderr), (result.stdout, result.stderr)


@pytest.mark.parametrize("what", sorted(JSON))
def test_json_is_printable_and_has_the_names_as_they_are(what: str, folder: Path) -> None:
    result = run(what, folder, "--json")
    assert harmless(result.stdout) and harmless(result.stderr)
    document = json.loads(result.stdout)
    if what != "verify" and not what.startswith("map check"):
        assert EVIL in json.dumps(document, ensure_ascii=False).encode().decode(
            "unicode_escape"
        ) or (any(EVIL in text for text in _strings(document)))


def _takes_json(what: str) -> bool:
    command: click.Command = commands
    for word in what.split():
        if isinstance(command, click.Group):
            command = command.commands[word]
    return any("--json" in option.opts for option in command.params)


@pytest.mark.parametrize("what", [what for what in CALLS if _takes_json(what)])
def test_json_of_every_command_is_harmless(what: str, folder: Path) -> None:
    result = run(what, folder, "--json")
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    assert harmless(result.stdout) and harmless(result.stderr), (result.stdout, result.stderr)
    if result.exit_code == 0:
        json.loads(result.stdout)


def _strings(document: object) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, list | dict):
        for each in document:
            yield from _strings(each)
        if isinstance(document, dict):
            yield from _strings(list(document.values()))


CLASSES = [
    each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, XckptError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_of_every_class_is_harmless(kind: type[XckptError]) -> None:
    problem = Problem(NAME, kind="shape", text=VALUE)
    assert problem.leaf == NAME and str(problem).isprintable()
    for error in (
        kind(f"{NAME}: {VALUE}\nall is well"),
        kind.listing(NAME, [problem, f"{NAME}\n: {VALUE}"]),
        RanksFailedError.of(
            NAME, [RankFailure.of(3, kind(NAME)), RankFailure.of(4, OSError(NAME))]
        ),
        RanksFailedError.of(NAME, [RankFailure.of(3, kind(NAME))]).one_cause(),
    ):
        margin, *rest = str(error).split("\n")
        assert margin.isprintable()
        assert all(line.isprintable() and line.startswith("  ") for line in rest)


def test_reprs_reports_and_key_errors_are_harmless(folder: Path) -> None:
    opened = xckpt.open(folder / "saved")
    array = opened.array(f"model/{NAME}")
    with pytest.raises(KeyError) as missing:
        opened[f"model/{NAME}x"]
    with pytest.raises(IndexError) as index:
        array[7]
    texts = [repr(opened), str(opened), opened._repr_html_(), repr(array), array._repr_html_()]
    texts += [
        str(missing.value),
        str(index.value),
        *map(str, xckpt.diff(folder / "saved", folder / "other")),
    ]
    target = {"model": {NAME: np.zeros((2, 3), np.float32)}, f"{NAME}4": np.zeros(1)}
    texts.append(str(xckpt.load_into(folder / "saved", target, strict=False)))
    for text in texts:
        assert harmless(text), text
