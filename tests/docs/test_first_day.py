"""What docs/first-day.md shows is so: each script resumes, and has at most six lines for xckpt.

1. A script runs a part of the way, ends, and runs again in the same folder, to the end.
2. Without its lines for xckpt it is a plain training, which runs to the end at once. So no line for
   xckpt is left uncounted.
3. Parameters, moments, steps and random streams are the same, bit for bit. The second run has
   trained on after its load, so its next steps are those of the uninterrupted run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from torch.distributed.tensor import DTensor

import xckpt
from tests.support.ranks import Ranks

PAGE = (Path(__file__).parents[2] / "docs" / "first-day.md").read_text(encoding="utf-8")
SECTIONS = {
    section.split("\n", 1)[0]: dict(
        re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    )
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
}
MOST_LINES = 6

TRAINING = re.compile(r"^while (.*) < (\d+):$", re.MULTILINE)
"""The line that says how long a script trains."""

JOINING = 'dist.init_process_group("gloo")\n'
"""What the ranks of these tests have done already."""


def script(title: str, part: float = 1.0) -> str:
    """A section's code; it ends after that part of its training."""
    code, count = TRAINING.subn(
        lambda line: f"while {line[1]} < {int(int(line[2]) * part)}:", SECTIONS[title]["python"]
    )
    assert count == 1
    return code


def plain(title: str) -> str:
    """A section's code without what it has for xckpt."""
    lines = script(title).splitlines(keepends=True)
    return "".join(line for line in lines if "xckpt" not in line)


def run(code: str) -> dict[str, Any]:
    """A script's names after it was run in the working folder."""
    names: dict[str, Any] = {}
    exec(compile(code, "docs/first-day.md", "exec"), names)
    return names


@pytest.mark.parametrize("title", SECTIONS)
def test_six_lines_at_most(title: str) -> None:
    lines = "".join(SECTIONS[title].values()).splitlines()
    numbers = [int(found[1]) for line in lines if (found := re.search(r"  # (\d)$", line))]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) <= MOST_LINES
    assert all(re.search(r"  # \d$", line) for line in lines if "xckpt" in line)
    assert re.match(r'pip install "xckpt\[(torch|jax)\]"', lines[0])


def test_these_are_the_libraries_of_the_page() -> None:
    assert list(SECTIONS) == ["FSDP2", "Flax TrainState", "NNX", "Equinox", "Optax alone"]


def arrays(names: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Parameters, moments, steps and random streams of a JAX training, in order."""
    kept = [names.get(name) for name in ("model", "state", "params", "moments", "step")]
    if isinstance(names["optimizer" if "optimizer" in names else "state"], nnx.Optimizer):
        kept = [nnx.state((names["model"], names["optimizer"]))]
    leaves = [leaf for leaf in jax.tree.leaves(kept) if not callable(leaf)]
    typed = [
        isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for x in leaves
    ]
    return [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(leaves, typed, strict=True)
    ]


ELSEWHERE = ("Flax TrainState", "NNX", "Equinox")
"""Trees that `tests/jax` saves and resumes in the default tier."""
JAX = [
    pytest.param(title, marks=pytest.mark.thorough if title in ELSEWHERE else ())
    for title in SECTIONS
    if title != "FSDP2"
]


@pytest.mark.parametrize("title", JAX)
def test_a_jax_training_resumes(title: str, tmp_path: Path) -> None:
    with chdir(tmp_path):
        half = arrays(run(script(title, 0.5)))
        resumed = arrays(run(script(title)))
        uninterrupted = arrays(run(plain(title)))
    assert len(resumed) >= 6
    for before, again, once in zip(half, resumed, uninterrupted, strict=True):
        assert again.dtype == once.dtype and np.array_equal(again, once)
        assert before.shape == again.shape
    assert not all(map(np.array_equal, half, resumed))
    assert xckpt.open(tmp_path / "run").verify() == []


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def on_rank_train(_rank: int, code: str, folder: str) -> list[torch.Tensor]:
    """Parameters and moments, whole, after a script was run in a folder."""
    with chdir(folder):
        state = run(code)["state"]
    moments = state["optimizer"].state_dict()["state"]
    tensors = [
        *state["model"].parameters(),
        *(t for each in moments.values() for t in each.values()),
    ]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach() for t in tensors]


def test_fsdp2_resumes_on_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    assert JOINING in SECTIONS["FSDP2"]["python"]
    half, resumed, uninterrupted, loaded = (
        two_ranks.run(on_rank_train, code.replace(JOINING, ""), str(tmp_path))
        for code in (script("FSDP2", 0.5), script("FSDP2"), plain("FSDP2"), script("FSDP2"))
    )
    assert len(resumed[0]) == 4 * 4
    for rank in range(2):
        assert all(map(torch.equal, resumed[rank], uninterrupted[rank]))
        assert all(map(torch.equal, loaded[rank], uninterrupted[rank]))
        assert not any(map(torch.equal, half[rank][:4], resumed[rank][:4]))
    assert xckpt.open(tmp_path / "run")["epoch"] == 4
