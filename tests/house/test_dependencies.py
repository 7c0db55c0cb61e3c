"""What pyproject.toml admits is what is tried: its lowest releases, those of the tests, no more.

A fresh interpreter that finds no package but the core dependencies stands for an install
without extras.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HIDE_EXTRAS = """
import sys
known = {"xckpt", *sys.argv[1].split(), *sys.stdlib_module_names}
class Known:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        return self.finder.find_spec(name, *more) if name.split(".")[0] in known else None
sys.meta_path[:] = map(Known, sys.meta_path)
"""


def pinned(file: str) -> dict[str, Version]:
    """Name -> the one version that a file of constraints has of it."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if "==" in line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("-", "_"): Version(version) for name, version in pairs}


def requirements() -> list[Requirement]:
    """What xckpt needs, and what its extras for users do."""
    extras = PROJECT["optional-dependencies"]
    names = ("cli", "torch", "jax", "zarr", "plot", "buckets")
    texts = [*PROJECT["dependencies"], *(text for name in names for text in extras[name])]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_lowest_release_is_the_one_that_is_tried(requirement: Requirement) -> None:
    floors = [each.version for each in requirement.specifier if each.operator == ">="]
    assert [pinned("tests/lowest.txt")[requirement.name.lower()]] == [Version(v) for v in floors]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_tests_use_a_release_that_is_admitted(requirement: Requirement) -> None:
    assert pinned("tests/constraints.txt")[requirement.name.lower()] in requirement.specifier


def core_install(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script where nothing but xckpt and its core dependencies can be imported."""
    names = " ".join(Requirement(text).name for text in PROJECT["dependencies"])
    command = [sys.executable, "-c", HIDE_EXTRAS + script, names]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_core_install_saves_loads_and_converts(tmp_path: Path) -> None:
    done = core_install(f"""
import numpy as np, xckpt, xckpt.convert
xckpt.save({str(tmp_path / "a")!r}, {{"w": np.arange(6), "step": 3}})
xckpt.convert.convert({str(tmp_path / "a")!r}, {str(tmp_path / "b")!r})
print(xckpt.load({str(tmp_path / "b")!r})["w"].sum(), xckpt.open({str(tmp_path / "a")!r}).verify())
""")
    assert (done.stdout, done.stderr) == ("15 []\n", "")


def test_the_console_script_of_a_core_install_names_the_extra() -> None:
    done = core_install("from xckpt.cli import main; main()")
    assert (done.returncode, done.stdout) == (2, "")  # 1 would say that something is damaged
    assert done.stderr == (
        "xckpt: the command line needs click and rich: pip install 'xckpt[cli]'\n"
    )


def test_a_framework_that_is_missing_names_the_extra(tmp_path: Path) -> None:
    done = core_install(f"""
import xckpt
xckpt.save({str(tmp_path / "a")!r}, {{"step": 3}})
try:
    xckpt.load({str(tmp_path / "a")!r}, framework="jax")
except ImportError as error:
    print(error)
""")
    wanted = "framework='jax' needs jax, which is not installed: pip install 'xckpt[jax]'\n"
    assert (done.stdout, done.stderr) == (wanted, "")


def test_a_core_install_has_no_extras() -> None:
    for name in ("click", "rich", "torch", "jax", "zarr", "obstore"):
        assert f"No module named '{name}'" in core_install(f"import {name}").stderr


def test_a_hook_without_its_trainer_names_what_to_install() -> None:
    done = core_install("""
from xckpt.integrations.lightning import XckptCheckpointIO
from xckpt.integrations.torchtitan import XckptManager
for make in (XckptCheckpointIO, lambda: XckptManager.Config(enable=True)):
    try:
        make()
    except ImportError as error:
        print(error)
""")
    first, second = done.stdout.splitlines()
    assert first.startswith("XckptCheckpointIO needs lightning: pip install -U lightning (")
    assert second.startswith("Config needs torchtitan: pip install -U torchtitan (")
    assert done.stderr == ""
