"""The Python that README.md and docs/*.md show, as modules that a type checker reads: `make lint`.

1. A page of docs is one module: its blocks in order, as a reader's session. The blocks of the
   pages in `ALONE` each stand alone.
2. What a block has from elsewhere is declared in one stub, ``given.pyi``.
3. Of the libraries in `LACKED`, which the environment of `make lint` lacks, the modules that a page
   imports are stubs without types, so that the rest of the page is read like any other.
4. ``python -m tests.support.snippets FOLDER`` writes the modules; each line stands where it stands
   in its page, so that what a type checker says of it names the line of the page.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

GIVEN_TO = (
    "README.md",
    "docs/reference/calls.md",
    "docs/how-to/background.md",
    "docs/how-to/dcp.md",
    "docs/how-to/planners.md",
)
"""Their blocks stand alone, with names that a reader has; `tests/docs/test_readme.py` runs them."""

ALONE = (*GIVEN_TO, "docs/first-day.md")
"""Pages whose blocks are not one session."""

LACKED = ("accelerate", "haiku", "lightning", "ray", "torch_xla", "torchtitan")
"""Libraries of `make test-integrations` and `make test-xla` alone."""

SIGNATURES = "-> Metadata"
"""In the block that is a list of signatures; `tests/docs/test_readme.py` compares them."""

GIVEN = '''"""What the blocks of these pages have from elsewhere."""

from typing import Any

import jax as jax
import xckpt as xckpt
import zarr as zarr
from torch import nn

model: nn.Module
sharding: jax.sharding.Sharding
step: int
state: dict[str, Any]

def train(state: dict[str, Any]) -> None: ...
'''

UNTYPED = """from typing import Any

def __getattr__(name: str) -> Any: ...
"""
"""A stub that has every name."""

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def module_name(page: Path) -> str:
    """Of the module of a page; where its blocks stand alone, what the names of theirs begin with.

    Example:
        >>> module_name(ROOT / "docs" / "how-to" / "dcp.md")
        'page_how_to_dcp'
    """
    name = page.relative_to(ROOT).as_posix().removeprefix("docs/").removesuffix(".md")
    return f"page_{re.sub('[-/]', '_', name).lower()}"


def modules() -> Iterator[tuple[str, str]]:
    """Name and text of each module."""
    for page in pages():
        title = page.relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        name = module_name(page)
        lines = {text[: found.start(1)].count("\n"): found[1] for found in BLOCK.finditer(text)}
        blocks = {line: code for line, code in lines.items() if SIGNATURES not in code}
        if title in ALONE:
            for line, code in blocks.items():
                yield f"{name}_line_{line + 1}", _module({line: code}, given=title in GIVEN_TO)
        elif blocks:
            yield name, _module(blocks, given=False)


def _module(blocks: dict[int, str], *, given: bool) -> str:
    written = "from given import *\n" if given else ""
    for line, code in blocks.items():
        written += "\n" * (line - written.count("\n")) + code
    return written


def lacked(code: str) -> Iterator[str]:
    r"""The modules of `LACKED` that a module imports.

    Example:
        >>> list(lacked("import haiku as hk\nfrom ray.train import RunConfig\nimport jax"))
        ['haiku', 'ray.train']
    """
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from (name for name in names if name.partition(".")[0] in LACKED)


def write(folder: Path) -> None:
    """Write the modules to a folder, which held nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "given.pyi").write_text(GIVEN, encoding="utf-8")
    for name, text in modules():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
        for module in lacked(text):
            for count in range(1, len(module.split(".")) + 1):
                stub = folder.joinpath(*module.split(".")[:count], "__init__.pyi")
                stub.parent.mkdir(exist_ok=True)
                stub.write_text(UNTYPED, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
