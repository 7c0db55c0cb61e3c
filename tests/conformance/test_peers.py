"""What the suite found in its peers can be tried again, and the page shows what was printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from conformance import peers
from conformance.implementation import find
from conformance.outcome import Outcome
from conformance.peers import LAWS, PAGE, PARTS, PEERS, PRINTED, current, still_fails, table

ROOT = Path(__file__).parents[2]
KEPT = peers.found()
TEXT = PRINTED.read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
MODULES = {find(module).name: peer for peer, module in PEERS.items()}


def test_the_page_shows_what_was_printed() -> None:
    assert current(PAGE.read_text()) == TEXT


def test_the_table_has_every_law_and_every_peer_of_today() -> None:
    assert ROWS[0] == ["property", *MODULES]
    crashes = ["any-order", "crash-save", "crash-overwrite", "crash-delete", "save-after-crash"]
    assert [row[0] for row in ROWS[1:]] == [*LAWS, *crashes]
    assert len(PARTS) == 5


def test_every_failure_in_the_table_is_explained() -> None:
    xckpt, *others = MODULES.values()
    for law, own, *cells in ROWS[1:]:
        assert re.fullmatch(r"\d+ / 0 / 0", own), f"{xckpt}, {law}: {own}"
        for peer, cell in zip(others, cells, strict=True):
            assert "**" not in cell or law in peers.known(peer), f"{peer}, {law}"


def test_every_peer_has_a_case_that_fails() -> None:
    assert {document["module"] for document in KEPT.values()} == {*PEERS.values()} - {
        PEERS["xckpt"]
    }
    for name, document in KEPT.items():
        assert document["reason"] and document["law"] in document["laws"], name
        assert name == f"{MODULES[document['peer']]}-{document['law']}", "of another version"


def apart(document: Mapping[str, Any]) -> str:
    """`still_fails` in a process of its own: what a peer leaves behind when it fails belongs to no
    test.

    Orbax, for one, leaves reads under way whose event loop is closed.
    """
    script = (
        "import json, sys; from conformance.peers import still_fails; "
        "print('\\n' + json.dumps(still_fails(json.load(sys.stdin))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(
        command, input=json.dumps(document), capture_output=True, text=True, check=True, cwd=ROOT
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if found["module"] == PEERS["orbax"] else ())
        for name, found in KEPT.items()
    ],
)
def test_what_was_found_still_fails_or_is_fixed(name: str) -> None:
    document = KEPT[name]
    error = apart(document) if document["module"] == PEERS["orbax"] else still_fails(document)
    if document["fixed_in"] is None:
        kind = document["error"].partition(":")[0]
        assert error.startswith(f"{kind}:"), f"{document['peer']} has mended {name}"
    else:
        assert error == ""


@pytest.mark.parametrize("name", [name for name in KEPT if KEPT[name]["law"] in LAWS])
def test_xckpt_passes_what_a_peer_fails(name: str) -> None:
    assert still_fails(KEPT[name] | {"module": PEERS["xckpt"]}) == ""


def test_a_failure_stands_out_in_the_table() -> None:
    judged = {"a": ("one", [Outcome("law", 3, 2, 1)]), "b": ("two", [Outcome("law", 5)])}
    assert "| law | 3 / 2 / **1** | 5 / 0 / 0 |" in table(judged)


def test_an_unexplained_failure_is_listed() -> None:
    failed = Outcome("sound", failed=1, error="why", smallest="a case")
    judged = {"orbax": ("Orbax", [failed]), "torch-dcp": ("DCP", [Outcome("gaps", failed=1)])}
    assert peers.unexpected(judged) == ["Orbax, sound: why\na case"]
