"""Mutants are made of every kind of expression, and tests are found out that notice none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conformance.mutation import mutants

ROOT = Path(__file__).parents[2]

SOURCE = """
def clip(x, low=0):
    if x < low and True:
        return low
    return min(x, low + 10)
"""


def test_every_change_is_made_once() -> None:
    changes = [mutant.change for mutant in mutants(SOURCE, "clip.py")]
    assert len(changes) == len(set(changes)) == 10
    assert {"x < low -> x <= low", "x < low -> x >= low", "low + 10 -> low - 10"} <= set(changes)
    assert {"min -> max", "10 -> 11", "0 -> 1", "True -> False"} <= set(changes)
    results = []
    for mutant in mutants(SOURCE, "clip.py"):
        found: dict = {}
        exec(mutant.code, found)
        results.append([found["clip"](x) for x in (-1, 0, 10, 11)])
    assert sum(result == [0, 0, 10, 10] for result in results) == 1, "x <= low changes nothing"


def test_tests_that_notice_nothing_are_found_out(tmp_path: Path) -> None:
    (tmp_path / "clip.py").write_text(SOURCE)
    (tmp_path / "test_good.py").write_text(
        "import clip\n\ndef test():\n    assert [clip.clip(x) for x in (-1, 0, 10, 11)] == "
        "[0, 0, 10, 10]\n"
    )
    (tmp_path / "test_blind.py").write_text("import clip\n\ndef test():\n    assert clip.clip\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for tests, survived in (("test_good.py", 0), ("test_blind.py", 2)):
        # A process of its own: it forks, which one that other tests have used may not survive.
        command = [sys.executable, "-m", "conformance.mutation", "clip", tests]
        done = subprocess.run(
            [*command, "--every", "5", "--seconds", "20"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        last = done.stdout.splitlines()[-1]
        assert last.startswith("clip: 2 mutants in") and last.endswith(f"{survived} survived")
    (tmp_path / "printed").write_text("clip:3: True -> False\nclip: 2 mutants\n")
    command = [sys.executable, "-m", "conformance.mutation", "clip", "test_good.py"]
    done = subprocess.run(
        [*command, "--again", "printed"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("clip: 1 mutants in") and done.stdout.endswith("0 survived\n")
