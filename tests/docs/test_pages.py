"""What the pages of `FOLDERS` show is so: each runs as for a reader.

Others need more: README.md and docs/reference are tried by `test_readme.py`, docs/stores by
`test_stores.py`, docs/trainers and docs/jax in `tests/integrations`, XLA in `tests/xla`.

1. The blocks of Python of a page share their names, in a folder of their own.
2. A block that begins with ``# on each of 4 ranks`` runs on so many ranks of torch, one with
   ``# on each of 2 JAX processes`` in so many processes of JAX, with four devices each.
3. Lines of sh that begin with ``xckpt`` are its commands; each ends well.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import xckpt
from tests.support import jax_jobs
from tests.support.ranks import Ranks
from xckpt import errors
from xckpt.cli.commands import commands

ROOT = Path(__file__).parents[2]
FOLDERS = ("start", "how-to", "torch", "why")
PLANNER = "docs/why/planner.md"
ELSEWHERE = ("docs/torch/xla.md", PLANNER)
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MANY = re.compile(r"# on each of (\d) (ranks|JAX processes)\b")
PAGES = [
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if BLOCK.search(path.read_text(encoding="utf-8"))
    and path.relative_to(ROOT).as_posix() not in ELSEWHERE
]

LONG = tuple(f"docs/how-to/{name}.md" for name in ("convert", "fsdp-tp", "jax-hosts"))
LONG += ("docs/start/ten-minutes.md", "docs/torch/fsdp2.md", "docs/torch/hsdp.md")
"""Pages that may take more than five seconds, with what they import first."""


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def execute(rank: int, code: str, page: str, folder: str) -> None:
    """Run a block on one rank."""
    with chdir(folder):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})


def on_each_process(code: str, page: str, folder: str) -> None:
    execute(0, code, page, folder)


def shell(line: str) -> None:
    command, *arguments = shlex.split(line, comments=True)
    result = CliRunner().invoke(commands, arguments)
    assert (command, result.exit_code, result.stderr) == ("xckpt", 0, ""), line


def test_there_are_pages() -> None:
    assert {"docs/start/install.md", "docs/start/ten-minutes.md"} <= set(PAGES)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] * (page in LONG)) for page in PAGES],
)
def test_a_page_runs(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_blocks(page, tmp_path, request)


@pytest.mark.thorough
def test_the_planner_draws_the_pictures_of_its_page(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_blocks(PLANNER, tmp_path, request)
    view = xckpt.view(tmp_path / "ckpt")
    for name in ("even", "rows", "uneven", "replicated"):
        shown = ROOT / "docs" / "images" / f"planner-{name}.svg"
        assert shown.read_text(encoding="utf-8") == view.svg(name) + "\n"
        assert f"../images/{shown.name}" in (ROOT / PLANNER).read_text(encoding="utf-8")


def run_blocks(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Run the blocks of a page in order, in a folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    if any("ranks" in code.partition("\n")[0] for _, code in blocks):
        # Not in the page's folder, which they outlive.
        request.getfixturevalue("four_ranks")
    with chdir(tmp_path):
        for language, code in blocks:
            many = MANY.match(code)
            if language == "sh":
                for line in code.splitlines():
                    if line.startswith("xckpt ") and "|" not in line:
                        shell(line)
            elif many and many[2] == "ranks":
                ranks: Ranks = request.getfixturevalue("four_ranks")
                assert ranks.size == int(many[1])
                ranks.run(execute, code, page, str(tmp_path))
            elif many:
                jax_jobs.run(on_each_process, int(many[1]), code, page, str(tmp_path), devices=4)
            else:
                exec(compile(code, page, "exec"), names)


def test_every_error_is_on_its_page() -> None:
    page = (ROOT / "docs" / "how-to" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*)\|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(errors.__all__)
    for name, means, advice in rows:
        assert means and (advice.strip() or not name.endswith("Error")), name
