"""``python -m conformance.runs.peers``: this project's manager and its peers' by the same promises.

1. Each is judged in a separate process by all laws of `conformance.runs.promises`.
2. What a manager is known to break is in ``conformance/runs/known.json``: its name with the
   version, and for each law the reason. A failure that has none there makes the exit code 1.
3. What is printed is kept in ``conformance/runs/managers.md`` and goes into a page between two
   marks, with ``--write``; and in short into the README (`conformance.runs.in_short`).

``--judge MODULE`` judges any other manager: a module that has a ``MANAGER``. ``--trainers`` judges
those of trainers, which have an environment of their own (``make judge-trainers``), in a table of
their own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from conformance.outcome import Outcome
from conformance.peers import PAGE, updated
from conformance.peers import table as peers_table
from conformance.runs import in_short
from conformance.runs.manager import find
from conformance.runs.promises import run

__all__ = ["KNOWN", "MANAGERS", "TRAINERS", "Table", "known", "main", "printed"]

KNOWN = Path(__file__).parent / "known.json"


@dataclass(frozen=True, slots=True)
class Table:
    """Managers that are judged together."""

    modules: Mapping[str, str]
    printed: Path
    """The file that has what was printed of them."""
    begin: str
    end: str
    """The marks in the page."""


def _table(names: Sequence[str], title: str, made_by: str) -> Table:
    modules = {name: f"conformance.implementations.managers.{name}" for name in names}
    begin, end = f"<!-- {title}: {made_by} -->\n", f"<!-- end of {title} -->\n"
    return Table(modules, Path(__file__).parent / f"{title}.md", begin, end)


MANAGERS = _table(["xckpt", "orbax"], "managers", "make conformance")
"""The first one is this project's."""

TRAINERS = _table(
    ["torchtitan:disabled", "torchtitan:async", "lightning"], "trainers", "make judge-trainers"
)

Judged = Mapping[str, tuple[str, Sequence[Outcome]]]
"""Module -> the manager's name with its version, and what came of each law."""


def known() -> dict[str, dict[str, str]]:
    """Manager's name with its version -> law -> why it breaks it."""
    return json.loads(KNOWN.read_text())


def judge(module: str, examples: int, seed: int, only: str = "") -> tuple[str, list[Outcome]]:
    """One manager by all laws."""
    return find(module).name, list(run(module, examples=examples, seed=seed, only=only))


def unexplained(judged: Judged) -> Iterator[str]:
    """A line for every failure without a reason."""
    for name, outcomes in judged.values():
        for outcome in outcomes:
            if outcome.failed and outcome.law not in known().get(name, {}):
                yield f"{name}, {outcome.law}: {outcome.error}"


def printed(judged: Judged, examples: int, seed: int) -> str:
    """The table and its reasons, as Markdown."""
    lines = [
        f"{examples} power cuts, seed {seed}; cases kept / refused / broken:",
        "",
        peers_table(judged).replace("| property |", "| promise |", 1),
        "",
    ]
    for name, outcomes in judged.values():
        reasons = known().get(name, {})
        for outcome in outcomes:
            if outcome.failed:
                lines.append(f"- {name}, {outcome.law}: {reasons.get(outcome.law, outcome.error)}")
            lines += [f"- {name}, {outcome.law}: refused, {why}" for why in outcome.refusals]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conformance.runs.peers", description=__doc__)
    parser.add_argument("--examples", type=int, default=200, metavar="N", help="power cuts")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--judge", action="append", metavar="MODULE", help="judge these alone")
    parser.add_argument("--trainers", action="store_true", help="judge those of trainers")
    parser.add_argument("--promise", default="", metavar="NAME", help="by this one alone")
    parser.add_argument("--write", action="store_true", help="show the table in the page")
    chosen = parser.parse_args(arguments)
    table = TRAINERS if chosen.trainers else MANAGERS
    modules = chosen.judge or [*table.modules.values()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        futures = {
            module: pool.submit(judge, module, chosen.examples, chosen.seed, chosen.promise)
            for module in modules
        }
        judged = {module: future.result() for module, future in futures.items()}
    text = printed(judged, chosen.examples, chosen.seed)
    print(text)
    if chosen.write:
        table.printed.write_text(text)
        PAGE.write_text(updated(PAGE.read_text(), text, table.begin, table.end))
        in_short.main()
    wrong = list(unexplained(judged))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
