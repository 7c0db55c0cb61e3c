"""What the pages in docs/ show is so: their code runs, in order, in one folder.

1. The blocks of Python of a page share their names, as a reader's session would.
2. A block of TOML is the file that the page's next block reads; lines of sh are commands of xckpt.
3. Commands and names that a page only mentions must exist.
"""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file

import xckpt
from examples.minilm import package_folder, trained
from xckpt.cli.commands import commands
from xckpt.mapping.families import families

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hugging-face.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder in which the page was gone through, and the names that its code left."""
    folder = tmp_path_factory.mktemp("hugging-face")
    shutil.copytree(package_folder(), folder / "all-MiniLM-L6-v2")
    names: dict[str, Any] = {}
    with chdir(folder):
        for language, code in BLOCKS:
            if language == "toml":
                Path("mine.toml").write_text(code)
            elif language == "sh":
                for line in code.splitlines():
                    command, *arguments = shlex.split(line)
                    result = CliRunner().invoke(commands, arguments)
                    assert (command, result.exit_code, result.stderr) == ("xckpt", 0, "")
            else:
                assert language == "python"
                exec(compile(code, "docs/hugging-face.md", "exec"), names)
    return folder, names


def test_the_model_is_sharded_and_gives_what_torch_gives(
    session: tuple[Path, dict[str, Any]],
) -> None:
    _, names = session
    arrays = jax.tree.leaves(names["params"])
    assert [leaf.sharding for leaf in arrays] == [
        leaf.sharding for leaf in jax.tree.leaves(names["like"])
    ]
    halved = [leaf for leaf in arrays if leaf.ndim == 2]
    assert halved and all(
        shard.data.shape == (leaf.shape[0], leaf.shape[1] // 2)
        for leaf in halved
        for shard in leaf.addressable_shards
    )
    with torch.no_grad():
        expected = trained()(torch.from_numpy(names["tokens"])).last_hidden_state
    assert np.abs(names["hidden"] - expected.numpy()).max() < 5e-6


def test_the_weights_that_come_back_are_those_of_the_folder(
    session: tuple[Path, dict[str, Any]],
) -> None:
    folder, names = session
    first = load_file(folder / "all-MiniLM-L6-v2" / "model.safetensors")
    del first["embeddings.position_ids"]
    for file in ("back/model.safetensors", "torch.safetensors"):
        back = load_file(folder / file)
        assert sorted(back) == sorted(first)
        assert all(back[name].tobytes() == array.tobytes() for name, array in first.items())
    state = names["torch_model"].state_dict()
    assert all(np.array_equal(state[name], array) for name, array in first.items())
    assert xckpt.open(folder / "trained")["step"] == 100


def test_the_shells_checkpoint_is_the_same_model(session: tuple[Path, dict[str, Any]]) -> None:
    folder, names = session
    again = xckpt.load(folder / "flax", names["like"])
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(names["params"]), strict=True):
        assert np.array_equal(one, other)


def test_every_family_is_listed() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(
        families()
    )


def test_the_commands_exist() -> None:
    for words in re.findall(r"`xckpt ([\w ]+)`", PROSE):
        command: Any = commands
        for word in words.split():
            command = command.commands[word]


def test_the_page_of_buckets() -> None:
    page = (ROOT / "docs" / "buckets.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/buckets.md", "exec"), {})
    for name in ("retries", "timeout", "request_timeout", "concurrency"):
        assert f"| `{name}` | `XCKPT_{name.upper()}` |" in page
        assert hasattr(xckpt.LoadOptions(), name)
