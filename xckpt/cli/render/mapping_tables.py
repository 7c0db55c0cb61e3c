"""Mappings as rich tables, for a terminal: their rules, what they make, and what `infer` found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from xckpt.cli.render.tables import empty_table, escaped
from xckpt.cli.report import counted
from xckpt.core.text.printable import in_few
from xckpt.mapping.infer.fold import without_numbers
from xckpt.mapping.infer.infer import Inference
from xckpt.mapping.mapping import LeafMapping
from xckpt.mapping.rule import Rule

SHOWN_NAMES = 4
"""Names of one ambiguity that a table spells out; ``--json`` has them all."""


def rule_tables(mapping: LeafMapping) -> Iterator[RenderableType]:
    """A table for each step of a mapping.

    Example:
        >>> from xckpt.cli.render.tables import console
        >>> console().print(*rule_tables(LeafMapping([Rule("fc.weight", "fc/kernel")])))
        1 rule
        source     target     operations  type
        fc.weight  fc/kernel              bijection
    """
    columns = ("source", "target", "operations", "type")
    step: LeafMapping | None = mapping
    while step is not None:
        rows = [(*_rule_cells(rule), rule.exactness) for rule in step.rules]
        yield _titled(counted(len(rows), "rule"), columns, rows)
        step = step.following


def made_table(leaves: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line for each leaf that a mapping makes, from their JSON.

    Example:
        >>> from xckpt.cli.render.tables import console
        >>> leaf = {"name": "v", "dtype": "int8", "shape": [3], "sources": ["w"], "rule": "w -> v"}
        >>> console().print(made_table([leaf]))
        1 tensor
        target  tensor   made of  rule
        v       int8[3]  w        w -> v
    """
    rows = [
        (
            leaf["name"],
            f"{leaf['dtype']}{leaf['shape']}",
            in_few([source or "a constant" for source in leaf["sources"]], SHOWN_NAMES),
            leaf["rule"],
        )
        for leaf in leaves
    ]
    return _titled(counted(len(rows), "tensor"), ("target", "tensor", "made of", "rule"), rows)


def inference_tables(inference: Inference) -> Iterator[RenderableType]:
    """What is certain, assumed, ambiguous, left over; names that differ by a number are one.

    Example:
        >>> import numpy as np
        >>> from xckpt.cli.render.tables import console
        >>> from xckpt.mapping.infer.infer import infer
        >>> found = infer({"fc.weight": np.zeros((4, 2))}, {"fc": {"kernel": np.zeros((2, 4))}})
        >>> console().print(*inference_tables(found))
        1 certain, in 1 rule
        source     target     operations
        fc.weight  fc/kernel  transpose [1, 0]
    """
    rules = [_rule_cells(rule) for rule in inference.mapping.rules if not rule.assumes]
    title = f"{len(inference.certain):,} certain, in {counted(len(rules), 'rule')}"
    yield _titled(title, ("source", "target", "operations"), rules)
    assumed = [(*_rule_cells(rule), rule.assumes) for rule in inference.mapping.assumed]
    if assumed:
        title = f"\n{len(inference.assumed):,} assumed, in {counted(len(assumed), 'rule')}"
        yield _titled(title, ("source", "target", "operations", "what is assumed"), assumed)
    doubts = (
        (_folded(doubt.sources), _folded(doubt.targets), doubt.reason)
        for doubt in inference.ambiguous
    )
    columns = ("source", "target", "why nothing was chosen", "leaves")
    yield from _counted(f"{len(inference.ambiguous):,} ambiguous", columns, doubts)
    unmatched = inference.unmatched
    for side, left in (("source", unmatched.source), ("target", unmatched.target)):
        reasons = (tuple(map(without_numbers, pair)) for pair in left.items())
        columns = ("name", "what is known", "leaves")
        yield from _counted(f"{len(left):,} left over of the {side}", columns, reasons)


def _rule_cells(rule: Rule) -> tuple[str, str, str]:
    return " + ".join(rule.source), " + ".join(rule.target), "; ".join(map(str, rule.operations))


def _folded(names: Iterable[str]) -> str:
    return in_few(list(dict.fromkeys(map(without_numbers, names))), SHOWN_NAMES)


def _counted(
    title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]
) -> Iterator[RenderableType]:
    """A table of the distinct rows, each with how often it is there; nothing if there are none."""
    counts = Counter(rows)
    if counts:
        yield _titled(f"\n{title}", columns, [(*row, str(n)) for row, n in counts.items()])


def _titled(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A title, and below it a table where there are rows."""
    if not rows:
        return Text(title, "bold")
    table = empty_table(*columns)
    for row in rows:
        table.add_row(*map(escaped, row))
    return Group(Text(title, "bold"), table)
