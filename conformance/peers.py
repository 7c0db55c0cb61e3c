"""``python -m conformance.peers``: this project and its peers by the same laws, in one table.

1. Each is judged in a separate process, by every law that is not about files of this format.
2. A cell says how many cases passed / were refused / failed, or that all were refused.
3. What a peer is known to fail is in ``conformance/found/PEER-LAW.json``: its version, the laws
   that fail, the reason, and the smallest case. A failure that is in no such file, or one of this
   project's own, makes the exit code 1. `still_fails` tries a file's case again.
4. What is printed is kept in ``conformance/peers.md`` and goes into a page between two marks,
   with ``--write``. ``--keep`` writes the smallest cases again; people write the reasons.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from conformance.cases import from_json
from conformance.crash import crash, machine
from conformance.crash.recording import replay
from conformance.crash.scenarios import CHECKPOINT, STATES, found_at
from conformance.implementation import Implementation, Refused, find
from conformance.judge import message
from conformance.laws import damage, properties, refusals
from conformance.outcome import Outcome

__all__ = ["FOUND", "PEERS", "PRINTED", "current", "found", "still_fails", "table"]

PEERS: Mapping[str, str] = {
    "xckpt": "conformance.implementations.xckpt",
    "torch-dcp": "conformance.implementations.torch_dcp",
    "orbax": "conformance.implementations.orbax",
    "safetensors": "conformance.implementations.safetensors",
}
"""The first one is this project."""

PARTS = (properties, refusals, damage, machine, crash)

LAWS: Mapping[str, properties.Law] = {**properties.LAWS, **refusals.LAWS, **damage.LAWS}

FOUND = Path(__file__).parent / "found"
PRINTED = Path(__file__).parent / "peers.md"
PAGE = Path(__file__).parent.parent / "docs" / "why" / "comparison.md"
BEGIN = "<!-- peers: make conformance -->\n"
END = "<!-- end of peers -->\n"

Judged = Mapping[str, tuple[str, Sequence[Outcome]]]
"""Peer -> its name with its version, and what came of every law."""


def table(judged: Judged) -> str:
    """Laws by implementations, as Markdown.

    Example:
        >>> one, other = [Outcome("reshard", 8, 1, 1)], [Outcome("reshard", 0, 9)]
        >>> print(table({"a": ("A 1", one), "b": ("B 2", other)}))
        | property | A 1 | B 2 |
        |---|---|---|
        | reshard | 8 / 1 / **1** | not supported |
    """
    names = [name for name, _ in judged.values()]
    lines = [f"| property | {' | '.join(names)} |", f"|---{'|---' * len(judged)}|"]
    for row in zip(*(outcomes for _, outcomes in judged.values()), strict=True):
        lines.append(f"| {row[0].law} | {' | '.join(map(_cell, row))} |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    if not outcome.passed and not outcome.failed:
        return "not supported"
    failed = f"**{outcome.failed}**" if outcome.failed else "0"
    return f"{outcome.passed} / {outcome.refused} / {failed}"


def found() -> dict[str, dict[str, Any]]:
    """What is known to fail, by the name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOUND.glob("*.json"))}


def known(peer: str) -> dict[str, str]:
    """Law -> why a peer fails it."""
    documents = [each for each in found().values() if each["module"] == PEERS[peer]]
    return {
        law: document["reason"]
        for document in documents
        if document["fixed_in"] is None
        for law in document["laws"]
    }


def still_fails(document: Mapping[str, Any]) -> str:
    """What a case that was kept raises today; empty if nothing.

    Of a crash it is what a reader makes of the files that were left.
    """
    implementation = find(document["module"])
    if document["law"] in LAWS:
        try:
            LAWS[document["law"]](implementation, from_json(document["case"]))
        except Refused as refusal:
            return f"Refused: {refusal}"
        except Exception as error:
            return message(error)
        return ""
    case = document["case"]
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "left"
        replay(crash.image_from_json(case["left"]), left)
        finds = found_at(implementation, left / CHECKPOINT, STATES[case["form"]])
    return document["error"] if finds == case["found"] else ""


def unexpected(judged: Judged) -> list[str]:
    """A line for every failure without an explanation, and for what should fail and did not."""
    lines: list[str] = []
    for peer, (name, outcomes) in judged.items():
        explained = known(peer)
        for outcome in outcomes:
            if outcome.failed and outcome.law not in explained:
                lines.append(f"{name}, {outcome.law}: {outcome.error}\n{outcome.smallest}")
    return lines


def notes(judged: Judged) -> Iterator[str]:
    """Why cells of the table are as they are, as Markdown."""
    where = "`conformance/found` has the smallest case of each"
    yield f"Failures that are expected, by reason; {where}:"
    yield ""
    for peer, (name, outcomes) in judged.items():
        reasons: dict[str, list[str]] = {}
        explained = known(peer)
        for outcome in outcomes:
            if outcome.failed and outcome.law in explained:
                reasons.setdefault(explained[outcome.law], []).append(outcome.law)
        yield from (f"- {name}: {why} ({', '.join(laws)})" for why, laws in reasons.items())
    yield ""
    yield "What is refused, by reason:"
    yield ""
    for name, outcomes in judged.values():
        refused = sum((outcome.refusals for outcome in outcomes), Counter[str]())
        said = [f"{why} ({count:,})" for why, count in refused.most_common()]
        if said:
            yield f"- {name}: {'; '.join(said)}"


def printed(judged: Judged, examples: int, seed: int) -> str:
    """All of it: what `main` prints, and what the page shows."""
    head = f"{examples} cases a property, seed {seed}; passed / refused / failed:"
    return "\n".join([head, "", table(judged), "", *notes(judged), ""])


def current(page: str, begin: str = BEGIN, end: str = END) -> str:
    """What the page has between the marks."""
    return page.split(begin, 1)[1].split(end, 1)[0]


def updated(page: str, section: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with this between the marks."""
    before, rest = page.split(begin, 1)
    return f"{before}{begin}{section}{end}{rest.split(end, 1)[1]}"


def _is_first(peer: str, law: str) -> bool:
    """Whether no other law's case is kept for what makes this one fail."""
    documents = [each for each in found().values() if each["module"] == PEERS[peer]]
    return not any(law in each["laws"] and law != each["law"] for each in documents)


def _keep(peer: str, implementation: Implementation, outcome: Outcome) -> Path:
    """Write the smallest failing case; a file that is there keeps its laws and its reason."""
    path = FOUND / f"{peer}-{outcome.law}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    document = {
        "peer": implementation.name,
        "module": PEERS[peer],
        "law": outcome.law,
        "laws": before.get("laws", [outcome.law]),
        "reason": before.get("reason", ""),
        "error": outcome.error,
        "fixed_in": None,
        "case": outcome.case,
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def judge(module: str, examples: int, seed: int) -> tuple[str, list[Outcome]]:
    """One implementation by all laws."""
    implementation = find(module)
    outcomes = [
        outcome
        for part in PARTS
        for outcome in part.run(implementation, examples=examples, seed=seed)
    ]
    return implementation.name, outcomes


def _judge_all(peers: Sequence[str], examples: int, seed: int) -> Judged:
    workers = min(len(peers), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        futures = {peer: pool.submit(judge, PEERS[peer], examples, seed) for peer in peers}
        return {peer: future.result() for peer, future in futures.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if a failure has no explanation."""
    parser = argparse.ArgumentParser(prog="python -m conformance.peers", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="cases a law")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--peer", action="append", choices=[*PEERS], help="judge these alone")
    parser.add_argument("--keep", action="store_true", help="write the smallest failing cases")
    parser.add_argument("--write", action="store_true", help="show the table in the page")
    chosen = parser.parse_args(arguments)
    judged = _judge_all(chosen.peer or [*PEERS], chosen.examples, chosen.seed)
    for peer, (_, outcomes) in judged.items():
        for outcome in outcomes:
            if chosen.keep and outcome.case is not None and _is_first(peer, outcome.law):
                _keep(peer, find(PEERS[peer]), outcome)
    text = printed(judged, chosen.examples, chosen.seed)
    print(text)
    if chosen.write:
        PRINTED.write_text(text)
        PAGE.write_text(updated(PAGE.read_text(), text))
    wrong = unexpected(judged)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
