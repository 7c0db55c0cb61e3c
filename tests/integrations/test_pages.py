"""What docs/trainers and docs/jax show is so: the code of a page runs, twice in one folder.

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

from tests.support.snippets import BLOCK

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix(): [
        found[1] for found in BLOCK.finditer(path.read_text(encoding="utf-8"))
    ]
    for folder in ("trainers", "jax")
    for path in sorted((DOCS / folder).glob("*.md"))
}
LOOPS = [page for page in PAGES if page.startswith("jax/")]

# Ray starts a dozen processes, twice.
SLOW = {"trainers/ray.md": pytest.mark.timeout(600)}
PARAMETERS = [pytest.param(page, marks=SLOW.get(page, ()), id=page) for page in PAGES]


@pytest.mark.parametrize("page", PARAMETERS)
def test_the_code_of_a_page_runs_and_runs_again(page: str, tmp_path: Path) -> None:
    assert PAGES[page]
    with chdir(tmp_path):
        for _ in range(2):
            names: dict[str, object] = {"__name__": "page"}
            for code in PAGES[page]:
                exec(compile(code, page, "exec"), names)


def last_state(page: str, steps: int) -> list[Any]:
    """What a page's loop leaves after that many steps in the working folder."""
    code, count = re.subn(r"(?<=next_step, )9(?=\))", str(steps), PAGES[page][0])
    assert count == 1
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, page, "exec"), names)
    return jax.tree.leaves(names["state"])


@pytest.mark.parametrize("page", LOOPS)
def test_a_loop_of_jax_resumes(page: str, tmp_path: Path) -> None:
    for name in ("whole", "run"):
        (tmp_path / name).mkdir()
    with chdir(tmp_path / "whole"):
        whole = last_state(page, 9)
    with chdir(tmp_path / "run"):
        half, resumed = last_state(page, 5), last_state(page, 9)
    assert len(whole) >= 8
    assert all(map(np.array_equal, whole, resumed))
    assert not all(map(np.array_equal, half, resumed))


def test_there_is_a_page_for_each_library() -> None:
    names = ("accelerate", "hugging-face", "lightning", "orbax", "ray", "torchft", "torchtitan")
    loops = ("equinox", "haiku", "linen", "nnx", "optax")
    assert set(PAGES) == {
        *(f"trainers/{name}.md" for name in names),
        *(f"jax/{name}.md" for name in loops),
    }
