"""Mutants are made of every kind of expression, and tests are found out that notice none."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.mutation import main, mutants

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


def test_tests_that_notice_nothing_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clip.py").write_text(SOURCE)
    (tmp_path / "test_good.py").write_text(
        "import clip\n\ndef test():\n    assert [clip.clip(x) for x in (-1, 0, 10, 11)] == "
        "[0, 0, 10, 10]\n"
    )
    (tmp_path / "test_blind.py").write_text("import clip\n\ndef test():\n    assert clip.clip\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for tests, survived in (("test_good.py", 0), ("test_blind.py", 2)):
        assert main(["clip", tests, "--every", "5", "--seconds", "20"]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("clip: 2 mutants in") and last.endswith(f"{survived} survived")
