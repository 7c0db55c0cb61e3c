"""What is packaged: the wheel has the package and its data, the sdist can run its own tests.

The builders only list what they would pack; nothing is built.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import xckpt

ROOT = Path(__file__).parents[2]
TESTED = ("xckpt", "tests", "conformance", "benchmarks", "examples", "spec", "docs")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def packed(builder: SdistBuilder | WheelBuilder) -> set[str]:
    """The files that a builder takes, relative to the root."""
    return {Path(file.relative_path).as_posix() for file in builder.recurse_included_files()}


def files(folder: str) -> set[str]:
    """The files of a folder, without what the interpreter and editors leave there."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def test_the_wheel_is_the_package() -> None:
    wheel = packed(WheelBuilder(str(ROOT)))
    assert wheel == files("xckpt")
    assert {"xckpt/py.typed", "xckpt/mapping/families/llama.toml"} <= wheel


def test_the_sdist_has_what_its_tests_need() -> None:
    sdist = packed(SdistBuilder(str(ROOT)))
    assert {file for folder in TESTED for file in files(folder)} <= sdist
    assert {"conftest.py", "Makefile", "README.md", "CHANGELOG.md", "LICENSE"} <= sdist


def test_the_version_is_written_once() -> None:
    assert WheelBuilder(str(ROOT)).metadata.version == xckpt.__version__
    pages = ["pyproject.toml", "CITATION.cff", "xckpt/__init__.py"]
    assert [page for page in pages if f'"{xckpt.__version__}"' in (ROOT / page).read_text()] == [
        "xckpt/__init__.py"
    ]


def test_the_contributors_guide_names_real_targets_and_files() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    called = re.findall(r"\bmake (?:PYTHON=\S+ )?([\w-]+)", guide)
    assert {"env", "lint", "test", "test-thorough"} <= set(called) <= TARGETS
    paths = re.findall(r"`((?:xckpt|tests|docs|spec)/[\w./-]+|[\w-]+\.(?:md|toml))`", guide)
    assert "xckpt/core/adapter.py" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_hosted_workflow_calls_real_targets() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    called = re.findall(r"target: \[?((?:[\w-]+(?:, )?)+)", workflow)
    targets = {name for names in called for name in names.split(", ")}
    assert {"test", "test-lowest", "test-xla", "test-thorough"} <= targets <= TARGETS


def test_the_forms_of_issues_ask_for_what_doctor_prints() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert [form.stem for form in forms] == ["bug", "slow"]
    for form in forms:
        _, question = form.read_text().split("    id: doctor\n")
        asked = question.split("  - type:")[0]
        assert "`xckpt doctor PATH`" in asked and "required: true" in asked
