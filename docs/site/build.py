"""Build the site: ``python -m docs.site.build FOLDER`` (`make docs`).

FOLDER/site has the HTML, llms.txt and each page as Markdown; FOLDER/links.txt the links that lead
out of it, which are listed and not tried: a build needs no network.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from docs.site import commands, reference, stage

OUTSIDE = re.compile(r"https?://[^\s)>\"'`]+")


def build(folder: Path) -> int:
    """Build it in an empty folder; Sphinx's exit code."""
    tree, site = folder / "source", folder / "site"
    shutil.rmtree(folder, ignore_errors=True)
    stage.stage(tree)
    reference.write(tree / "reference" / "api")
    commands.write(tree / "reference" / "commands.md")
    where = ["-c", str(Path(__file__).parent), "-d", str(folder / "doctrees"), str(tree), str(site)]
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", *where])
    if done.returncode == 0:
        (folder / "xckpt.1").write_text(commands.manual(), encoding="utf-8")
        _plain(tree, site)
        _outside(tree, folder / "links.txt")
    return done.returncode


def _plain(tree: Path, site: Path) -> None:
    """Each page as Markdown beside its HTML, and llms.txt, which lists them."""
    lines = ["# xckpt", "", f"> {_summary((tree / 'index.md').read_text())}", ""]
    for page in sorted(tree.rglob("*.md")):
        name = page.relative_to(tree)
        text = page.read_text(encoding="utf-8")
        if page.parent.name == "api":
            text = "\n".join(reference.as_markdown(page.stem))
        (site / name).write_text(text, encoding="utf-8")
        title = text.split("\n", 1)[0].removeprefix("# ")
        lines.append(f"- [{title}]({name.as_posix()}): {_summary(text)}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _summary(page: str) -> str:
    """The first sentence of a page.

    Example:
        >>> _summary("# Runs\\n\\nA run has steps. It is long.\\n")
        'A run has steps.'
    """
    for paragraph in page.split("\n\n")[1:]:
        if re.match(r"[A-Za-z`\[\"]", paragraph):
            return re.split(r"(?<=[.:])\s", " ".join(paragraph.split()))[0]
    return ""


def _outside(tree: Path, file: Path) -> None:
    found = {link for page in tree.rglob("*.md") for link in OUTSIDE.findall(page.read_text())}
    file.write_text("".join(f"{link}\n" for link in sorted(found)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1])))
