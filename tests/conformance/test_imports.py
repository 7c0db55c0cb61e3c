"""The suite needs NumPy and Hypothesis; only what it judges may need more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.house.test_imports import imports_of, module_name

ROOT = Path(__file__).parent.parent.parent

MAY_IMPORT = {"numpy", "hypothesis", "ml_dtypes", "conformance", *sys.stdlib_module_names}

ALSO = {
    "conformance.reader": {"zarr", "xxhash"},
    "conformance.strict_reader": {"zarr"},
}
"""The independent reader of the format reads chunks with zarr-python and digests them."""


def foreign(module: str, source: str) -> set[str]:
    """What a module of the suite imports that it may not."""
    if module.startswith("conformance.implementations"):
        return set()
    allowed = MAY_IMPORT | ALSO.get(module, set())
    found = set(imports_of(module, source, {"conformance": ""}))
    implementations = {name for name in found if name.startswith("conformance.implementations")}
    return {name for name in found if name.split(".")[0] not in allowed} | implementations


def test_the_suite_imports_numpy_and_hypothesis_alone() -> None:
    paths = sorted((ROOT / "conformance").rglob("*.py"))
    assert len(paths) > 5
    found = {
        str(path): names
        for path in paths
        if (names := foreign(module_name(path, ROOT), path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "module, source, noticed",
    [
        ("conformance.cases", "import torch", True),
        ("conformance.cases", "def f():\n    import xckpt.core.geometry.box", True),
        ("conformance.cases", "import zarr", True),
        ("conformance.cases", "from conformance.implementations import xckpt", True),
        ("conformance.reader", "import xckpt", True),
        ("conformance.reader", "import zarr", False),
        ("conformance.cases", "import numpy as np, json", False),
        ("conformance.implementations.orbax", "import orbax", False),
    ],
)
def test_the_contract_notices(module: str, source: str, noticed: bool) -> None:
    assert bool(foreign(module, source)) == noticed


def test_the_suite_starts_without_any_framework() -> None:
    code = (
        "import sys, conformance.laws.properties, conformance.__main__\n"
        "heavy = {'xckpt', 'torch', 'jax', 'tensorstore', 'zarr', 'orbax'}\n"
        "assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(BLOCKED))  # so an import of them raises
from conformance.__main__ import main
sys.exit(main(["--impl", "conformance.implementations.simple", "--examples", "2", "--seed", "1"]))
"""


def test_the_suite_runs_with_numpy_and_hypothesis_alone() -> None:
    needed = {"numpy", "hypothesis", "sortedcontainers", "attr", "attrs"}
    installed = {name for name in packages_distributions() if "hypothesis" not in name}
    blocked = sorted({*installed, "xckpt"} - needed)
    assert {"torch", "jax", "zarr", "xxhash", "ml_dtypes", "pytest"} <= set(blocked)
    command = [sys.executable, "-c", WITHOUT.replace("BLOCKED", repr(blocked))]
    # What else is installed may have plugins for Hypothesis, which it would import.
    alone = {**os.environ, "HYPOTHESIS_NO_PLUGINS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reshard          |      2 |       0 |      0 | passed" in done.stdout
