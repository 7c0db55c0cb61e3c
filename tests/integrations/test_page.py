"""What docs/integrations.md shows is so: the code of each section runs, twice in one folder.

The loops of JAX's libraries resume, and end with the values of the uninterrupted loop.
"""

from __future__ import annotations

import re
from contextlib import chdir
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
SECTIONS = {
    section.split("\n", 1)[0]: re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]
}


# Ray starts a dozen processes, twice.
SLOW = {"Ray Train": pytest.mark.timeout(600)}
TITLES = [pytest.param(each, marks=SLOW.get(each, ()), id=each) for each in SECTIONS]


@pytest.mark.parametrize("title", TITLES)
def test_the_code_of_a_section_runs_and_runs_again(title: str, tmp_path: Path) -> None:
    assert SECTIONS[title]
    with chdir(tmp_path):
        for _ in range(2):
            names: dict[str, object] = {"__name__": "page"}
            for code in SECTIONS[title]:
                exec(compile(code, "docs/integrations.md", "exec"), names)


LOOPS = [title for title, codes in SECTIONS.items() if "xckpt.CheckpointManager" in "".join(codes)]


def last_state(title: str, steps: int) -> list[Any]:
    """What a section's loop leaves after that many steps in the working folder."""
    code, count = re.subn(r"(?<=next_step, )9(?=\))", str(steps), SECTIONS[title][0])
    assert count == 1
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/integrations.md", "exec"), names)
    return jax.tree.leaves(names["state"])


@pytest.mark.parametrize("title", LOOPS)
def test_a_loop_of_jax_resumes(title: str, tmp_path: Path) -> None:
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    with chdir(tmp_path / "whole"):
        whole = last_state(title, 9)
    with chdir(tmp_path / "run"):
        half, resumed = last_state(title, 5), last_state(title, 9)
    assert len(whole) >= 8
    assert all(map(np.array_equal, whole, resumed))
    assert not all(map(np.array_equal, half, resumed))


def test_these_loops_are_on_the_page() -> None:
    assert LOOPS == ["Linen and Optax", "NNX", "Equinox", "Haiku"]
