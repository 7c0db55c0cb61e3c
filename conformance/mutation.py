"""Small wrong changes to a module, one at a time: do its tests notice?

1. `mutants` walks a module's syntax tree and makes each change that `_changes` knows: a comparison
   that is off by one or turned round, another operator, a number one larger, a condition negated,
   ``and`` for ``or``, ``min`` for ``max``, an argument ``axis`` changed, a statement left out.
2. `Trial.survives` forks a process that imports the changed module in place of the real one and
   runs the tests up to the first that fails, those first that have found the last mutants. A mutant
   that no test fails on has survived; one that takes too long is killed.

    python -m conformance.mutation xckpt.core.dtypes tests/core/test_dtypes.py --every 4

    python -m conformance.mutation xckpt.core.dtypes tests/core/test_dtypes.py --again FILE

The second tries those again that an earlier run has printed. What survived, and why, is in
``mutation.md``.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, ModuleType

import pytest

__all__ = ["Mutant", "Trial", "main", "mutants"]

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any",
         "minimum": "maximum", "maximum": "minimum"}  # fmt: skip

IMPORTED_ONCE = ("numpy", "msgspec", "ml_dtypes", "hypothesis.extra.numpy")
"""Modules that no mutant touches: imported before the fork, and not by every child."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change."""

    line: int
    change: str
    """What was changed to what."""
    code: CodeType


def mutants(source: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a module.

    Example:
        >>> [mutant.change for mutant in mutants("x = a < 1", "x.py")]
        ['a < 1 -> a <= 1', 'a < 1 -> a >= 1', '1 -> 2']
    """
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for which, after in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = next(n for i, n in enumerate(ast.walk(changed)) if i == number)
            before = ast.unparse(target)
            replacement = list(_changes(target))[which]
            whole = ast.fix_missing_locations(_Replacer(target, replacement).visit(changed))
            assert isinstance(whole, ast.Module)
            text = f"{_short(before)} -> {_short(ast.unparse(after))}"
            yield Mutant(getattr(node, "lineno", 0), text, compile(whole, file, "exec"))


class _Replacer(ast.NodeTransformer):
    """Puts one node in another's place; texts of documentation are not touched."""

    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.target:
            return ast.copy_location(self.replacement, node)
        return self.generic_visit(node)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """What a node may become."""
    if isinstance(node, ast.Compare):
        for other in COMPARISONS[type(node.ops[0])]:
            yield ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        if not _is_annotation(node):
            yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield ast.BoolOp(other, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.AugAssign | ast.Continue):
        yield ast.Pass()
    elif isinstance(node, ast.If):
        yield ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        yield ast.If(ast.Constant(False), node.body, node.orelse)


def _is_annotation(node: ast.BinOp) -> bool:
    """Whether this is ``X | None``, which means nothing when a module runs."""
    texts = (ast.unparse(node.left), ast.unparse(node.right))
    return isinstance(node.op, ast.BitOr) and any("None" in t or t[0].isupper() for t in texts)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from changed code."""

    def __init__(self, module: str, code: CodeType) -> None:
        self.module, self.code = module, code

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        return importlib.util.spec_from_loader(name, self, origin=self.code.co_filename)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


@dataclass(slots=True)
class Trial:
    """Tests that mutants of a module are put to."""

    module: str
    tests: Sequence[str]
    examples: int | None = None
    """How many examples a property is tried with, where it does not say so itself."""
    killers: list[str] = field(default_factory=list)
    """Tests that have failed on a mutant, the last one first."""

    def survives(self, code: CodeType | None, seconds: float) -> bool:
        """Whether no test fails with a changed module (or, without code, with the real one)."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            os._exit(_test(self, code, write))
        os.close(write)
        status = _wait(child, seconds)
        with os.fdopen(read) as pipe:
            failed = pipe.read().strip()
        if failed:
            self.killers = [failed, *(each for each in self.killers if each != failed)]
        return status == 0


def _wait(child: int, seconds: float) -> int | None:
    """How a process ended; None if it had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Hurry:
    """Lets pytest run the likeliest tests first, and say which has failed."""

    def __init__(self, trial: Trial, pipe: int) -> None:
        self.rank = {test: number for number, test in enumerate(trial.killers)}
        self.examples = trial.examples
        self.pipe = pipe

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        # A smaller example would take its time and tell nothing more.
        phases = (Phase.explicit, Phase.generate)
        examples = self.examples or settings().max_examples
        settings.register_profile("hurry", settings(), phases=phases, max_examples=examples)
        settings.load_profile("hurry")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.rank.get(item.nodeid, len(self.rank)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self.pipe, f"{report.nodeid}\n".encode())


def _test(trial: Trial, code: CodeType | None, pipe: int) -> int:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if code is not None:
        sys.meta_path.insert(0, _Loader(trial.module, code))
    options = ["-x", "-q", "--numprocesses=0", "-p", "no:cacheprovider", "--hypothesis-seed=1"]
    # Whoever waits for this process sees to the time.
    options += ["--timeout=0"]
    # Hypothesis is imported before pytest can rewrite its assertions, which changes nothing here.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *trial.tests], plugins=[_Hurry(trial, pipe)]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: every mutant of a module, and which have survived."""
    parser = argparse.ArgumentParser(prog="python -m conformance.mutation", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--every", type=int, default=1, help="try one mutant of so many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--examples", type=int, help="of a property; fewer are quicker, and let more survive"
    )
    parser.add_argument("--again", help="a file with what a run printed: try no other mutants")
    parser.add_argument(
        "--seconds", type=float, help="that the tests may take; 5 times what they need by default"
    )
    chosen = parser.parse_args(arguments)
    for once in IMPORTED_ONCE:
        importlib.import_module(once)
    spec = importlib.machinery.PathFinder.find_spec(*_where(chosen.module))
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as stream:
        source = stream.read()
    begun = time.monotonic()
    trial = Trial(chosen.module, chosen.tests, chosen.examples)
    if not trial.survives(None, chosen.seconds or 600):
        parser.error("the tests fail without any change")
    limit = chosen.seconds or 10 + 5 * (time.monotonic() - begun)
    tried = survived = 0
    wanted = _printed(chosen.again)
    for mutant in list(mutants(source, spec.origin))[chosen.first :: chosen.every]:
        line = f"{chosen.module}:{mutant.line}: {mutant.change}"
        if wanted and line not in wanted:
            continue
        tried += 1
        if trial.survives(mutant.code, limit):
            survived += 1
            print(line, flush=True)
    seconds = time.monotonic() - begun
    print(f"{chosen.module}: {tried} mutants in {seconds:.0f} s, {survived} survived")
    return 0


def _printed(file: str | None) -> frozenset[str]:
    """The lines that an earlier run printed."""
    if file is None:
        return frozenset()
    with open(file) as stream:
        return frozenset(stream.read().splitlines())


def _where(module: str) -> tuple[str, list[str]]:
    """What `PathFinder` takes to find a module without importing its package."""
    return module, [os.path.join(os.getcwd(), *module.split(".")[:-1])]


if __name__ == "__main__":
    sys.exit(main())
