"""The figures in the README are those of the results that are kept beside the benchmarks."""

from __future__ import annotations

import json

from benchmarks import readme


def test_the_readme_shows_the_results_that_are_kept() -> None:
    results = json.loads(readme.RESULTS.read_text())
    assert readme.current(readme.README.read_text()) == readme.section(results)


def test_a_changed_figure_changes_the_readme() -> None:
    results = json.loads(readme.RESULTS.read_text())
    results["speed"]["xckpt, torch"]["median"]["save"] *= 2
    text = readme.README.read_text()
    assert readme.updated(text, results) != text
