"""`xckpt convert`, run as people run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

import xckpt
from tests.convert.test_run import MAPPING, flax_like, same, torch_like
from tests.torch.dcp.folders import save_alone
from xckpt.cli import convert
from xckpt.cli.commands import commands
from xckpt.cli.convert import WRITTEN
from xckpt.formats.detect import SINKS
from xckpt.storage.location import Location, open_store


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["convert", *map(str, arguments)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    xckpt.save(tmp_path / "source", torch_like())
    return tmp_path / "source"


def test_there_and_back_by_a_file(source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mapping.toml"
    MAPPING.to_file(rules)
    there = run(source, tmp_path / "there", "--mapping", rules)
    assert there.exit_code == 0, there.output
    assert there.output == f"{tmp_path / 'there'}: 14 tensors, 29.7 KiB\n"
    same(xckpt.load(tmp_path / "there"), flax_like(torch_like()))
    back = run(tmp_path / "there", tmp_path / "back", "-m", rules, "--inverse", "--workers", "1")
    assert back.exit_code == 0, back.output
    same(xckpt.load(tmp_path / "back"), torch_like())


def test_to_safetensors_in_bfloat16(source: Path, tmp_path: Path) -> None:
    done = run(source, tmp_path / "model.safetensors", "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    again = run(tmp_path / "model.safetensors", tmp_path / "again")
    assert again.exit_code == 0, again.output
    loaded = xckpt.load(tmp_path / "again")
    expected = torch_like()
    assert loaded["step"] == expected.pop("step")
    for name, array in expected.items():
        assert np.array_equal(loaded[name], array.astype(ml_dtypes.bfloat16))


def test_the_formats_of_a_destination_are_those_that_are_written() -> None:
    assert set(WRITTEN) == {"xckpt", *SINKS}


def test_errors_are_words_on_stderr(source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mapping.toml"
    rules.write_text('[[rule]]\nsource = "nothing"\ntarget = "something"\n')
    for arguments, word in [
        ((tmp_path / "nowhere", tmp_path / "a"), "it does not exist; beside it: source"),
        ((source, source), "pass --overwrite"),
        ((source, tmp_path / "a", "-m", rules), "embed.weight"),
        ((source, tmp_path / "a", "-m", tmp_path / "no.toml"), "No such file"),
        ((source, tmp_path / "a", "--dtype", "int8"), "is not a floating-point type"),
        ((source, tmp_path / "a", "--format", "tar"), "'tar' is not one of 'xckpt',"),
        ((source, tmp_path / "a", "--inverse"), "give one with --mapping"),
    ]:
        failed = run(*arguments)
        assert failed.exit_code == 2
        assert failed.stdout == ""
        assert word in failed.stderr
    assert not (tmp_path / "a").exists()


def test_a_familys_name_is_a_mapping(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = source / "config.json"
    config.write_text(json.dumps(sizes))
    weight = np.arange(24, dtype=np.float32).reshape(6, 4)
    save_file({"layers.0.mlp.up_proj.weight": weight}, source / "model.safetensors")
    there = run(source, tmp_path / "there", "--mapping", "llama")
    assert there.exit_code == 0, there.output
    loaded: Any = xckpt.load(tmp_path / "there")
    assert np.array_equal(loaded["layers"]["0"]["mlp"]["up_proj"]["kernel"], weight.T)
    store = open_store(Location.parse("memory://hf"))
    for file in source.iterdir():
        store.write(file.name, file.read_bytes()).result()
    for url in ("memory://hf", "memory://hf/model.safetensors"):
        from_url = run(url, tmp_path / "there", "--mapping", "llama", "--overwrite")
        assert from_url.exit_code == 0, from_url.output
        loaded = xckpt.load(tmp_path / "there")
        assert np.array_equal(loaded["layers"]["0"]["mlp"]["up_proj"]["kernel"], weight.T)
    options = ("--mapping", "llama", "--inverse", "--config", config)
    back = run(tmp_path / "there", tmp_path / "back.safetensors", *options)
    assert back.exit_code == 0, back.output
    saved = load_file(tmp_path / "back.safetensors")["layers.0.mlp.up_proj.weight"]
    assert np.array_equal(saved, weight)


@pytest.mark.filterwarnings("default::UserWarning")
def test_objects_of_dcp_are_refused_or_kept(tmp_path: Path) -> None:
    save_alone({"w": torch.ones(2), "when": date(2024, 2, 29)}, tmp_path / "dcp")
    listed = CliRunner().invoke(commands, ["ls", str(tmp_path / "dcp")])
    assert listed.exit_code == 0
    assert listed.stderr.startswith(
        f"xckpt: warning: {tmp_path / 'dcp'}: objects that are neither tensors nor plain values"
    )
    assert ".py" not in listed.stderr
    inferred = CliRunner().invoke(commands, ["map", "infer", *[str(tmp_path / "dcp")] * 2])
    assert inferred.exit_code == 0 and "1 certain" in inferred.output
    refused = run(tmp_path / "dcp", tmp_path / "ours")
    assert refused.exit_code == 2
    assert "when: not a plain value" in refused.stderr and "; --opaque keeps" in refused.stderr
    kept = run(tmp_path / "dcp", tmp_path / "ours", "--opaque")
    assert (kept.exit_code, kept.stderr) == (0, "")
    assert set(xckpt.open(tmp_path / "ours")) == {"w", "when"}


@pytest.mark.filterwarnings("default::UserWarning")
def test_what_a_format_has_no_place_for_is_said(tmp_path: Path) -> None:
    xckpt.save(tmp_path / "ours", {"w": np.ones(2)}, metadata={"run": 7})
    done = run(tmp_path / "ours", tmp_path / "dcp", "--format", "dcp")
    assert done.exit_code == 0
    assert "xckpt: warning: " in done.stderr and "no place for user metadata" in done.stderr
    save_file({"w": np.ones(2)}, tmp_path / "w.safetensors", {"format": "pt"})
    assert run(tmp_path / "w.safetensors", tmp_path / "other", "--format", "dcp").stderr == ""


def test_ctrl_c_does_not_reach_the_workers() -> None:
    """Each would print where it was; this process ends them. The second was started later."""
    before = signal.getsignal(signal.SIGINT)
    executor = convert._executor(2)
    assert isinstance(executor, ProcessPoolExecutor)
    with executor:
        assert len(executor._processes) == 2
        assert executor.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


KILLED = """
import os, signal
from xckpt.cli.convert import _executor

if __name__ == "__main__":
    _executor(1).submit(os.getpid).result()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_the_command_that_is_killed(tmp_path: Path) -> None:
    """It has the command's streams, so that they are closed once both have ended."""
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py")]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == -signal.SIGKILL
