"""How much a user writes for the loop that docs/runs.md begins with."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
MOST = 6


def test_the_loop_takes_six_lines() -> None:
    (first, *_) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = (node for node in ast.parse(first).body if isinstance(node, ast.With))
    # A statement is a line, however it is broken.
    lines = [ast.unparse(node).splitlines()[0] for node in ast.walk(block) if _is_line(node)]
    assert lines.count("loss = train(state)") == 1
    assert len(lines) - 1 <= MOST, lines


def _is_line(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt)
