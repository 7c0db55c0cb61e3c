"""What the suite found in its peers is there to be tried again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.implementation import find
from conformance.outcome import Outcome
from conformance.peers import FOUND, PEERS, still_fails, table

KEPT = sorted(FOUND.glob("*.json"))


def test_something_is_kept() -> None:
    assert KEPT


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_was_found_still_fails_or_is_fixed(path: Path) -> None:
    document = json.loads(path.read_text())
    error = still_fails(document)
    if document["fixed_in"] is None:
        kind = document["error"].partition(":")[0]
        assert error.startswith(f"{kind}:"), f"{find(document['module']).name} has mended {path}"
    else:
        assert error == ""


def test_xckpt_passes_what_a_peer_fails() -> None:
    for path in KEPT:
        document = json.loads(path.read_text())
        assert still_fails(document | {"module": PEERS["xckpt"]}) == ""


def test_a_failure_stands_out_in_the_table() -> None:
    printed = table({"one": [Outcome("law", 3, 2, 1)], "two": [Outcome("law", 5)]})
    assert "| law | 3 / 2 / **1** | 5 / 0 / 0 |" in printed
