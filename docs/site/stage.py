"""The tree of pages that Sphinx reads: docs/ at its root, spec/ and the other pages below.

1. `PLACES` says where each folder or file of the repository goes; a notebook becomes a page.
2. A relative link of a page leads to a file of the repository. It is written anew for the place
   that this file has in the tree; a file that is not a page is copied, to be downloaded.
3. A link that leads nowhere is an error.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from docs.site import notebooks

ROOT = Path(__file__).parents[2]
PLACES = {"docs": "", "spec": "spec", "CHANGELOG.md": "CHANGELOG.md"}
"""File or folder of the repository -> its place in the tree."""
PLACES |= {"CONTRIBUTING.md": "CONTRIBUTING.md", "SECURITY.md": "SECURITY.md"}

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^()\s#]+)(?=[#)])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class BrokenLinkError(Exception):
    """A page links to a file that is not there."""


def pages() -> Iterator[Path]:
    """The pages of the repository, relative to it."""
    for name in PLACES:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*.md"))
        yield from (page.relative_to(ROOT) for page in found)


def place(path: PurePosixPath) -> PurePosixPath:
    """Where a file of the repository lies in the tree.

    Example:
        >>> str(place(PurePosixPath("docs/runs.md"))), str(place(PurePosixPath("LICENSE")))
        ('runs.md', 'files/LICENSE')
    """
    for name, new in PLACES.items():
        if path.is_relative_to(name):
            found = PurePosixPath(new) / path.relative_to(name)
            return found.with_suffix(".md") if path.suffix == ".ipynb" else found
    return PurePosixPath("files") / path


def linked(page: PurePosixPath, link: str) -> PurePosixPath:
    """The file of the repository that a link of a page leads to.

    Raises:
        BrokenLinkError: it is not there.
    """
    target = PurePosixPath(os.path.normpath(page.parent / link))
    if not (ROOT / target).exists():
        raise BrokenLinkError(f"{page}: the link to {link} leads to no file of the repository")
    return target


def stage(tree: Path) -> None:
    """Write all pages to an empty folder."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    for notebook in notebooks.notebooks():
        page = notebook.relative_to(ROOT).with_suffix(".md")
        texts[page] = notebooks.as_page(notebook)
    for page, text in texts.items():
        new = tree / place(PurePosixPath(page))
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(staged(tree, PurePosixPath(page), text), encoding="utf-8")


def staged(tree: Path, page: PurePosixPath, text: str) -> str:
    """A page with its links as they are in the tree; files that it links to are copied."""

    def anew(found: re.Match[str]) -> str:
        target = linked(page, found[1])
        new = place(target)
        if new.suffix != ".md" and not (tree / new).exists():
            (tree / new).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / target).is_dir():
                raise BrokenLinkError(f"{page}: the link to {found[1]} leads to a folder")
            shutil.copyfile(ROOT / target, tree / new)
        return os.path.relpath(new, place(page).parent)

    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(anew, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(anew, text[end:])])
