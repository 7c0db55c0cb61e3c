"""The pages link to what is there, each is in the site, and every public name has a place in it.

Sphinx holds more of this when the site is built (`make docs`, strict); none of it is needed here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import tomllib
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from docs.site import commands, reference, stage
from tests.house.test_dependencies import pinned
from tests.house.test_public_names import NAMES
from xckpt.cli.commands import commands as command_line

ROOT = Path(__file__).parents[2]
PAGES = [*stage.pages(), Path("README.md")]
LINK = re.compile(r"\]\((?!\w+:)([^()\s#]*)(?:#([^()\s]+))?\)")
TREES = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return stage.FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that hosts of code and Sphinx give to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {each.replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link, anchor in LINK.findall(prose(page)):
        target = stage.linked(PurePosixPath(page), link) if link else PurePosixPath(page)
        assert not anchor or anchor in anchors(Path(target)), f"{page}: #{anchor} of {target}"


def test_a_link_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(stage.BrokenLinkError, match=r"docs/runs.md: the link to gone.md"):
        stage.linked(PurePosixPath("docs/runs.md"), "gone.md")


def test_every_page_is_in_the_site() -> None:
    shown = {"index"}
    for page in stage.pages():
        here = stage.place(PurePosixPath(page))
        for tree in TREES.findall((ROOT / page).read_text(encoding="utf-8")):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    path = PurePosixPath(*(here.parent / line).parts)
                    shown.add(str(stage.place(PurePosixPath("docs")) / os.path.normpath(path)))
    missing = {
        name
        for name in (
            str(stage.place(PurePosixPath(page)).with_suffix("")) for page in stage.pages()
        )
        if not any(PurePosixPath(name).match(pattern) for pattern in shown)
    }
    assert missing == set()


def test_every_public_name_is_described_once() -> None:
    assert set(reference.MODULES) == set(NAMES)
    for module in reference.MODULES:
        names = reference.public_names(module)
        assert set(names) == NAMES[module] - {"__version__"}
        for name in names:
            home = reference.home(name, module)
            assert name in reference.public_names(home)
            assert reference.home(name, home) == home
            thing = getattr(importlib.import_module(module), name)
            described = inspect.isclass(thing) or inspect.isroutine(thing)
            assert not described or thing.__doc__, f"{module}.{name}"


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = "\n".join(commands.lines())
    for name in command_line.commands:
        assert f"\n## xckpt {name}\n" in page
    assert "`--overwrite`" in page and "`XCKPT_RETRIES`" in page


def test_links_are_written_for_their_place_in_the_tree(tmp_path: Path) -> None:
    text = "[a](runs.md#x) [b](../spec/schemas/xckpt.json.schema.json) `[c](no)`\n"
    page = PurePosixPath("docs/how-to/new.md")
    text = (
        text.replace("runs.md", "../runs.md")
        .replace("../spec", "../../spec")
        .replace("`[c](no)`", "")
    )
    assert stage.staged(tmp_path, page, text).split() == [
        "[a](../runs.md#x)",
        "[b](../spec/schemas/xckpt.json.schema.json)",
    ]
    assert (tmp_path / "spec/schemas/xckpt.json.schema.json").is_file()


def test_the_packages_of_the_extra_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["optional-dependencies"]["docs"]:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("-", "_")
        assert pinned("docs/constraints.txt")[name] in requirement.specifier
