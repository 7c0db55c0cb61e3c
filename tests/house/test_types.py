"""Type checkers of those who use xckpt know the types of its names, attributes included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KNOWN = 0.975
"""The part whose types are known; the packages of trainers' classes are not installed here."""


@pytest.mark.thorough
def test_types_are_stated() -> None:
    folder = Path(sys.executable).parent
    # It finds the packages that xckpt imports by the interpreter that is the first on the path.
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    arguments = ["--verifytypes", "xckpt", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        [folder / "pyright", *arguments], env=environment, stdout=subprocess.PIPE, check=False
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    names = {each["name"] for each in found["symbols"]}
    assert "xckpt.storage.checkpoint.Checkpoint.manifest" in names
    assert found["completenessScore"] >= KNOWN
