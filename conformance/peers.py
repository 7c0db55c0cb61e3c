"""``python -m conformance.peers``: this project and its peers by the same laws, in one table.

Each cell says how many cases passed / were refused / failed, or that all were refused. With
``--keep`` the smallest failing case of each error goes to
``conformance/found/PEER-LAW.json``, with its peer's version; `still_fails` tries it again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import properties, refusals
from conformance.cases import from_json
from conformance.implementation import Implementation, Refused, find
from conformance.outcome import Outcome

__all__ = ["FOUND", "PEERS", "still_fails", "table"]

PEERS: Mapping[str, str] = {
    "xckpt": "conformance.implementations.xckpt",
    "torch DCP": "conformance.implementations.torch_dcp",
    "Orbax": "conformance.implementations.orbax",
}

LAWS: Mapping[str, properties.Law] = {**properties.LAWS, **refusals.LAWS}

FOUND = Path(__file__).parent / "found"


def table(judged: Mapping[str, Sequence[Outcome]]) -> str:
    """Laws by implementations, as Markdown.

    Example:
        >>> print(table({"A": [Outcome("reshard", 8, 1, 1)], "B": [Outcome("reshard", 0, 9)]}))
        | property | A | B |
        |---|---|---|
        | reshard | 8 / 1 / **1** | not supported |
    """
    lines = [f"| property | {' | '.join(judged)} |", f"|---{'|---' * len(judged)}|"]
    for row in zip(*judged.values(), strict=True):
        lines.append(f"| {row[0].law} | {' | '.join(map(_cell, row))} |")
    return "\n".join(lines)


def _cell(outcome: Outcome) -> str:
    if not outcome.passed and not outcome.failed:
        return "not supported"
    failed = f"**{outcome.failed}**" if outcome.failed else "0"
    return f"{outcome.passed} / {outcome.refused} / {failed}"


def still_fails(document: Mapping[str, Any]) -> str:
    """What a case that was kept raises today; empty if nothing."""
    implementation = find(document["module"])
    try:
        LAWS[document["law"]](implementation, from_json(document["case"]))
    except Refused as refusal:
        return f"Refused: {refusal}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _keep(peer: str, implementation: Implementation, outcome: Outcome) -> Path:
    document = {
        "peer": implementation.name,
        "module": PEERS[peer],
        "law": outcome.law,
        "error": outcome.error,
        "fixed_in": None,
        "case": outcome.case,
    }
    path = FOUND / f"{PEERS[peer].rpartition('.')[2].replace('_', '-')}-{outcome.law}.json"
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 if this project itself failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance.peers", description=__doc__)
    parser.add_argument("--examples", type=int, default=100, metavar="N", help="cases a law")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--keep", action="store_true", help="keep the smallest failing cases")
    chosen = parser.parse_args(arguments)
    judged: dict[str, list[Outcome]] = {}
    notes: list[str] = []
    for peer, module in PEERS.items():
        implementation = find(module)
        name = implementation.name
        print(f"{name} ...", file=sys.stderr, flush=True)
        judged[name] = [
            outcome
            for part in (properties, refusals)
            for outcome in part.run(implementation, examples=chosen.examples, seed=chosen.seed)
        ]
        refused = sum((outcome.refusals for outcome in judged[name]), Counter[str]())
        notes += [f"{name} refused {count}: {why}" for why, count in refused.most_common()]
        kept: set[str] = set()
        for outcome in judged[name]:
            notes += [f"{name}, {outcome.law}: {outcome.error}"] if outcome.failed else []
            if chosen.keep and outcome.failed and outcome.error not in kept:
                kept.add(outcome.error)
                notes.append(f"  kept in {_keep(peer, implementation, outcome)}")
    print(f"{chosen.examples} cases a law, seed {chosen.seed}; passed / refused / failed:\n")
    print(table(judged), *notes, sep="\n")
    return 1 if any(outcome.failed for outcome in next(iter(judged.values()))) else 0


if __name__ == "__main__":
    sys.exit(main())
