"""What the code base measures: `make measure`; `tests/house/test_measure.py` holds the bars.

1. `measure` parses each Python file once: lines, code lines, and the span of every definition.
2. A code line is neither blank, nor a comment, nor part of a docstring.
3. The span of a class or function is its lines from `class` or `def` on, without its docstring.
4. `report` prints counts for each folder of the package and for each top-level folder, the largest
   files, classes and functions, crowded folders, and class names that are defined more than once.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

__all__ = ["Definition", "SourceFile", "measure", "report", "same_names"]

ROOT = Path(__file__).parents[2]
OTHERS = ("tests", "conformance", "benchmarks", "examples")
SHOWN = 5
"""Rows of each list of the largest."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    """A class or a function, and the lines it spans without its docstring."""

    name: str
    where: str
    lines: int
    is_class: bool


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One Python file; the path is relative to the measured folder's parent."""

    path: Path
    lines: int
    code: int
    definitions: tuple[Definition, ...]


def measure(folder: Path) -> list[SourceFile]:
    """All Python files below a folder, in the order of their paths."""
    return [_measured(path, folder.parent) for path in sorted(folder.rglob("*.py"))]


def _measured(path: Path, root: Path) -> SourceFile:
    source, relative = path.read_text(encoding="utf-8"), path.relative_to(root)
    nodes, lines = list(ast.walk(ast.parse(source))), source.split("\n")
    written = {n for n, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
    texts = {n for node in nodes if _is_text(node) for n in _span(node)}
    docstrings = {n for node in nodes for n in _docstrings(node)}
    definitions = [
        Definition(
            node.name,
            f"{relative}:{node.lineno}",
            len(_span(node)) - len(_docstrings(node, attributes=False)),
            isinstance(node, ast.ClassDef),
        )
        for node in nodes
        if isinstance(node, ast.ClassDef | Function)
    ]
    code = len((written | texts) - docstrings)
    return SourceFile(relative, source.count("\n"), code, tuple(definitions))


def _span(node: ast.stmt | ast.expr) -> range:
    """The numbers of the lines that a node takes."""
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant | ast.JoinedStr]:
    """Whether it is a string: every line of one is code, whatever it looks like."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _docstrings(node: ast.AST, *, attributes: bool = True) -> set[int]:
    """The lines of a definition's docstring and of its attributes'."""
    if not isinstance(node, ast.Module | ast.ClassDef | Function):
        return set()
    statements = node.body if attributes else node.body[:1]
    return {
        n
        for statement in statements
        if isinstance(statement, ast.Expr) and _is_text(statement.value)
        for n in _span(statement)
    }


def same_names(files: Sequence[SourceFile]) -> dict[str, list[str]]:
    """Class name -> where it is defined, of names that are defined more than once."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for each in files:
        for definition in each.definitions:
            if definition.is_class:
                places[definition.name].append(definition.where)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def report(package: Sequence[SourceFile], others: Sequence[str] = ()) -> Iterator[str]:
    """What `make measure` prints, line by line: of the package, and the sums of other folders."""
    below: defaultdict[Path, list[SourceFile]] = defaultdict(list)
    for each in package:
        below[each.path.parent].append(each)
    yield f"{'folder':<32}{'files':>8}{'lines':>10}{'code':>10}"
    for folder in sorted(below):
        yield _row(str(folder), below[folder])
    yield ""
    yield _row("xckpt, all of it", package)
    yield from (_row(name, measure(ROOT / name)) for name in others)
    definitions = [definition for each in package for definition in each.definitions]
    for title, rows in (
        ("largest files", [(each.lines, str(each.path)) for each in package]),
        ("largest classes", [(d.lines, f"{d.where} {d.name}") for d in definitions if d.is_class]),
        (
            "largest functions",
            [(d.lines, f"{d.where} {d.name}") for d in definitions if not d.is_class],
        ),
        ("fullest folders", [(len(files), str(folder)) for folder, files in below.items()]),
    ):
        yield f"\n{title} of xckpt"
        yield from (f"{count:>8}  {what}" for count, what in sorted(rows, reverse=True)[:SHOWN])
    again = same_names(package)
    yield f"\n{len(again)} class names of xckpt are defined more than once"
    yield from (f"{'':>8}  {name}: {', '.join(where)}" for name, where in again.items())


def _row(name: str, files: Sequence[SourceFile]) -> str:
    lines, code = sum(each.lines for each in files), sum(each.code for each in files)
    return f"{name:<32}{len(files):>8}{lines:>10,}{code:>10,}"


if __name__ == "__main__":
    for line in report(measure(ROOT / "xckpt"), OTHERS):
        print(line)
